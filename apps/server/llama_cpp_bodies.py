"""This module defines the request bodies of llama.cpp's endpoints. If a body has a field that the server does
not know, the server refuses the request, as for the bodies in bodies.py."""

from typing import Annotated

from msgspec import Meta, Struct

from .bodies import Text

Model = Annotated[
    str | None, Meta(description="NAME, as GET /v1/models lists it; null: the server's first model.")
]
# the maximum number of characters of a text to tokenize, because other requests wait for the tokenizer
MOST_CHARACTERS = 2**18
MOST_TOKENS = 2**18


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize. add_special: if true, begin with the BOS token, if the model has one.
    parse_special: if true or null, read the names of special tokens in the text as these tokens. with_pieces:
    if true, also return the text of each token."""

    content: Annotated[str, Meta(max_length=MOST_CHARACTERS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: Model = None


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MOST_TOKENS)]
    model: Model = None


class ExtraFile(Struct, forbid_unknown_fields=True):
    """A file that the model reads before the text to be filled in."""

    text: str
    filename: str | None = None


class InfillBody(Struct, forbid_unknown_fields=True):
    """The body of POST /infill. prompt: a text that stands after `input_prefix` and before the text that the
    model writes.
    n_predict: the maximum number of tokens of the reply; below 1: the server's own maximum, or else all free
    tokens of the context."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=64)] | None = None
    prompt: str | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stop: Annotated[list[Text], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    model: Model = None

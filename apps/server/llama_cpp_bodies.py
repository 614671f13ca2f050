"""Request bodies of llama.cpp's endpoints: strict, as those of bodies.py."""

from typing import Annotated

from msgspec import Meta, Struct

from .bodies import Text

Model = Annotated[
    str | None, Meta(description="NAME, as GET /v1/models lists it; null: the server's first model.")
]
MOST_CHARACTERS = 2**18  # of a text to tokenize: others wait for the tokenizer meanwhile
MOST_TOKENS = 2**18


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """The body of POST /tokenize. add_special: begin with the BOS token, if the model has one. parse_special:
    the names of special tokens in the text are those tokens. with_pieces: tell each token's text, too."""

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
    """A text that the model reads before the gap."""

    text: str
    filename: str | None = None


class InfillBody(Struct, forbid_unknown_fields=True):
    """The body of POST /infill. prompt: more of the text before the gap. n_predict: the longest reply; -1:
    what there is room for."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=64)] | None = None
    prompt: str | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    stop: Annotated[list[Text], Meta(max_length=16)] | None = None
    seed: Annotated[int, Meta(ge=-1, le=2**53)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    model: Model = None

"""Request bodies of llama.cpp's endpoints: strict, as those of bodies.py."""

from typing import Annotated

from msgspec import Meta, Struct

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

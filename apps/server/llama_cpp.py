"""This module answers requests of clients of llama.cpp's server: POST /tokenize and /detokenize, GET /props
and /slots."""

from collections.abc import Mapping
from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from ruvmlx import __version__
from ruvmlx.models.config.model import Tokenizer
from ruvmlx.runtime import Runtime

from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .llama_cpp_bodies import DetokenizeBody, TokenizeBody
from .serving import Serving


class TokenPiece(Struct):
    """A token of a text. piece: the text of the token, or the token's bytes if they are not valid UTF-8, for
    example a part of a character."""

    id: int
    piece: str | list[int]


class TokenizedText(Struct):
    """The answer with the tokens of a text. tokens: a list of ids, or with `with_pieces` a list of ids and
    texts."""

    tokens: list[int | TokenPiece]


class DetokenizedText(Struct):
    """The answer with the text of tokens. content: the text, with the names of special tokens."""

    content: str


class SamplingInForce(Struct):
    """The sampling settings for requests that do not have their own settings. n_predict: the maximum number
    of tokens of a reply; -1: all free tokens of the context. repeat_last_n: the number of last reply tokens
    to which repeat_penalty applies; -1: all tokens."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repeat_penalty: float
    repeat_last_n: int
    n_predict: int


class GenerationSettings(Struct):
    """The settings of the first model. n_ctx: the maximum number of tokens of the prompt and the reply
    together. params: null while the model is closed."""

    n_ctx: int
    params: SamplingInForce | None


class Modalities(Struct):
    """The kinds of content besides text that a message can have. This server supports only text."""

    vision: Literal[False] = False
    audio: Literal[False] = False


class ServerProps(Struct):
    """The facts about the server's first model. model_path: the name of the model, because the server shows
    no paths. total_slots: the maximum number of replies of all models that are in progress or wait for their
    turn. is_sleeping: true if the model is closed; in this case the answer has no chat template and no
    special tokens."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: Modalities
    build_info: str
    is_sleeping: bool
    chat_template: str | UnsetType = UNSET
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET


class Slot(Struct):
    """A slot is a place for a reply that is in progress or waits for its turn. n_ctx: the maximum number of
    tokens of the prompt and the reply together. is_processing: true if a reply takes this slot."""

    id: int
    n_ctx: int
    is_processing: bool
    speculative: Literal[False] = False


async def tokenize(call: Call) -> Answer:
    """Return the tokens of a text. While the server splits the text into tokens, replies in progress
    continue."""
    body: TokenizeBody = call.body

    def encode(runtime: Runtime) -> TokenizedText:
        tokenizer, special = runtime.model.tokenizer, body.parse_special is not False
        ids = tokenizer.encode(body.content, add_bos=bool(body.add_special), special=special)
        if not body.with_pieces:
            return TokenizedText([*ids])
        names = _special_names(tokenizer)
        return TokenizedText([TokenPiece(i, _piece(tokenizer, names, i)) for i in ids])

    return await call.serving.host.encode(encode, len(body.content))


def _special_names(tokenizer: Tokenizer) -> Mapping[int, str]:
    return {token_id: text for text, token_id in tokenizer.special_tokens.items()}


def _piece(tokenizer: Tokenizer, names: Mapping[int, str], token_id: int) -> str | list[int]:
    if token_id in names:
        return names[token_id]
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(call: Call) -> Answer:
    """Return the text of a list of tokens."""
    tokens = call.body.tokens
    vocab = call.serving.runtime.model.shape.vocab_size
    unknown = next((token for token in tokens if token >= vocab), None)
    if unknown is not None:
        message = f"tokens: there is no token {unknown}; the model has tokens 0 to {vocab - 1}."
        raise ApiError(400, message, "tokens")

    def decode(runtime: Runtime) -> DetokenizedText:
        return DetokenizedText(runtime.model.tokenizer.text_with_specials(tokens))

    return await call.serving.host.encode(decode, len(tokens))


async def props(call: Call) -> Answer:
    """Return the facts about the first model and the default sampling settings. This request does not open
    the model."""
    serving = call.models.first.serving
    runtime = None if serving.unloaded else serving.host.holder.runtime
    about = serving.about
    found = ServerProps(
        GenerationSettings(about.context, _in_force(serving, runtime) if runtime else None),
        serving.limits.replies,
        about.name,
        about.name,
        Modalities(),
        f"ruvmlx {__version__}",
        is_sleeping=runtime is None,
    )
    if runtime is not None:
        tokenizer = runtime.model.tokenizer
        names, ends = _special_names(tokenizer), sorted(tokenizer.eos_ids)
        found.chat_template = tokenizer.chat_template or ""
        found.bos_token = names.get(tokenizer.bos_id, "") if tokenizer.bos_id is not None else ""
        found.eos_token = next((names[i] for i in ends if i in names), "")
    return found


def _in_force(serving: Serving, runtime: Runtime) -> SamplingInForce:
    own = runtime.writer.sampling()
    return SamplingInForce(
        own.temperature, own.top_k, own.top_p, own.min_p, own.presence_penalty, own.frequency_penalty,
        own.repetition_penalty, own.repetition_window or -1, serving.max_tokens or -1,
    )  # fmt: skip


async def slots(call: Call) -> Answer:
    """Return the slots (places for replies) of the first model, with the slots in use first. The answer has
    no text of users."""
    serving = call.models.first.serving
    taken = [i < serving.writing for i in range(max(serving.limits.replies, serving.writing))]
    return [Slot(i, serving.about.context, is_taken) for i, is_taken in enumerate(taken)]


ENDPOINTS = [
    Endpoint("POST", "/tokenize", tokenize, "The tokens of a text.", TokenizedText, body=TokenizeBody,
             statuses=(404,)),
    Endpoint("POST", "/detokenize", detokenize, "The text of tokens.", DetokenizedText, body=DetokenizeBody,
             statuses=(404,)),
    Endpoint("GET", "/props", props, "The first model, and what a reply gets.", ServerProps),
    Endpoint("GET", "/slots", slots, "The places for replies.", list[Slot]),
]  # fmt: skip

"""This module answers POST /v1/embeddings."""

import base64
from collections.abc import Mapping
from typing import Literal

import numpy as np
from msgspec import Struct

from ruvmlx.errors import TextTooLong, UsageError
from ruvmlx.runtime import Runtime
from ruvmlx.sona import embedding

from .bodies import EmbeddingBody
from .endpoint import Answer, Call, Endpoint
from .errors import ApiError
from .model_pool import EMBEDDING
from .serving import plain_name


class EmbeddingRow(Struct):
    """The vector of one text. embedding: a unit vector, as a list of numbers, or as little-endian float32
    numbers in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """The number of tokens of all texts together."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """The answer with one vector for each text. model: the name of the model that computed the vectors.
    method: a short description of the method by which the model computed the vectors."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage
    method: str


async def embeddings(call: Call) -> Answer:
    """Return one vector for each text. The model computes the vectors without its adapter. While the model
    computes the vectors, replies in progress continue."""
    return await embed_texts(call, call.body)


async def embed_texts(call: Call, body: EmbeddingBody, is_cut: bool = False) -> Embeddings:
    """Return the answer with one vector for each text of the body. is_cut: True if the model reads only the
    beginning of a text that is too long; False if such a text is an error."""
    name = await embedder_name(call)
    if isinstance(body.input, str):
        texts = {"input": body.input}
    else:
        texts = {f"input[{i}]": text for i, text in enumerate(body.input)}
    vectors, tokens = await vectors_of(call, texts, is_cut)
    if body.dimensions not in (None, len(vectors[0])):
        message = f"dimensions: a vector of this model has {len(vectors[0])}; leave the field out."
        raise ApiError(400, message, "dimensions", "unsupported_value")
    written = (_encode_vector(vector, body.encoding_format) for vector in vectors)
    rows = [EmbeddingRow("embedding", i, vector) for i, vector in enumerate(written)]
    method = embedding.method_of(call.serving.runtime.model)
    return Embeddings("list", rows, name, EmbeddingUsage(tokens, tokens), method)


async def embedder_name(call: Call) -> str:
    """Return the model's name for the answer: the name in the request, or, if the request names `embedding`,
    the name of the model that computes the vectors. Raise ApiError, 404, if the request names an adapter that
    does not exist."""
    name: str = call.body.model
    if plain_name(name) == EMBEDDING:
        return call.serving.model_name
    await call.serving.adapter_of(name, None, call.salt)
    return name


async def vectors_of(
    call: Call, texts: Mapping[str, str], is_cut: bool = False
) -> tuple[list[np.ndarray], int]:
    """Return one unit vector [dimensions] for each text, and the number of tokens of all texts. While the
    model computes the vectors, replies in progress continue. texts: each text by the name of its field, for
    errors. is_cut: as in `embed_texts`. Raise ApiError, 400, if a text is empty or too long."""
    host, letters = call.serving.host, sum(map(len, texts.values()))
    ids = await host.encode(lambda runtime: _encode_texts(runtime, texts, is_cut), letters)
    vectors = await host.call_in_slices(
        lambda runtime: embedding.vectors(runtime.store, runtime.model, runtime.backend, ids),
        lambda: call.serving.stopping,
    )
    tokens = sum(map(len, ids))
    call.facts["prompt_tokens"] = tokens
    return vectors, tokens


def _encode_texts(runtime: Runtime, texts: Mapping[str, str], is_cut: bool) -> list[list[int]]:
    return [_encode_text(runtime, field, text, is_cut) for field, text in texts.items()]


def _encode_text(runtime: Runtime, field: str, text: str, is_cut: bool) -> list[int]:
    try:
        return embedding.text_ids(runtime.model, text, is_cut)
    except UsageError as error:
        code = "context_length_exceeded" if isinstance(error, TextTooLong) else "invalid_value"
        raise ApiError(400, f"{field}: {error}", field, code) from None


def _encode_vector(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return vector.tolist()


ENDPOINTS = [
    Endpoint(
        "POST", "/v1/embeddings", embeddings, "Turn texts into vectors.", Embeddings, body=EmbeddingBody,
        statuses=(404,), embeds=True,
    )
]  # fmt: skip

"""POST /v1/embeddings."""

import base64
from typing import Literal

import numpy as np
from msgspec import Struct

from ruvmlx.runtime import Runtime

from .bodies import EmbeddingBody
from .endpoint import Answer, Call, Endpoint

AT_ONCE = 8  # texts between which other work gets a turn


class EmbeddingRow(Struct):
    """embedding: a unit vector; as base64, float32, little end first."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct):
    """One vector for each text."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage


async def embeddings(call: Call) -> Answer:
    """One vector for each text, by the untouched model."""
    body: EmbeddingBody = call.body
    await call.serving.adapter_of(body.model, None, call.salt)
    texts = [body.input] if isinstance(body.input, str) else body.input
    rows: list[EmbeddingRow] = []
    tokens = 0
    for at in range(0, len(texts), AT_ONCE):
        vectors, read = await call.serving.host.call(_embedding(texts[at : at + AT_ONCE]))
        tokens += read
        rows += [
            EmbeddingRow("embedding", at + i, _written(vector, body.encoding_format))
            for i, vector in enumerate(vectors)
        ]
    call.facts["prompt_tokens"] = tokens
    return Embeddings("list", rows, body.model, EmbeddingUsage(tokens, tokens))


def _embedding(texts: list[str]):
    def embed(runtime: Runtime) -> tuple[list[np.ndarray], int]:
        tokens = sum(len(runtime.model.tokenizer.encode(text)) for text in texts)
        return runtime.embed(texts), tokens

    return embed


def _written(vector: np.ndarray, encoding: str | None) -> list[float] | str:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    return [float(value) for value in vector]


ENDPOINTS = [
    Endpoint(
        "POST", "/v1/embeddings", embeddings, "Turn texts into vectors.", Embeddings, body=EmbeddingBody,
        statuses=(404,),
    )
]  # fmt: skip

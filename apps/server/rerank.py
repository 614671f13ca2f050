"""This module answers POST /v1/rerank, in the form of Jina and Cohere. The module sorts texts by their
similarity to a query."""

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from .bodies import RankedDocument, RerankBody
from .embeddings import EmbeddingUsage, embedder_name, vectors_of
from .endpoint import Answer, Call, Endpoint


class RankedText(Struct):
    """A text and its relevance. index: the position of the text in the request. relevance_score: the cosine
    of the text's and the query's embeddings, from 0 (also for cosines below 0) to 1."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Struct):
    """The ranked texts, with the most relevant text first. method: how the server compared the texts with the
    query."""

    model: str
    results: list[RankedText]
    usage: EmbeddingUsage
    method: str


async def rerank(call: Call) -> Answer:
    """Sort texts by the similarity of their embeddings to the embedding of the query. While the model
    computes the embeddings, replies in progress continue."""
    body: RerankBody = call.body
    name = await embedder_name(call)
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    named = {f"documents[{i}]": text for i, text in enumerate(texts)}
    vectors, tokens = await vectors_of(call, {"query": body.query, **named})
    likeness = np.stack(vectors[1:]) @ vectors[0]
    best = np.argsort(-likeness, kind="stable")[: body.top_n]
    results = [
        RankedText(
            int(i),
            float(np.clip(likeness[i], 0, 1)),
            RankedDocument(texts[i]) if body.return_documents else UNSET,
        )
        for i in best
    ]
    method = f"cosine of embeddings by {call.serving.model_name}; there is no model for ranking alone"
    return Ranking(name, results, EmbeddingUsage(tokens, tokens), method)


ENDPOINTS = [
    Endpoint(
        "POST", "/v1/rerank", rerank, "Rank texts by their likeness to a question.", Ranking,
        body=RerankBody, statuses=(404,), embeds=True,
    )
]  # fmt: skip

"""POST /v1/rerank: texts by their likeness to a question."""

import numpy as np
import pytest

TEXTS = ["The sea is deep.", "hello", "A dog barks at night."]


def rerank(running, **fields):
    asked = {"model": running.model, "query": "hello", "documents": TEXTS, **fields}
    return running.ask("POST", "/v1/rerank", asked)


def test_the_order_is_that_of_the_embeddings(shared):
    """The same text is first, with a score of 1; the answer says what compared them."""
    found = rerank(shared).json
    asked = {"model": shared.model, "input": ["hello", *TEXTS]}
    rows = shared.ask("POST", "/v1/embeddings", asked).json
    query, *vectors = (np.array(row["embedding"]) for row in rows["data"])
    likeness = [float(vector @ query) for vector in vectors]
    assert [row["index"] for row in found["results"]] == sorted(range(3), key=lambda i: -likeness[i])
    for row in found["results"]:
        assert row["relevance_score"] == pytest.approx(min(1, max(0, likeness[row["index"]])), abs=1e-5)
    assert found["results"][0] == {"index": 1, "relevance_score": pytest.approx(1, abs=1e-5)}
    assert found["usage"] == rows["usage"] and shared.model in found["method"]


def test_top_n_and_the_texts(shared):
    found = rerank(shared, top_n=2, return_documents=True, documents=[{"text": TEXTS[0]}, TEXTS[1], TEXTS[2]])
    assert found.json["results"][0]["document"] == {"text": "hello"}
    assert len(found.json["results"]) == 2
    assert len(rerank(shared, top_n=99).json["results"]) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 1001}, "documents"),
        ({"documents": [" "]}, "documents[0]"),
        ({"documents": [{"title": "a"}]}, "documents[0].title"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"rank_fields": ["text"]}, "rank_fields"),
    ],
)
def test_wrong_bodies(shared, fields, param):
    refused = rerank(shared, **fields)
    assert refused.status == 400 and refused.error["param"] == param, refused.error

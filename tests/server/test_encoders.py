"""An encoder (a model of BERT's kind) beside the chat model of a server: it embeds and ranks."""
# ruff: noqa: F811 - fixtures of another file

import shutil
import threading

import numpy as np
import pytest

from tests.models.encoder_models import EncoderShape, encoder_weights, make_encoder, make_gguf_encoder
from tests.oracles.encoder import vector_ref

from .test_many_models import A, ask, home, metric, open_names, serve_models  # noqa: F401 - fixtures

SHAPE = EncoderShape(context=60)
ENCODER = "lmstudio:tests/encoder"
TEXTS = ["hello", "the sea and the wind"]


@pytest.fixture(params=["folder", "file"])
def encoder(request, home):
    """The name of an encoder of this machine, in each format."""
    folder = home / ".lmstudio" / "models" / "tests" / "encoder"
    if request.param == "folder":
        make_encoder(folder, SHAPE, "cls")
    else:
        folder.mkdir()
        make_gguf_encoder(folder / "encoder.gguf", SHAPE, "cls")
    yield ENCODER
    shutil.rmtree(folder)


def test_an_encoder_embeds_and_ranks(serve_models, encoder):
    """Opened for it, by its name or as `embedding`; the vectors are the twin's."""
    running = serve_models()
    assert encoder in [card["id"] for card in running.ask("GET", "/v1/models").json["data"]]
    found = running.ask("POST", "/v1/embeddings", {"model": "embedding", "input": TEXTS}).json
    assert found["model"] == encoder and found["method"] == f"first token's state, by {encoder}, an encoder"
    assert open_names(running) == [A, encoder]
    tokenizer = running.models.open_models[1].serving.runtime.model.tokenizer
    ids = [[tokenizer.bos_id, *tokenizer.encode(text, add_bos=False), tokenizer.eos_id] for text in TEXTS]
    wanted = [vector_ref(SHAPE, encoder_weights(SHAPE), text, "cls") for text in ids]
    vectors = np.array([row["embedding"] for row in found["data"]])
    np.testing.assert_allclose(vectors, wanted, atol=3e-5)
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    by_ollama = running.ask("POST", "/api/embed", {"model": encoder, "input": TEXTS}).json
    np.testing.assert_allclose(by_ollama["embeddings"], vectors, atol=1e-6)
    asked = {"model": encoder, "query": TEXTS[0], "documents": [TEXTS[1], TEXTS[0]]}
    ranked = running.ask("POST", "/v1/rerank", asked).json
    assert ranked["results"][0]["index"] == 1
    assert ranked["results"][0]["relevance_score"] == pytest.approx(1, abs=1e-4)


def test_a_text_that_is_too_long_is_named(serve_models, encoder):
    running = serve_models()
    asked = {"model": encoder, "input": ["sea", "sea " * 59]}
    error = running.ask("POST", "/v1/embeddings", asked)
    assert error.status == 400 and error.error["param"] == "input[1]"
    assert (
        error.error["code"] == "context_length_exceeded" and "more than 58 tokens" in error.error["message"]
    )
    assert running.ask("POST", "/v1/embeddings", asked | {"input": "sea " * 58}).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "stream": True}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}),
        ("/api/chat", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/api/generate", {"prompt": "hello"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ],
)
def test_an_encoder_writes_no_text(serve_models, encoder, path, body):
    """In every dialect a 400 with the reason, also where the client wants a stream."""
    running = serve_models()
    running.ask("POST", "/v1/embeddings", {"model": encoder, "input": "sea"})
    done = running.ask("POST", path, {"model": encoder, **body})
    assert done.status == 400, done.body
    assert b"embeds texts and writes none" in done.body or b"no_fim_tokens" in done.body


def test_what_the_server_says_of_an_encoder(serve_models, encoder):
    """Its memory, its layers, and that it embeds; it is closed when asked, and opened again."""
    running = serve_models()
    shown = running.ask("POST", "/api/show", {"model": encoder}).json
    assert shown["capabilities"] == ["embedding"] and shown["model_info"]["bert.block_count"] == SHAPE.layers
    assert encoder in [row["name"] for row in running.ask("GET", "/api/tags").json["models"]]
    running.ask("POST", "/v1/embeddings", {"model": encoder, "input": "sea"})
    row = next(r for r in running.ask("GET", "/v1/ps").json["models"] if r["model"] == encoder)
    need = running.models.open_models[1].need
    assert row["adapter"] is None and row["kv_bytes"] == 0 and row["need_bytes"] == need.total
    assert 0 < row["model_bytes"] <= need.weights
    assert running.ask("GET", "/metrics").status == 200 and running.ask("GET", "/v1/status").status == 200
    assert running.ask("POST", "/tokenize", {"model": encoder, "content": "the sea"}).json["tokens"]
    running.ask("POST", "/api/embed", {"model": encoder, "input": "sea", "keep_alive": 0})
    running.wait_until(lambda: open_names(running) == [A], 60)
    running.ask("POST", "/v1/embeddings", {"model": encoder, "input": "sea"})
    assert metric(running, "ruvmlx_model_loads_total{") == 2


def test_an_idle_encoder_is_closed(serve_models, encoder):
    running = serve_models(unload_after=1.0)
    running.ask("POST", "/v1/embeddings", {"model": encoder, "input": "sea"})
    assert encoder in open_names(running)
    running.wait_until(lambda: open_names(running) == [A], 60)


def test_a_chat_goes_on_while_texts_are_embedded(serve_models, encoder):
    running, got = serve_models(), []
    alone = ask(running, A, max_tokens=8).json["choices"][0]["message"]
    asked = {"model": encoder, "input": ["the sea and the wind " * 3] * 60}
    writer = threading.Thread(target=lambda: got.append(ask(running, A, max_tokens=8)))
    writer.start()
    done = running.ask("POST", "/v1/embeddings", asked)
    writer.join()
    assert done.status == 200 and len(done.json["data"]) == 60
    assert got[0].json["choices"][0]["message"] == alone

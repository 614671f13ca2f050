"""Texts of megabytes, and embeddings of whole texts: others do not wait, and no word is left out."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ruvmlx.models.text import tokenizer_bpe
from ruvmlx.models.text.tokenizer_base import BRIEF, LETTERS
from ruvmlx.sona import embedding

from .conftest import CHAT_KEY

WORDS = str.split("the sea and the ship went over a stone wall while rain fell on grey roofs of the old town")


def text_of(letters, seed=0):
    """The tiny model reads a token in each letter, or in two."""
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, letters // 3))[:letters]


def watch(monkeypatch, tokenizer, encode_run):
    """Let the tokenizer encode by this function; what it knows already does not count."""
    monkeypatch.delitem(tokenizer.__dict__, "_runs", raising=False)
    monkeypatch.setattr(type(tokenizer), "_encode_run", encode_run)


def embed(running, *texts):
    reply = running.ask("POST", "/v1/embeddings", {"model": running.model, "input": list(texts)})
    assert reply.status == 200, reply.body
    return np.array([row["embedding"] for row in reply.json["data"]]), reply.json["usage"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/completions", {"prompt": "TEXT"}),
        ("/v1/responses", {"input": "TEXT"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "TEXT"}]}),
        ("/v1/embeddings", {"input": "TEXT"}),
    ],
)
def test_no_text_is_encoded_where_others_are_answered(shared, monkeypatch, path, body):
    """Neither in the event loop nor in the model's thread; and of a text that is much too long, only as much
    as shows that."""
    tokenizer = shared.serving.runtime.model.tokenizer
    threads, encode = [], type(tokenizer)._encode_run
    text, longest = "much too long " * 30_000, 0

    def encode_and_note(self, run, first):
        nonlocal longest
        if len(run) > 1000:
            threads.append(threading.current_thread().name)
            longest = max(longest, len(run))
        return encode(self, run, first)

    watch(monkeypatch, tokenizer, encode_and_note)

    def fill_in(value):
        if isinstance(value, dict):
            return {key: fill_in(part) for key, part in value.items()}
        if isinstance(value, list):
            return [fill_in(part) for part in value]
        return text if value == "TEXT" else value

    reply = shared.ask("POST", path, {"model": shared.model, **fill_in(body)})
    assert reply.status == 400 and b"token" in reply.body
    assert threads and {name.rpartition("_")[0] for name in threads} == {"encoding-long"}
    limit = embedding.MAX_TEXT_TOKENS if "embeddings" in path else shared.serving.runtime.model.context
    assert longest <= LETTERS * (limit + BRIEF)


def test_health_is_answered_while_a_long_text_becomes_tokens(shared, monkeypatch):
    tokenizer = shared.serving.runtime.model.tokenizer
    begun, go_on, encode = threading.Event(), threading.Event(), type(tokenizer)._encode_run

    def encode_when_allowed(self, run, first):
        if len(run) > 1000:
            begun.set()
            assert go_on.wait(30)
        return encode(self, run, first)

    watch(monkeypatch, tokenizer, encode_when_allowed)
    asking = threading.Thread(target=lambda: shared.chat("word " * 30_000))
    asking.start()
    try:
        assert begun.wait(30)
        assert shared.ask("GET", "/health").status == 200
        assert shared.chat("a short question").status == 200  # nor do other texts wait
    finally:
        go_on.set()
        asking.join()


def test_the_library_is_called_so_that_other_threads_run():
    """`encode` of the `tokenizers` library holds Python's lock."""
    from tokenizers import Tokenizer, models

    held, tokenizer = [], Tokenizer(models.BPE({"a": 0, " ": 1}, []))

    class WatchedTokenizer:
        def encode(self, text, **kwargs):
            held.append(len(text))
            return tokenizer.encode(text, **kwargs)

        def encode_batch(self, texts, **kwargs):
            return tokenizer.encode_batch(texts, **kwargs)

    for count in (10, 5000):
        assert tokenizer_bpe.ids_of(WatchedTokenizer(), "a" * count) == [0] * count
    assert held == [10]


def test_any_word_of_a_long_text_changes_its_embedding(open_tiny):
    words = text_of(6000).split(" ")
    with open_tiny() as runtime:
        assert len(embedding.text_ids(runtime.model, " ".join(words))) > 4000
        whole = runtime.embed([" ".join(words)])[0]
        for i in (0, len(words) // 2, len(words) - 60):
            changed = runtime.embed([" ".join([*words[:i], "xylophone", *words[i + 1 :]])])[0]
            assert 1e-6 < 1 - changed @ whole < 0.5


def test_usage_counts_all_tokens_of_all_texts(shared):
    _, usage = embed(shared, text_of(300), "hello")
    tokenizer = shared.serving.runtime.model.tokenizer
    read = sum(len(tokenizer.encode(text, add_bos=False)) for text in (text_of(300), "hello"))
    assert usage == {"prompt_tokens": read, "total_tokens": read}


def test_a_text_longer_than_the_limit_is_refused(shared):
    reply = shared.ask("POST", "/v1/embeddings", {"model": shared.model, "input": "a" * 8193})
    assert reply.status == 400 and "8192" in reply.json["error"]["message"]
    assert len(embedding.text_ids(shared.serving.runtime.model, "a" * 8192)) == 8192


LONG = "a" * 8193


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": LONG}, "input"),
        ("/v1/embeddings", {"input": ["a", LONG]}, "input[1]"),
        ("/v1/rerank", {"query": LONG, "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": LONG}]}, "documents[1]"),
        ("/api/embed", {"input": ["a", LONG], "truncate": False}, "input[1]"),
        ("/api/embeddings", {"prompt": LONG}, "prompt"),
    ],
)
def test_the_text_that_is_too_long_is_named(shared, path, body, field):
    """So that a program that indexes many texts knows which of them to cut."""
    error = shared.ask("POST", path, {"model": shared.model, **body}).json
    error = error if path.startswith("/api") else error["error"]
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert error["error" if path.startswith("/api") else "message"].startswith(f"{field}: a text")


def test_a_chat_is_answered_while_texts_are_embedded(running, monkeypatch):
    """Between two slices a chat's steps have their turn."""
    monkeypatch.setattr(embedding, "SLICE", 0.0)
    monkeypatch.setattr(embedding, "MIN_SLICE_TOKENS", 16)
    order, read = [], type(running.serving.runtime.backend).hidden_states

    def read_and_note(self, tokens, *args, **kwargs):
        order.append(len(tokens))
        time.sleep(0.005)
        return read(self, tokens, *args, **kwargs)

    embed(running, "whitening is measured")
    monkeypatch.setattr(type(running.serving.runtime.backend), "hidden_states", read_and_note)
    asking = threading.Thread(target=lambda: embed(running, *(text_of(400, i) for i in range(20))))
    asking.start()
    running.wait_until(lambda: len(order) > 3)
    assert running.chat("a short question").status == 200
    left = asking.is_alive(), len(order)
    asking.join()
    assert left[0] and left[1] < len(order) and max(order) <= 32


def test_short_texts_have_the_vectors_of_questions(shared, open_tiny):
    """So questions that are in the store stay comparable, and a text of one window is pooled as they are."""
    with open_tiny() as runtime:
        whitened = embedding.whitening_of(runtime.store, runtime.model, runtime.backend)
        for text in ("hello", text_of(100)):
            state = embedding.read_question(runtime.backend, runtime.model.tokenizer, text)
            np.testing.assert_allclose(runtime.embed([text])[0], whitened(state), atol=1e-4)


WORDS_TOO_MANY = "word " * 3000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS_TOO_MANY}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages"),
        ("/v1/completions", {"prompt": WORDS_TOO_MANY}, "prompt"),
        ("/v1/completions", {"prompt": WORDS_TOO_MANY, "stream": True}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/responses", {"input": WORDS_TOO_MANY}, "input"),
        ("/v1/responses", {"input": [{"type": "reasoning"}], "stream": True}, "input"),
        ("/v1/responses/input_tokens", {"input": WORDS_TOO_MANY}, "input"),
        ("/v1/responses/input_tokens", {"input": ""}, "input"),
        ("/api/generate", {"prompt": WORDS_TOO_MANY}, "prompt"),
        ("/api/generate", {"prompt": " "}, "prompt"),
        ("/v1/chats", {"content": WORDS_TOO_MANY}, "content"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_named(shared, path, body, field):
    """By its field in the body of this endpoint."""
    refused = shared.ask("POST", path, {"model": shared.model, **body}, x_api_key=CHAT_KEY)
    error = refused.json if path.startswith("/api") else refused.json["error"]
    assert refused.status == 400 and error["param"] == field, error


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})],
)
def test_the_end_of_the_server_ends_embeddings_at_once(serve, monkeypatch, path, body):
    """So that the client gets an answer, and the server does not wait ten seconds for it."""
    running = serve()

    def endless(*_):
        while True:
            time.sleep(0.01)
            yield

    monkeypatch.setattr(embedding, "vectors", endless)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.ask, "POST", path, {"model": running.model, **body})
        running.wait_until(lambda: running.serving.calls == 1)
        running.loop.call_soon_threadsafe(running.serving.stop)
        answer = asked.result(5)
    assert (answer.status, answer.error["code"]) == (503, "stopping")

"""What clients of llama.cpp's server ask: tokens, props, slots."""

import json
import threading

import pytest

TEXT = "Grüße, 漢字 <|endoftext|> and more"


def post(running, path, **body):
    return running.ask("POST", path, body)


def test_tokens_and_back(shared, tiny):
    """The ids are the model's own, with and without its special tokens; all come back as the same text."""
    ids = post(shared, "/tokenize", content=TEXT).json["tokens"]
    assert ids == tiny.tokenizer.encode(TEXT, add_bos=False, special=True)
    assert post(shared, "/detokenize", tokens=ids).json == {"content": TEXT}
    plain = post(shared, "/tokenize", content=TEXT, parse_special=False).json["tokens"]
    assert plain == tiny.tokenizer.encode(TEXT, add_bos=False) != ids
    begun = post(shared, "/tokenize", content=TEXT, add_special=True, model=shared.model).json["tokens"]
    assert begun == tiny.tokenizer.encode(TEXT, special=True)
    assert post(shared, "/tokenize", content="").json == {"tokens": []}


def test_pieces(shared):
    """The pieces joined are the text; a part of a character is its bytes, a special token its name."""
    found = post(shared, "/tokenize", content=TEXT, with_pieces=True).json["tokens"]
    assert [each["id"] for each in found] == post(shared, "/tokenize", content=TEXT).json["tokens"]
    pieces = [each["piece"] for each in found]
    data = b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in pieces)
    assert data.decode() == TEXT and "<|endoftext|>" in pieces
    assert any(isinstance(piece, list) for piece in pieces)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [3, 10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (2**18 + 1)}, "tokens"),
        ("/tokenize", {"content": "a" * (2**18 + 1)}, "content"),
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "model": "no-such-model"}, "model"),
        ("/tokenize", {"content": "a", "nonsense": 1}, "nonsense"),
    ],
)
def test_wrong_bodies(shared, path, body, param):
    """Each limit and each name is in one line."""
    answer = shared.ask("POST", path, body)
    assert answer.status == (404 if param == "model" else 400) and answer.error["param"] == param


def test_a_long_text_holds_up_nobody(shared):
    """While the longest text becomes tokens, other requests are answered."""
    done: list[int] = []
    text = "The quick brown fox. " * (2**18 // 21)
    thread = threading.Thread(target=lambda: done.append(post(shared, "/tokenize", content=text).status))
    thread.start()
    answered = 0
    while thread.is_alive():
        assert shared.ask("GET", "/health").status == 200
        answered += not done
    assert done == [200] and answered > 2


def test_props(shared, tiny):
    """What a client of llama.cpp reads: the context, the template, the sampling in force. No path is told."""
    found = shared.ask("GET", "/props").json
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == tiny.context and found["total_slots"] == shared.serving.limits.replies
    assert settings["params"]["temperature"] == shared.serving.runtime.writer.sampling().temperature
    assert settings["params"]["n_predict"] == -1 and found["modalities"] == {"vision": False, "audio": False}
    assert found["chat_template"] == (tiny.tokenizer.chat_template or "")
    assert found["bos_token"] == found["eos_token"] == "<|endoftext|>"
    assert found["model_path"] == found["model_alias"] == shared.model and not found["is_sleeping"]
    assert str(tiny.path) not in json.dumps(found)


def test_slots(serve):
    """A reply that is being written has a slot, and gives it back."""
    running = serve()
    assert not any(slot["is_processing"] for slot in running.ask("GET", "/slots").json)
    running.slow_down()
    with running.send_chat(stream=True):
        running.wait_until(lambda: running.serving.writing)
        found = running.ask("GET", "/slots").json
        assert [slot["is_processing"] for slot in found] == [True] + [False] * 63
        assert [slot["id"] for slot in found] == [*range(64)] and found[0]["n_ctx"] == 512
    running.wait_until(lambda: not running.serving.writing)
    assert not any(slot["is_processing"] for slot in running.ask("GET", "/slots").json)

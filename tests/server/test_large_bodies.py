"""Bodies with very many small parts. Their decoding runs in a separate thread. Their conversion runs in the
loop that answers all clients, so its time must grow with the size of the body alone."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from ruvmlx.apps.server import anthropic_bodies, dispatch, ollama_bodies, responses_bodies
from ruvmlx.apps.server.anthropic_bodies import MessagesBody
from ruvmlx.apps.server.ollama_bodies import OllamaChatBody
from ruvmlx.apps.server.responses_bodies import ResponsesBody

from ruvmlx.text import did_you_mean


def ollama_results(count):
    """Calls whose results come in reverse order."""
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": {}}} for i in range(count)]
    results = [{"role": "tool", "content": "x", "tool_call_id": f"c{i}"} for i in reversed(range(count))]
    body = {"model": "m", "messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *results]}
    return ollama_bodies.conversation(msgspec.convert(body, OllamaChatBody).messages, None)


def responses_calls(count):
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(count)
    ]
    body = msgspec.convert({"model": "m", "input": calls}, ResponsesBody)
    return responses_bodies.conversation(body, None)


def responses_texts(count):
    texts = [{"role": "user", "content": "a word and more " * 8}] * count
    return responses_bodies.conversation(msgspec.convert({"model": "m", "input": texts}, ResponsesBody), None)


def anthropic_texts(count):
    texts = [{"role": "user", "content": "a word and more " * 8}] * count
    body = msgspec.convert({"model": "m", "max_tokens": 1, "messages": texts}, MessagesBody)
    return anthropic_bodies.conversation(body, None)


@pytest.mark.parametrize("convert", [ollama_results, responses_calls, responses_texts, anthropic_texts])
def test_the_time_grows_with_the_size_alone(convert):
    """Eight times the parts take about eight times as long. With all pairs of parts, it is 64 times."""
    convert(2_000)
    short, long = (min(seconds(convert, count) for _ in range(3)) for count in (2_500, 20_000))
    assert long < 32 * short + 0.1


def seconds(convert, count):
    """The processor time, without that of the garbage collector, which also looks at other tests' objects."""
    gc.collect()
    gc.disable()
    try:
        begun = time.process_time()
        convert(count)
        return time.process_time() - begun
    finally:
        gc.enable()


def test_no_name_is_similar_to_a_very_long_word():
    """The comparison of a model's name of 4 MB took a second."""
    assert did_you_mean("starte", ["starter"]) and not did_you_mean("starter" * 30, ["starter" * 30])


def test_results_belong_to_the_first_open_call():
    """With an id, a name, both, or nothing."""
    names = [("a", "f"), ("b", "g"), ("c", "f"), ("d", "g")]
    calls = [{"id": call_id, "function": {"name": name, "arguments": {}}} for call_id, name in names]
    found = [{}, {"tool_name": "f"}, {"tool_call_id": "d", "tool_name": "g"}, {"tool_call_id": "b"}]
    results = [{"role": "tool", "content": "x", **one} for one in found]
    body = {"model": "m", "messages": [{"role": "assistant", "content": "", "tool_calls": calls}, *results]}
    turns = ollama_bodies.conversation(msgspec.convert(body, OllamaChatBody).messages, None)
    assert [turn.tool_call_id for turn in turns[1:]] == ["a", "c", "d", "b"]


def test_the_decoding_of_a_long_body_holds_up_nobody(serve, monkeypatch):
    running, begun, answered = serve(), threading.Event(), threading.Event()
    decode = dispatch.decode

    def decode_slowly(data, kind):
        begun.set()
        assert answered.wait(20)
        return decode(data, kind)

    monkeypatch.setattr(dispatch, "decode", decode_slowly)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.chat, "a" * 200_000)
        assert begun.wait(20)
        assert running.ask("GET", "/health").status == 200
        answered.set()
        assert asked.result(60).error["code"] == "context_length_exceeded"

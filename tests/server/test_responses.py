"""OpenAI's own client against POST /v1/responses."""

import json

import pytest
from ruvmlx.apps.server.errors import ApiError
from ruvmlx.apps.server.responses import ResponseWriter, thought_tokens
from ruvmlx.apps.server.responses_bodies import (
    InputItem,
    InputText,
    ReasoningOptions,
    ReasoningText,
    ResponsesBody,
    conversation,
    wants_thought,
)
from ruvmlx.apps.server.writing import ReplyPart

from ruvmlx.engine.types import GenerationRequest
from ruvmlx.models.config.model import Message

openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")


SCHEMA = {"type": "json_schema", "name": "x"}


@pytest.fixture
def codex(shared):
    with openai.OpenAI(base_url=shared.url, api_key="none-needed", max_retries=0, timeout=600) as found:
        yield found


@pytest.fixture
def request_fields(shared):
    return {"model": shared.model, "input": "hello", "max_output_tokens": 8, "temperature": 0}


def test_a_whole_response(codex, request_fields, shared):
    """The text is that of the chat's endpoint; the request is repeated in the answer."""
    done = codex.responses.create(**request_fields, metadata={"a": "b"}, parallel_tool_calls=False)
    assert done.output_text == shared.chat("hello").json["choices"][0]["message"]["content"]
    assert (done.object, done.status, done.model) == ("response", "incomplete", shared.model)
    assert done.incomplete_details.reason == "max_output_tokens" and done.error is None
    [item] = done.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert done.usage.output_tokens == 8 and done.usage.input_tokens > 5
    assert done.usage.total_tokens == done.usage.input_tokens + 8
    assert done.usage.output_tokens_details.reasoning_tokens == 0
    assert done.metadata == {"a": "b"} and done.parallel_tool_calls is False and done.store is True
    assert (done.temperature, done.max_output_tokens, done.tools) == (0, 8, [])


def test_a_stream_is_the_whole_response(codex, request_fields):
    whole = codex.responses.create(**request_fields)
    with codex.responses.stream(**request_fields) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    last = events[-1].response
    assert "".join(deltas) == whole.output_text == last.output[0].content[0].text
    assert last.usage.output_tokens == 8 and last.status == "incomplete"


def test_the_events_of_a_stream(shared, request_fields):
    """In OpenAI's order, each named by its type and numbered."""
    answer = shared.ask("POST", "/v1/responses", {**request_fields, "stream": True})
    events = [event.split("\n") for event in answer.body.decode().strip().split("\n\n")]
    names = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert names == [each["type"] for each in data]
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert names[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert data[0]["response"]["status"] == "in_progress" and data[0]["response"]["output"] == []
    assert data[-1]["response"]["output"] == [data[-2]["item"]]


def test_a_response_that_ends_by_itself(shared, request_fields):
    """Its last event is response.completed."""
    context = shared.serving.runtime.model.context
    del request_fields["max_output_tokens"]
    answer = shared.ask("POST", "/v1/responses", {**request_fields, "stream": True}).body.decode()
    last = json.loads(answer.strip().rpartition("data: ")[2])["response"]
    full = last["usage"]["total_tokens"] == context
    assert last["status"] == ("incomplete" if full else "completed")
    assert (last["incomplete_details"] is None) == (not full) and last["usage"]["output_tokens"] > 8


def test_items_are_turns(codex, request_fields, shared):
    """Instructions, and a conversation with the output of an earlier response as it came."""
    first = codex.responses.create(**request_fields)
    turns = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in first.output)]
    turns.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]})
    done = codex.responses.create(**{**request_fields, "input": turns}, instructions="Be brief.")
    chat = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "more"},
    ]  # fmt: skip
    same = shared.chat(messages=chat).json
    assert done.output_text == same["choices"][0]["message"]["content"]
    assert done.usage.input_tokens == same["usage"]["prompt_tokens"]


def test_what_codex_sends(shared, request_fields):
    """Its fields, without tools."""
    sent = {
        "model": shared.model, "instructions": "You are an agent.", "tools": [], "tool_choice": "auto",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "parallel_tool_calls": True, "reasoning": None, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "service_tier": "auto",
        "client_metadata": {"a": "b"},
    }  # fmt: skip
    answer = shared.ask("POST", "/v1/responses", {**sent, "max_output_tokens": 4, "temperature": 0})
    assert answer.status == 200 and b"event: response.incomplete" in answer.body


def test_a_rating(serve):
    """The response's id is what a rating takes."""
    running = serve()
    asked = {"model": running.model, "input": "hello", "max_output_tokens": 4}
    done = running.ask("POST", "/v1/responses", asked).json
    rated = running.ask("POST", "/v1/ratings", {"id": done["id"], "rating": "down"})
    assert rated.status == 200 and rated.json["applied"]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("store", "yes", "store"),
        ("background", True, "background"),
        ("conversation", "c", "conversation"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", [{"type": "custom", "name": "apply_patch"}], "tools[0].type"),
        ("tools", [{"type": "local_shell"}], "tools[0].type"),
        ("tools", [{"type": "function", "name": "f"}] * 2, "tools"),
        ("tools", [{"type": "namespace", "name": "a.b", "description": "", "tools": []}], "tools[0].name"),
        ("tool_choice", "required", "tool_choice"),
        ("tool_choice", {"type": "function", "name": "f"}, "tool_choice"),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.type"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
        ("text", {"format": {**SCHEMA, "schema": {"type": "strange"}}}, "text.format.schema"),
        (
            "text",
            {"format": {**SCHEMA, "schema": {"uniqueItems": True}, "strict": True}},
            "text.format.schema",
        ),
        ("reasoning", {"summary": "secret"}, "reasoning.summary"),
        ("truncation", "auto", "truncation"),
        ("include", ["message.output_text.logprobs"], "include"),
        ("top_logprobs", 3, "top_logprobs"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("input", [], "input"),
        ("input", [{"content": "x"}], "input[0].role"),
        ("input", [{"role": "user"}], "input[0].content"),
        ("input", [{"role": "user", "type": "reasoning"}], "input[0].role"),
        ("input", [{"role": "user", "content": "x", "name": "Bob"}], "input[0].name"),
        ("input", [{"type": "function_call"}], "input[0].call_id"),
        ("input", [{"type": "function_call", "call_id": "a", "name": "f"}], "input[0].arguments"),
        ("input", [{"type": "function_call_output", "call_id": "a", "output": "x"}], "input[0].call_id"),
        ("input", [{"type": "function_call_output", "call_id": "a"}], "input[0].output"),
        ("input", [{"type": "item_reference"}], "input[0].id"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ("nonsense", 1, "nonsense"),
    ],
)
def test_refused_fields(shared, request_fields, field, value, param):
    refused = shared.ask("POST", "/v1/responses", {**request_fields, field: value})
    assert refused.status == 400 and refused.error["param"] == param
    assert refused.error["message"].startswith(f"{param}: ")


def test_errors_are_the_clients_own(codex, request_fields):
    with pytest.raises(openai.NotFoundError):
        codex.responses.create(**{**request_fields, "model": "gpt-4"})
    with pytest.raises(openai.BadRequestError, match="reads at most"):
        codex.responses.create(**{**request_fields, "input": "long " * 300}, stream=True)


def writer(tokenizer=None):
    return ResponseWriter(ResponsesBody(model="m", input="x"), GenerationRequest(), tokenizer)


def test_a_failed_response():
    """An error after the first event ends the stream with response.failed."""
    writing = writer()
    numbers = [event.sequence_number for event in [*writing.begin(), *writing.add(ReplyPart(0, text="a"))]]
    event = json.loads(
        writing.failure_event(ApiError(503, "the server is stopping.")).partition(b"data: ")[2]
    )
    assert event["type"] == "response.failed" and event["sequence_number"] == len(numbers) == 5
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"] == {"code": "server_error", "message": "the server is stopping."}


def test_a_thought_is_an_item_of_its_own():
    writing, events = writer(), []
    for part in (ReplyPart(0, thought="a"), ReplyPart(0, thought="b", text="c"), ReplyPart(0, text="d")):
        events += writing.add(part)
    names = [str(event.__struct_config__.tag).removeprefix("response.") for event in events]
    assert names == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
    ]  # fmt: skip
    [thought] = writing.answer.output
    assert thought.content[0].text == "ab" and thought.status == "completed"


def test_a_thought_of_an_earlier_response():
    """It goes to the reply that follows it, with the model's tag; a model without one never reads it."""
    items = [
        InputItem(role="developer", content="Speak."),
        InputItem(role="user", content="h"),
        InputItem(role="user", content="i"),
        InputItem(type="reasoning", content=[ReasoningText("why")]),
        InputItem(role="assistant", content="so"),
        InputItem(role="developer", content="Be kind."),
        InputItem(role="user", content=[InputText("a"), InputText("b")]),
    ]
    body = ResponsesBody(model="m", input=items, instructions="Be brief.")
    assert conversation(body, "<think>") == [
        Message("system", "Be brief.\n\nSpeak."), Message("user", "h\n\ni"),
        Message("assistant", "<think>\nwhy\n</think>\n\nso"), Message("system", "Be kind."),
        Message("user", "ab"),
    ]  # fmt: skip
    assert conversation(body, None)[2] == Message("assistant", "so")


def test_what_a_request_says_of_thinking():
    def wants(effort, tag):
        asked = ResponsesBody(model="m", input="x", reasoning=ReasoningOptions(effort))
        return wants_thought(asked, tag, ignored)

    ignored = list[str]()
    assert wants("high", "<think>") is True and wants("none", None) is False and wants(None, None) is None
    assert ignored == [] and wants("low", None) is None and ignored == ["reasoning.effort"]


@pytest.mark.parametrize(
    ("drawn", "opened", "count"),
    [("<think>ab</think>cd", "", 17), ("ab</think>cd", "<think>", 10), ("abcd", "", 0), ("ab", "<think>", 2)],
)
def test_thought_tokens(drawn, opened, count):
    """Of a tokenizer with one token for each byte; the prompt may have opened the thought."""

    class Bytes:
        def token_bytes(self, token):
            return bytes([token])

        def decode(self, ids):
            return bytes(ids).decode()

    class Response:
        text, token_ids = opened + drawn, list(drawn.encode())

    assert thought_tokens(Bytes(), Response()) == count

"""Tools and forms in OpenAI's Responses: its own client, and the requests that Codex sends."""

import json

import jsonschema
import pytest
from ruvmlx.apps.server.responses import ResponseWriter
from ruvmlx.apps.server.responses_bodies import (
    InputItem,
    OutputText,
    ReasoningText,
    ResponsesBody,
    conversation,
)
from ruvmlx.apps.server.responses_tools import FunctionGroup, ResponseFunction
from ruvmlx.apps.server.writing import ReplyPart

from ruvmlx.engine.types import GenerationRequest
from ruvmlx.models.config.model import Message
from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun

from .test_tools import DAYS, SCHEMAS, TIME

pydantic = pytest.importorskip("pydantic", reason="the dependency group `clients` is not installed")
openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")

TOOLS = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": DAYS, "strict": True},
    {"type": "function", "name": "time", "parameters": TIME, "strict": None},
]
GROUP = {"type": "namespace", "name": "mcp__clock", "description": "Clocks.", "tools": TOOLS[1:]}


@pytest.fixture
def shared(roomy):
    return roomy


@pytest.fixture
def client(shared):
    with openai.OpenAI(base_url=shared.url, api_key="x", max_retries=0, timeout=600) as found:
        yield found


def request_fields(shared, **more):
    """The tiny model draws at random; what must be called is called once."""
    base = {"model": shared.model, "input": "hello", "max_output_tokens": 300, "temperature": 1.0}
    return {**base, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **more}


def check_call(item, name=None):
    assert item.type == "function_call" and item.status == "completed" and item.id and item.call_id
    assert name in (None, item.name)
    jsonschema.validate(json.loads(item.arguments), SCHEMAS[item.name])


def test_a_required_call(client, shared):
    """The request comes back in the answer."""
    done = client.responses.create(**request_fields(shared))
    [item] = done.output
    check_call(item)
    assert (done.status, done.output_text, item.namespace) == ("completed", "", None)
    assert [tool.name for tool in done.tools] == ["weather", "time"] and done.tools[0].strict is True
    assert done.tools[0].parameters == DAYS and done.tools[1].strict is None
    assert done.tool_choice == "required" and done.parallel_tool_calls is False


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_chosen_function(client, shared, name):
    done = client.responses.create(**request_fields(shared, tool_choice={"type": "function", "name": name}))
    [item] = done.output
    check_call(item, name)
    assert done.tool_choice.name == name


def test_the_events_of_a_call(shared):
    """In OpenAI's order, each named by its type and numbered; the pieces join."""
    sent = shared.ask("POST", "/v1/responses", request_fields(shared, stream=True))
    events = [event.split("\n") for event in sent.body.decode().strip().split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    names = [each["type"].removeprefix("response.") for each in data]
    assert [name.removeprefix("event: response.") for name, _ in events] == names
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    assert names[:3] == ["created", "in_progress", "output_item.added"]
    assert set(names[3:-3]) == {"function_call_arguments.delta"} and len(names) >= 7
    assert names[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    begun, done, ended = data[2]["item"], data[-3], data[-2]["item"]
    assert begun == {**ended, "status": "in_progress", "arguments": ""}
    assert {each["item_id"] for each in data[3:-2]} == {ended["id"]}
    assert {each["output_index"] for each in data[2:-1]} == {0}
    assert "".join(each["delta"] for each in data[3:-3]) == done["arguments"] == ended["arguments"]
    assert done["name"] == ended["name"] and data[-1]["response"]["output"] == [ended]


def test_the_clients_stream_gathers_the_call(client, shared):
    with client.responses.stream(**request_fields(shared)) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    check_call(final.output[0])
    assert final.output[0].parsed_arguments == json.loads(final.output[0].arguments) or (
        final.output[0].name == "time" and final.output[0].parsed_arguments is None
    )


def test_a_cut_call_is_incomplete(client, shared):
    choice = {"type": "function", "name": "weather"}
    done = client.responses.create(**request_fields(shared, tool_choice=choice, max_output_tokens=60))
    assert (done.status, done.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [item] = done.output
    assert (item.name, item.status) == ("weather", "incomplete") and item.arguments.startswith("{")


def test_a_conversation_with_a_call(client, shared):
    """The output goes back as it came, with a result: the model reads both."""
    first = client.responses.create(**request_fields(shared))
    call = first.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    items = [{"role": "user", "content": "hello"}, call.to_dict(), result]
    done = client.responses.create(
        **request_fields(shared, input=items, tool_choice="none", max_output_tokens=4)
    )
    written = {"id": call.call_id, "type": "function",
               "function": {"name": call.name, "arguments": call.arguments}}  # fmt: skip
    chat = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [written]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "noon"},
    ]  # fmt: skip
    assert done.usage.input_tokens == shared.chat(messages=chat).json["usage"]["prompt_tokens"]


def test_functions_of_a_group(client, shared):
    """The model reads GROUP.FUNCTION; the call names both."""
    done = client.responses.create(**request_fields(shared, tools=[GROUP]))
    [item] = done.output
    check_call(item, "time")
    assert item.namespace == "mcp__clock"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
    items = [{"role": "user", "content": "hello"}, item.to_dict(), result]
    body = ResponsesBody(model="m", input=[InputItem(**fields) for fields in items])
    told = conversation(body, None)
    assert told[1].tool_calls[0]["function"]["name"] == told[2].name == "mcp__clock.time"
    again = client.responses.create(**request_fields(shared, input=items, tools=[GROUP]))
    check_call(again.output[0], "time")


class Place(pydantic.BaseModel):
    """An answer as a class."""

    city: str
    days: int


def test_the_answer_as_a_class(client, shared):
    """`parse` sends text.format with a strict schema; seeds are not in this API, so some replies are cut."""
    found = []
    for _ in range(8):
        try:
            done = client.responses.parse(
                model=shared.model, input="hello", max_output_tokens=400, temperature=0.7, text_format=Place
            )
        except ValueError:  # the client reads a cut answer, too
            continue
        assert done.status == "completed" and done.text.format.strict is True
        found.append(done.output_parsed)
    assert found and all(isinstance(place, Place) for place in found)


SMALL = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("stream", [True, False])
def test_text_that_fits_a_schema(client, shared, strict, stream):
    form = {"type": "json_schema", "name": "small", "schema": SMALL, "strict": strict}
    want = {"model": shared.model, "input": "hello", "max_output_tokens": 200, "text": {"format": form}}
    if stream:
        *_, last = client.responses.create(**want, stream=True)
        done = last.response
    else:
        done = client.responses.create(**want)
    assert done.status == "completed"
    jsonschema.validate(json.loads(done.output_text), SMALL)
    assert done.text.format.schema_ == SMALL and done.text.format.name == "small"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_calls_or_an_answer_that_fits(client, shared, choice):
    """As agents ask: tools, and a form for what they say in the end."""
    form = {"format": {"type": "json_schema", "name": "small", "schema": SMALL, "strict": True}}
    for _ in range(3):
        done = client.responses.create(**request_fields(shared, tool_choice=choice, text=form))
        if done.status == "completed" and done.output[0].type == "message":
            assert choice == "auto"
            jsonschema.validate(json.loads(done.output_text), SMALL)
        elif done.status == "completed":
            check_call(done.output[0])


def test_any_object(client, shared):
    form = {"format": {"type": "json_object"}}
    done = client.responses.create(model=shared.model, input="hello", max_output_tokens=4, text=form)
    assert done.output_text.lstrip().startswith("{") and done.text.format.type == "json_object"


def test_what_codex_sends(shared):
    """A turn of Codex 0.169 with its own settings, behind a call and its result."""
    strict = {"strict": False, "description": "Runs it."}
    call = {"type": "function_call", "id": "fc_1", "name": "exec_command", "arguments": '{"cmd": "ls"}',
            "call_id": "c1"}  # fmt: skip
    group_call = {**call, "id": "fc_2", "call_id": "c2", "namespace": "agents", "name": "close"}
    sent = {
        "model": shared.model, "stream": True, "store": False, "include": ["reasoning.encrypted_content"],
        "input": [
            {"type": "message", "id": "msg_1", "role": "developer",
             "content": [{"type": "input_text", "text": "You are an agent."}]},
            {"type": "message", "id": "msg_2", "role": "user",
             "content": [{"type": "input_text", "text": "List the files."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Hm."}], "encrypted_content": None},
            call, group_call,
            {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": "a.txt"},
            {"type": "function_call_output", "id": "fco_2", "call_id": "c2",
             "output": [{"type": "input_text", "text": "closed"}]},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "parameters": {"type": "object", "properties": {}},
             **strict},
            {"type": "namespace", "name": "agents", "description": "Agents.",
             "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}, **strict}]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "prompt_cache_key": "0199", "client_metadata": {"session_id": "0199"},
    }  # fmt: skip
    answer = shared.ask("POST", "/v1/responses", {**sent, "max_output_tokens": 4, "temperature": 0})
    assert answer.status == 200 and b"event: response.incomplete" in answer.body, answer.body


def test_items_are_turns():
    """A thought, a text and calls in a row are one turn of the assistant."""
    items = [
        InputItem(role="user", content="hi"),
        InputItem(type="reasoning", content=[ReasoningText("why")]),
        InputItem(type="message", role="assistant", content=[OutputText("Let me see.")]),
        InputItem(type="function_call", call_id="a", name="time", arguments='{"utc": true}'),
        InputItem(type="function_call", call_id="b", name="time", arguments="{"),
        InputItem(type="function_call_output", call_id="b", output="wrong"),
        InputItem(type="function_call_output", call_id="a", output="noon"),
        InputItem(type="reasoning", content=[ReasoningText("again")]),
        InputItem(type="function_call", call_id="c", name="time", arguments=""),
    ]
    calls = [
        {"id": id, "type": "function", "function": {"name": "time", "arguments": arguments}}
        for id, arguments in (("a", {"utc": True}), ("b", "{"), ("c", {}))
    ]
    assert conversation(ResponsesBody(model="m", input=items), "<think>") == [
        Message("user", "hi"),
        Message("assistant", "<think>\nwhy\n</think>\n\nLet me see.", tuple(calls[:2])),
        Message("tool", "wrong", (), "b", "time"),
        Message("tool", "noon", (), "a", "time"),
        Message("assistant", "<think>\nagain\n</think>\n\n", (calls[2],)),
    ]


def test_text_and_calls_in_turn():
    """Each is an item with an id and a place of its own."""
    f = ResponseFunction("f")
    body = ResponsesBody(model="m", input="x", tools=[f, FunctionGroup("g", "", [f])])
    writing = ResponseWriter(body, GenerationRequest(), None)
    begun = [CallBegun(0, "a", "f"), CallBegun(1, "b", "g.f")]
    pieces = [begun[0], ArgumentsPiece(0, "{"), ArgumentsPiece(0, "}"), begun[1], ArgumentsPiece(1, "{}")]
    events = [
        *writing.add(ReplyPart(0, "Hm.", "See: ", calls=pieces)),
        *writing.add(ReplyPart(0, text="So.")),
    ]
    added = [e for e in events if e.__struct_config__.tag == "response.output_item.added"]
    assert [e.output_index for e in added] == [0, 1, 2, 3, 4]
    assert len({e.item.id for e in added}) == 5
    thought, text, one, two = writing.answer.output
    assert (thought.content[0].text, text.content[0].text) == ("Hm.", "See: ")
    assert (one.call_id, one.name, one.arguments) == ("a", "f", "{}")
    assert (two.call_id, two.namespace, two.name, two.arguments) == ("b", "g", "f", "{}")
    assert [e.sequence_number for e in events] == list(range(len(events)))

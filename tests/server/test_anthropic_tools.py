"""Tools in Anthropic's form, with Anthropic's own client."""

import json
from types import SimpleNamespace

import jsonschema
import pytest
from ruvmlx.apps.server.messages import BlockEvents, _calls
from ruvmlx.apps.server.writing import ReplyPart, WrittenReply

from ruvmlx.models.text.tool_calls import ArgumentsPiece, CallBegun, ParsedCall

anthropic = pytest.importorskip("anthropic", reason="the dependency group `clients` is not installed")

HI = {"role": "user", "content": "hello"}
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False}
SCHEMAS = {"weather": DAYS, "time": TIME}
TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


@pytest.fixture
def claude(roomy):
    url = f"http://127.0.0.1:{roomy.port}"
    with anthropic.Anthropic(base_url=url, api_key="x", max_retries=0, timeout=600) as found:
        yield found


@pytest.fixture
def request_fields(roomy):
    one = {"type": "any", "disable_parallel_tool_use": True}
    body = {"model": roomy.model, "messages": [HI], "max_tokens": 150, "tools": TOOLS, "tool_choice": one}
    return {**body, "extra_body": {"temperature": 1.0}}


def test_a_required_call_fits_its_schema(claude, request_fields):
    done = claude.messages.create(**request_fields)
    assert done.stop_reason == "tool_use"
    [block] = done.content
    assert block.type == "tool_use" and block.id
    jsonschema.validate(block.input, SCHEMAS[block.name])


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_chosen_tool_is_called(claude, request_fields, name):
    done = claude.messages.create(**request_fields | {"tool_choice": {"type": "tool", "name": name}})
    assert [block.name for block in done.content] == [name]
    jsonschema.validate(done.content[0].input, SCHEMAS[name])


def test_a_stream_joins_to_the_whole_input(claude, request_fields):
    """Greedy, so that the two replies are the same."""
    request_fields |= {"extra_body": {"temperature": 0}, "tool_choice": {"type": "tool", "name": "weather"}}
    whole = claude.messages.create(**request_fields)
    with claude.messages.stream(**request_fields) as stream:
        pieces = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert json.loads("".join(pieces)) == final.content[0].input == whole.content[0].input
    assert [block.type for block in final.content] == ["tool_use"]


def test_a_cut_call_is_a_block_in_both_forms(claude, request_fields):
    """Cut before the call has a name, there is no block; never is its mark a text."""
    request_fields |= {"extra_body": {"temperature": 0}}
    kinds = []
    for limit in (1, 2, 5, 12, 24, 40, 48):
        whole = claude.messages.create(**request_fields | {"max_tokens": limit})
        with claude.messages.stream(**request_fields | {"max_tokens": limit}) as stream:
            blocks = stream.get_final_message().content
        assert whole.stop_reason == "max_tokens"
        kinds.append([block.type for block in whole.content])
        assert kinds[-1] == [block.type for block in blocks]
        assert all(block.text == "<" for block in whole.content if block.type == "text")
    assert [] in kinds and ["tool_use"] in kinds


@pytest.mark.parametrize("written", ["", '{"city": "Ro'])
def test_a_cut_call_is_no_call_with_too_few_arguments(written):
    """A client that runs every block sees what the model wrote; the whole input of an empty call is {}."""
    whole, cut = ParsedCall("a", "time", "{}"), ParsedCall("b", "weather", written)
    response = SimpleNamespace(finish_reason="length")
    blocks = _calls(WrittenReply(response, calls=[whole, cut]))
    assert [block.input for block in blocks] == [{}, {"INVALID_JSON": written}]
    response.finish_reason = "stop"
    assert [block.input for block in _calls(WrittenReply(response, calls=[whole]))] == [{}]


def test_several_calls_are_blocks_of_their_own(claude, request_fields):
    """Up to eight calls may be required at once; each block is complete."""
    request_fields |= {"tool_choice": {"type": "any"}, "max_tokens": 700, "tools": TOOLS[1:]}
    with claude.messages.stream(**request_fields) as stream:
        final = stream.get_final_message()
    assert final.content and len({block.id for block in final.content}) == len(final.content)
    for block in final.content[: None if final.stop_reason == "tool_use" else -1]:
        jsonschema.validate(block.input, TIME)


def test_text_and_calls_are_blocks_in_their_order():
    """In one part, the text comes before its calls; each block is closed before the next one."""
    blocks = BlockEvents()
    calls = [CallBegun(0, "a", "x"), ArgumentsPiece(0, "{}"), CallBegun(1, "b", "y"), ArgumentsPiece(1, "{}")]
    events = [*blocks.of(ReplyPart(0, text="So.", calls=calls)), *blocks.of(ReplyPart(0, text="Bye."))]
    told = [
        (str(event.__struct_config__.tag).removeprefix("content_block_"), event.index) for event in events
    ]
    block = ("start", "delta", "stop")
    assert told == [(name, i) for i in range(4) for name in block][:-1] and blocks.called


def test_arguments_that_are_no_json_do_not_vanish(claude, request_fields, says):
    """Without streaming, the server puts the invalid arguments into an object with the key INVALID_JSON.
    Anthropic's documentation advises this form. With streaming, the server sends the model's unchanged text.
    """
    say = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    says("So. " + say % ("weather", "{days: 3}") + say % ("time", '{"utc": true}'))
    request_fields |= {"tool_choice": {"type": "auto"}}
    whole = claude.messages.create(**request_fields)
    assert whole.stop_reason == "tool_use"
    text, first, second = whole.content
    assert (text.text, first.name, second.input) == ("So.", "weather", {"utc": True})
    assert first.input == {"INVALID_JSON": "{days: 3}"}
    streamed = claude.messages.create(**request_fields, stream=True)
    deltas = [event.delta for event in streamed if event.type == "content_block_delta"]
    pieces = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert pieces == '{days: 3}{"utc": true}'


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_client_works_without_threads(claude, request_fields, stream):
    """The runner first asks the server to keep the conversation. The error says that the server cannot keep
    it, so the runner sends the whole conversation."""
    ran = []

    @anthropic.beta_tool
    def time(utc: bool) -> str:
        """Tell the time."""
        ran.append(utc)
        return "noon"

    del request_fields["tools"]
    runner = claude.beta.messages.tool_runner(**request_fields, tools=[time], max_iterations=2, stream=stream)
    said = [one.get_final_message() if stream else one for one in runner]
    assert [one.stop_reason for one in said] == ["tool_use"] * 2 and len(ran) >= 1


CALL = {"type": "tool_use", "id": "abc", "name": "time", "input": {"utc": True}}
RESULT = {"type": "tool_result", "tool_use_id": "abc", "content": [{"type": "text", "text": "noon"}]}
TOLD = [HI, {"role": "assistant", "content": [{"type": "text", "text": "So."}, CALL]}]


def test_earlier_calls_and_results_are_read(roomy):
    """The prompt is that of the same conversation in OpenAI's form; an error is told."""
    counts = []
    for more in ({}, {"is_error": True}):
        messages = [
            *TOLD,
            {"role": "user", "content": [{**RESULT, **more}, {"type": "text", "text": "Go on."}]},
        ]
        body = {"model": roomy.model, "messages": messages}
        counts.append(roomy.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"])
    function = {"name": "time", "arguments": '{"utc": true}'}
    calls = [{"id": "abc", "type": "function", "function": function}]
    other = [HI, {"role": "assistant", "content": "So.", "tool_calls": calls}]
    other += [
        {"role": "tool", "tool_call_id": "abc", "content": "noon"},
        {"role": "user", "content": "Go on."},
    ]
    usage = roomy.chat(messages=other, max_tokens=1).json["usage"]
    assert counts == [usage["prompt_tokens"], usage["prompt_tokens"] + len("Error: ")]


def test_tools_are_counted(roomy):
    def count(**more):
        body = {"model": roomy.model, "messages": [HI], **more}
        return roomy.ask("POST", "/v1/messages/count_tokens", body).json["input_tokens"]

    assert count(tools=TOOLS) > count(tools=TOOLS[1:]) > count() == count(tools=[])
    assert count(tools=TOOLS, tool_choice={"type": "none"}) == count()


ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
STRICT = {"name": "f", "input_schema": ODD, "strict": True}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "clock"}}, "tool_choice"),
        ({"tools": [STRICT], "tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].tool_use_id"),
    ],
)
def test_refused(roomy, fields, param):
    body = {"model": roomy.model, "messages": [HI], "max_tokens": 4, **fields}
    refused = roomy.ask("POST", "/v1/messages", body)
    assert refused.status == 400 and refused.json["error"]["param"] == param, refused.json
    assert refused.json["error"]["message"].startswith(f"{param}: ")

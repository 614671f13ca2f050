"""Tools in OpenAI's form: forced calls parse, whole and streamed; earlier calls and results are read; what
does not fit together is refused by its field."""

import json

import jsonschema
import pytest
from ruvmlx.apps.server.bodies import AssistantTurn, UserTurn
from ruvmlx.apps.server.chat_requests import earlier_call, messages_of
from ruvmlx.apps.server.splitting import Calls, SplitText, joined_calls

from ruvmlx.engine.tools import tool_form
from ruvmlx.models.text.tool_calls import HERMES, CallParser

openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]
DAYS = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "additionalProperties": False}
SCHEMAS = {"weather": DAYS, "time": TIME}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name], **more}}


TOOLS = [tool("weather", strict=True), tool("time")]


@pytest.fixture
def shared(roomy):
    return roomy


@pytest.fixture
def client(shared):
    with openai.OpenAI(base_url=shared.url, api_key="x", max_retries=0, timeout=600) as found:
        yield found


def request_fields(shared, **more):
    base = {"model": shared.model, "messages": HI, "max_tokens": 150, "temperature": 1.0, "seed": 5}
    return {**base, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, **more}


def check_arguments(function):
    jsonschema.validate(json.loads(function.arguments), SCHEMAS[function.name])


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_parses(client, shared, seed):
    choice = client.chat.completions.create(**request_fields(shared, seed=seed)).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [made] = choice.message.tool_calls
    assert made.type == "function" and made.id
    check_arguments(made.function)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_chosen_function_is_called(client, shared, name):
    choice = {"type": "function", "function": {"name": name}}
    done = client.chat.completions.create(**request_fields(shared, tool_choice=choice))
    assert [made.function.name for made in done.choices[0].message.tool_calls] == [name]
    check_arguments(done.choices[0].message.tool_calls[0].function)


def test_a_stream_of_calls_is_the_whole_reply(client, shared):
    """Two replies at once: ids and names once, and the pieces of the arguments join."""
    want = request_fields(shared, n=2)
    whole = client.chat.completions.create(**want)
    chunks = list(client.chat.completions.create(**want, stream=True))
    for i in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        deltas = [d for c in mine for d in c.delta.tool_calls or []]
        made = whole.choices[i].message.tool_calls
        assert [d.function.name for d in deltas if d.id] == [m.function.name for m in made]
        for k, m in enumerate(made):
            assert "".join(d.function.arguments for d in deltas if d.index == k) == m.function.arguments
        assert mine[-1].finish_reason == "tool_calls" and {c.finish_reason for c in mine[:-1]} == {None}
        assert all(c.delta.tool_calls != [] for c in mine)
        assert "".join(c.delta.content or "" for c in mine) == ""


def test_a_cut_call_ends_by_its_length(client, shared):
    """The arguments so far are what there is of them."""
    done = client.chat.completions.create(**request_fields(shared, max_tokens=30)).choices[0]
    assert done.finish_reason == "length"
    stream = client.chat.completions.create(**request_fields(shared, max_tokens=30), stream=True)
    assert [c.choices[0].finish_reason for c in stream][-1] == "length"
    for limit in range(1, 12):  # cut before the call has a name
        message = (
            client.chat.completions.create(**request_fields(shared, max_tokens=limit)).choices[0].message
        )
        assert "<tool_call>" not in (message.content or "") and "name" not in (message.content or "")


def test_a_call_that_a_stop_text_cuts_is_not_a_whole_call(client, shared):
    """A program runs the calls of a reply that ended by "tool_calls": their arguments must be whole."""
    fields = request_fields(shared, stop=["}"])
    done = client.chat.completions.create(**fields).choices[0]
    assert done.finish_reason == "stop" and not done.message.tool_calls[0].function.arguments.endswith("}")
    stream = list(client.chat.completions.create(**fields, stream=True))
    assert [c.choices[0].finish_reason for c in stream][-1] == "stop"


def test_none_is_a_reply_without_tools(client, shared):
    """The prompt is that of the messages alone."""
    want = request_fields(shared, max_tokens=8, parallel_tool_calls=None)
    done = client.chat.completions.create(**{**want, "tool_choice": "none"})
    plain = client.chat.completions.create(
        model=shared.model, messages=HI, max_tokens=8, seed=5, temperature=1
    )
    assert done.usage.prompt_tokens == plain.usage.prompt_tokens
    assert done.choices[0].message.content == plain.choices[0].message.content
    auto = client.chat.completions.create(**{**want, "tool_choice": "auto"})
    assert auto.usage.prompt_tokens > done.usage.prompt_tokens
    assert auto.choices[0].message.tool_calls is None and auto.choices[0].message.content


CALL = {"id": "abc", "type": "function", "function": {"name": "time", "arguments": '{"utc": true}'}}
RESULT = {"role": "tool", "tool_call_id": "abc", "content": "noon"}


def test_earlier_calls_and_results_are_read(client, shared):
    """Both change the prompt, also where the request itself has no tools."""
    told = [*HI, {"role": "assistant", "tool_calls": [CALL]}, RESULT]
    want = {"model": shared.model, "max_tokens": 4, "temperature": 0}
    counts = {client.chat.completions.create(messages=m, **want).usage.prompt_tokens for m in (told, HI)}
    form = tool_form(shared.serving.runtime.model.tokenizer)
    assert form.dialect is HERMES and not form.in_template
    written = '<tool_call>\n{"name": "time", "arguments": {"utc": true}}\n</tool_call>'
    said = [*HI, {"role": "assistant", "content": written}]
    said.append({"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"})
    same = client.chat.completions.create(messages=said, **want)
    done = client.chat.completions.create(messages=told, **want)
    assert len(counts) == 2 and done.usage.prompt_tokens == same.usage.prompt_tokens
    assert done.choices[0].message.content == same.choices[0].message.content


def test_a_reply_goes_back_as_it_came(client, shared):
    """The client sends all fields that it has read, empty ones too."""
    first = client.chat.completions.create(**request_fields(shared)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noon"}
    want = {"model": shared.model, "max_tokens": 4, "temperature": 0}
    done = client.chat.completions.create(messages=[*HI, first, result], **want)
    bare = {"role": "assistant", "tool_calls": [call.to_dict() for call in first.tool_calls]}
    same = client.chat.completions.create(messages=[*HI, bare, result], **want)
    assert "refusal" in first.model_fields_set
    assert done.choices[0].message.content == same.choices[0].message.content


def test_a_thought_of_an_earlier_reply():
    """It goes to its reply with the model's tag; a model without one never reads it."""
    turns = [AssistantTurn(content="so", reasoning_content="why"), UserTurn(content="more")]
    assert messages_of(turns, "<think>")[0].content == "<think>\nwhy\n</think>\n\nso"
    assert messages_of(turns, None)[0].content == "so"


@pytest.mark.parametrize("arguments", ['{"utc": tr', "", "[1]", "[" * 9000])
def test_any_arguments_of_an_earlier_call_are_read(shared, arguments):
    """Nothing checks what a model writes on its own, and clients send it back: it reads its own text."""
    made = {**CALL, "function": {"name": "time", "arguments": arguments}}
    told = [*HI, {"role": "assistant", "tool_calls": [made]}, RESULT]
    assert earlier_call("abc", "time", arguments)["function"]["arguments"] == (arguments or {})
    answer = shared.chat(messages=told)
    assert answer.status == (200 if len(arguments) < 1000 else 400)  # longer than the context
    assert len(arguments) < 1000 or "reads at most" in answer.error["message"]


UNKNOWN = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
STRICT = [{"type": "function", "function": {"name": "f", "parameters": UNKNOWN, "strict": True}}]
TIME_ONLY = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": TIME_ONLY, "tools": TOOLS}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": STRICT, "tool_choice": "required"}, "tools"),
        ({"messages": [*HI, RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [*HI, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [*HI, {"role": "assistant"}]}, "messages[1].content"),
        (
            {"messages": [*HI, {"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages[1].tool_calls",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused(shared, fields, param, stream):
    refused = shared.chat(**fields, stream=stream)
    assert refused.status == 400 and refused.error["param"] == param, refused.error
    assert param in refused.error["message"] and len(refused.error["message"]) < 400


def test_what_is_not_strict_may_have_unknown_keywords(shared):
    """Parameters are often written for people."""
    tags = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2}
    schema = {"type": "object", "properties": {"tags": tags}, "required": ["tags"]}
    schema["additionalProperties"] = False
    unknown = {**schema, "properties": {"tags": {**tags, "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": unknown}}]
    done = shared.chat(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=150)
    assert done.status == 200
    [made] = done.json["choices"][0]["message"]["tool_calls"]
    jsonschema.validate(json.loads(made["function"]["arguments"]), schema)


TWO = 'Let me see. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n' * 2 + "Done."


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("most", "names", "said"), [(None, ["a", "a"], 2), (1, ["a"], 2)])
def test_the_parts_of_a_reply(size, most, names, said):
    """In pieces of any size: thought, text, calls; further calls are left out where one is allowed."""
    text = f"<think>Hm.</think>{TWO}"
    split = SplitText(raw=False, new_calls=lambda: Calls(CallParser(HERMES, ["a"]), most))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in split.feed(piece, ends=False)] + split.feed("", ends=True)
    assert "".join(part.thought for part in parts) == "Hm."
    answer = "".join(part.text for part in parts)
    assert answer.count("Let me see.") == said and ("Done." in answer) == (most is None)
    calls = joined_calls([piece for part in parts for piece in part.calls])
    assert [made.name for made in calls] == names
    assert all(json.loads(made.arguments) == {"x": 1} for made in calls)

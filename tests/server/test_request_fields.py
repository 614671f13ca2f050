"""The table of request fields: complete for the clients' types, true of the server, and in the document."""

import json
import types
import typing

import msgspec
import pytest
from ruvmlx.apps.server.anthropic_bodies import CountBody, MessagesBody
from ruvmlx.apps.server.app import ENDPOINTS
from ruvmlx.apps.server.bodies import ChatBody, CompletionBody, EmbeddingBody, ToolTurn
from ruvmlx.apps.server.llama_cpp_bodies import InfillBody
from ruvmlx.apps.server.ollama_bodies import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from ruvmlx.apps.server.request_fields import UNUSED, WOULD_CHANGE, ignored_betas, steps_of, take_unused
from ruvmlx.apps.server.responses_bodies import ResponsesBody

HI = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {}}}
PATHS = {
    ChatBody: "/v1/chat/completions",
    CompletionBody: "/v1/completions",
    EmbeddingBody: "/v1/embeddings",
    ResponsesBody: "/v1/responses",
    CountBody: "/v1/messages/count_tokens",
    MessagesBody: "/v1/messages",
    OllamaChatBody: "/api/chat",
    OllamaGenerateBody: "/api/generate",
    OllamaEmbedBody: "/api/embed",
    OllamaEmbeddingsBody: "/api/embeddings",
    InfillBody: "/infill",
}
CALLED = [
    *HI,
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "noon"}]},
]
ANTHROPIC_TOOL = {"name": "look", "input_schema": FUNCTION["parameters"]}
ANTHROPIC = {
    "messages": CALLED,
    "tools": [ANTHROPIC_TOOL],
    "thinking": {"type": "adaptive"},
    "output_config": {},
}
GROUP = {"type": "namespace", "name": "g", "description": "", "tools": [{"type": "function", **FUNCTION}]}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "noon"},
]
SAID = [{"type": "input_text", "text": "noon"}]
RESPONSES = [
    {"role": "user", "content": SAID},
    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": SAID},
]
OLLAMA = {"temperature": 0, "num_predict": 4}
WRITES = {"stream": True, "temperature": 0}
# What a path needs so that its last field has a place.
BODIES = {
    ChatBody: {
        "messages": CHAT, "max_tokens": 4, "stream_options": {},
        "prediction": {"type": "content", "content": [{"type": "text", "text": "noon"}]}, **WRITES,
    },
    CompletionBody: {"prompt": "hello", "max_tokens": 4, "stream_options": {}, **WRITES},
    EmbeddingBody: {"input": "hello"},
    ResponsesBody: {
        "input": RESPONSES, "max_output_tokens": 4, "reasoning": {}, "text": {},
        "tools": [{"type": "function", **FUNCTION}, GROUP], **WRITES,
    },
    CountBody: ANTHROPIC,
    MessagesBody: {**ANTHROPIC, "max_tokens": 4, **WRITES},
    OllamaChatBody: {"messages": HI, "options": OLLAMA},
    OllamaGenerateBody: {"prompt": "hello", "options": OLLAMA},
    OllamaEmbedBody: {"input": "hello"},
    OllamaEmbeddingsBody: {"prompt": "hello"},
    InfillBody: {"input_prefix": "a", "input_suffix": "b"},
}  # fmt: skip
VALUES = {  # a value of each kind
    "context_management": {ResponsesBody: [{"type": "compaction"}]},
    "metadata": {ChatBody: {"a": "b"}},
    "stream_options": {ResponsesBody: {"include_obfuscation": True}},
}
CASES = [(kind, path) for kind, fields in UNUSED.items() for path in fields]


def value_of(kind, path, field):
    """One value that the field may have."""
    name = path.rpartition(".")[2]
    if kind in VALUES.get(name, {}):
        return VALUES[name][kind]
    return _example(field.kind)


def _example(kind):
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or isinstance(kind, types.UnionType):
        return arguments[0] if origin is typing.Literal else _example(arguments[0])
    if origin is typing.Annotated:
        return _example(arguments[0])
    if origin is list:
        return [_example(arguments[0])]
    if origin is dict:
        return {"a": "b"}
    return {str: "x", bool: True, int: 3, float: 1.0, typing.Any: {"a": 1}, types.NoneType: None}[kind]


def put(body, path, value):
    """A copy of the body with this field in every place that the path names."""
    body = json.loads(json.dumps(body))
    _put(body, steps_of(path), value)
    return body


def _put(here, steps, value):
    (name, tag), *rest = steps
    if rest:
        for item in [here[name]] if tag is None else here[name]:
            if _has_place(item, tag, rest):
                _put(item, rest, value)
    elif tag:
        here.setdefault(name, []).append({"type": tag, **value})
    else:
        here[name] = value


def _has_place(item, tag, rest):
    is_meant = isinstance(item, dict) and (not tag or item.get("type") == tag)
    name, inner = rest[0]
    return is_meant and (name in item if len(rest) > 1 or inner else True)


def ask(running, kind, body):
    return running.ask("POST", PATHS[kind], {"model": running.model, **body})


def words(answer):
    """What an answer says, in order; how it is cut into events differs."""
    lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n") if b"{" in line]
    return "".join(said for line in lines for said in _said_parts(json.loads(line)))


def _said_parts(value):
    if isinstance(value, list):
        yield from (said for item in value for said in _said_parts(item))
    for name, item in value.items() if isinstance(value, dict) else ():
        if name in ("text", "content", "delta", "partial_json", "response") and isinstance(item, str):
            yield item
        elif name in ("embedding", "embeddings") or list(value) == ["input_tokens"]:
            yield str(item)
        else:
            yield from _said_parts(item)


def is_known(kind, name):
    paths = [*UNUSED.get(kind, {}), *WOULD_CHANGE.get(kind, {})]
    return name in kind.__struct_fields__ or any(steps_of(path)[0][0] == name for path in paths)


def test_every_field_of_the_clients_types_is_somewhere():
    """A field that a new version of a client's package brings fails here, until somebody has decided."""
    openai = pytest.importorskip("openai.types", reason="the dependency group `clients` is not installed")
    from anthropic.types import beta
    from openai.types import responses

    sent = {
        ChatBody: openai.chat.completion_create_params.CompletionCreateParamsBase,
        CompletionBody: openai.completion_create_params.CompletionCreateParamsBase,
        EmbeddingBody: openai.embedding_create_params.EmbeddingCreateParams,
        ResponsesBody: responses.response_create_params.ResponseCreateParamsBase,
        MessagesBody: beta.message_create_params.MessageCreateParamsBase,
        CountBody: beta.message_count_tokens_params.MessageCountTokensParams,
    }
    missing = {
        f"{PATHS[kind]} {name}" for kind, fields in sent.items() for name in fields.__annotations__
        if not is_known(kind, name)
    }  # fmt: skip
    assert not missing


@pytest.mark.parametrize(("kind", "path"), CASES, ids=[f"{k.__name__}-{p}" for k, p in CASES])
def test_an_unused_field_is_taken_out(kind, path):
    """With a value of its kind, or null; any other value stays, and is refused."""
    field = UNUSED[kind][path]
    body = put(BODIES[kind], path, value_of(kind, path, field))
    assert body != BODIES[kind]
    assert take_unused(body, kind) == [path] and body == BODIES[kind]


@pytest.mark.parametrize("kind", [k for k in PATHS if k is not InfillBody], ids=lambda kind: kind.__name__)
def test_unused_fields_change_nothing(roomy, kind):
    """All at once: the answer is the same, greedy, and its header names them."""
    plain, body = BODIES[kind], BODIES[kind]
    for path, field in UNUSED[kind].items():
        body = put(body, path, value_of(kind, path, field))
    expected, answer = ask(roomy, kind, plain), ask(roomy, kind, body)
    assert expected.status == answer.status == 200, answer.body
    assert words(answer) == words(expected) and words(answer)
    assert answer.headers["x-ruvmlx-ignored"].split(", ") == [*UNUSED[kind]]
    assert "x-ruvmlx-ignored" not in expected.headers


@pytest.mark.parametrize(
    ("kind", "path", "value", "param"),
    [
        (ChatBody, "modalities", ["text", "audio"], "modalities"),
        (ChatBody, "service_tier", 3, "service_tier"),
        (CompletionBody, "best_of", 2, "best_of"),
        (CompletionBody, "best_of", True, "best_of"),
        (ResponsesBody, "top_logprobs", 1, "top_logprobs"),
        (ResponsesBody, "include", ["message.output_text.logprobs"], "include"),
        (ResponsesBody, "tools[].tools[].defer_loading", "no", "tools[1].tools[0].defer_loading"),
        (MessagesBody, "tools[].allowed_callers", ["code_execution_20250825"], "tools[0].allowed_callers"),
    ],
)
def test_an_unused_field_with_another_value(roomy, kind, path, value, param):
    refused = ask(roomy, kind, put(BODIES[kind], path, value)).json["error"]
    assert refused["param"] == param and refused["code"] == "invalid_value"


REFUSED = [(kind, name) for kind, fields in WOULD_CHANGE.items() if kind in PATHS for name in fields]


@pytest.mark.parametrize(("kind", "name"), REFUSED, ids=[f"{k.__name__}-{n}" for k, n in REFUSED])
def test_what_would_change_the_answer_is_refused_with_the_reason(roomy, kind, name):
    refused = ask(roomy, kind, put(BODIES[kind], name, {"a": 1}))
    error = refused.json if "param" in refused.json else refused.json["error"]
    assert refused.status == 400 and error["param"] == name
    assert WOULD_CHANGE[kind][name] in (error["error"] if "error" in error else error["message"])


def test_the_document_has_them(roomy):
    """Each at its place, with the words that it changes nothing."""
    schemas = roomy.ask("GET", "/openapi.json").json["components"]["schemas"]
    for kind, fields in UNUSED.items():
        for path in fields:
            *_, (name, tag) = steps_of(path)
            if tag is not None:
                assert f'"const": "{tag}"' in json.dumps(schemas[kind.__name__]["properties"][name])
                continue
            told = [s["properties"][name] for s in schemas.values() if name in s.get("properties", {})]
            assert any("changes nothing" in one.get("description", "") for one in told), path


def test_betas(roomy):
    """Those that ask for what is there are not named; what is no name is not echoed."""
    header = "mid-conversation-system-2026-04-07,effort-2025-11-24, bad name\r\n, context-management-2025"
    assert ignored_betas(header) == ["effort-2025-11-24", "context-management-2025"]
    body = {"model": roomy.model, "max_tokens": 1, "messages": HI}
    answer = roomy.ask("POST", "/v1/messages", body, anthropic_beta="effort-2025-11-24")
    assert answer.status == 200 and answer.headers["x-ruvmlx-ignored"] == "effort-2025-11-24"


@pytest.mark.parametrize(
    ("kind", "field", "name"),
    [
        (ChatBody, {"reasoning_effort": "high"}, "reasoning_effort"),
        (ResponsesBody, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (MessagesBody, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        (CountBody, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_effort_of_a_model_that_does_not_think(roomy, kind, field, name, stream):
    """It changes nothing, and the header says so: clients send it to every model."""
    body = BODIES[kind] | field | ({} if kind is CountBody else {"stream": stream})
    body |= {MessagesBody: {"max_tokens": 1025}, ChatBody: {"stream_options": None}}.get(kind, {})
    answer = ask(roomy, kind, body)
    assert answer.status == 200, answer.body
    assert answer.headers["x-ruvmlx-ignored"].split(", ") == [name]


def _structs(kind, found):
    """Collect the structs of a body, with those inside its fields."""
    parts = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
        found.add(kind)
        parts = typing.get_type_hints(kind, include_extras=True).values()
    for part in parts:
        _structs(part, found)
    return found


def test_null_is_the_same_as_a_missing_field():
    """For every field of every body that a client may leave out."""
    kinds = set().union(*(_structs(endpoint.body, set()) for endpoint in ENDPOINTS))
    assert {ChatBody, ToolTurn} <= kinds
    for kind in kinds:
        types = typing.get_type_hints(kind, include_extras=True)
        for field in msgspec.structs.fields(kind):
            if not field.required:
                msgspec.convert(None, types[field.name])


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/chat", {"messages": None}),
        ("/api/chat", {"messages": [*HI, {"role": "assistant", "tool_calls": [
            {"function": {"name": "look", "arguments": None}}]}, {"role": "tool", "content": "noon"}]}),
        ("/v1/messages/count_tokens", {"messages": [*HI, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "a", "signature": None}, {"type": "text", "text": "b"}]}]}),
        ("/v1/responses/input_tokens", {"input": [{"type": None, **HI[0]}]}),
    ],
)  # fmt: skip
def test_a_null_of_a_client(shared, path, fields):
    answer = shared.ask("POST", path, {"model": shared.model, **fields})
    assert answer.status == 200, answer.body

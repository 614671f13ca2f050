"""ollama's API, with its official Python client."""

import json
import os
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from ruvmlx.apps.server.ollama_models import _details
from ruvmlx.apps.server.serving import ModelFacts

from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.find.local import survey

from .test_tools import DAYS

ollama = pytest.importorskip("ollama", reason="the dependency group `clients` is not installed")

HI = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 8}


@pytest.fixture
def client(roomy):
    return ollama.Client(f"http://127.0.0.1:{roomy.port}")


def test_chat_whole_and_as_a_stream(client, roomy):
    """Both say what OpenAI's form says; the last line has the numbers."""
    want = roomy.chat("hello").json
    text = want["choices"][0]["message"]["content"]
    done = client.chat(roomy.model, HI, options=GREEDY)
    assert done.message.content == text and done.message.role == "assistant"
    assert done.done and done.done_reason == "length" and done.eval_count == 8
    assert done.prompt_eval_count == want["usage"]["prompt_tokens"]
    pieces = list(client.chat(roomy.model, HI, options=GREEDY, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == text
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == 8
    for last in (done, pieces[-1]):
        parts = last.load_duration, last.prompt_eval_duration, last.eval_duration
        assert min(parts) > 0 and sum(parts) <= last.total_duration


def test_generate(client, roomy):
    """With the chat template as chat does, with `raw` as OpenAI's completions do."""
    chat = client.chat(roomy.model, [{"role": "system", "content": "Be kind."}, *HI], options=GREEDY)
    done = client.generate(roomy.model, "hello", system="Be kind.", options=GREEDY)
    assert done.response == chat.message.content
    raw = client.generate(roomy.model, "hello", raw=True, options=GREEDY, stream=True)
    body = roomy.body(prompt="hello")
    want = roomy.ask("POST", "/v1/completions", body).json["choices"][0]["text"]
    assert "".join(piece.response for piece in raw) == want
    assert client.generate(roomy.model, "").done_reason == "load"


def test_raw_prompts(client, roomy):
    """A format holds; what only a chat template could use is named."""
    body = {"model": roomy.model, "prompt": "hello", "raw": True, "stream": False, "system": "Be kind."}
    form = {"enum": ["river", "sea"]}
    answer = roomy.ask("POST", "/api/generate", {**body, "think": False, "format": form})
    assert json.loads(answer.json["response"]) in form["enum"]
    assert answer.headers["x-ruvmlx-ignored"] == "system"


def test_what_there_is_not(client, roomy):
    """Clients show the line of an error, of unknown paths, too."""
    with pytest.raises(ollama.ResponseError) as raised:
        client.pull(roomy.model)
    assert raised.value.error.startswith("there is no such path")


@pytest.mark.parametrize("stream", [False, True])
def test_formats(client, roomy, stream):
    """A schema, and any object."""
    asked = {"options": {"temperature": 1.0, "seed": 3, "num_predict": 400}, "stream": stream}
    for form in (DAYS, "json"):
        done = client.chat(roomy.model, HI, format=form, **asked)
        parts = list(done) if stream else [done]
        if parts[-1].done_reason == "stop":
            value = json.loads("".join(part.message.content for part in parts))
            jsonschema.validate(value, DAYS if form is DAYS else {"type": "object"})


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(client, roomy, calls_first, stream):
    """The client sends the reply back as it came, with the result behind it."""

    def weather(days: int) -> str:
        """Tells the weather.

        Args:
          days: how many.
        """
        return f"rain for {days} days"

    calls_first("weather", {"type": "object", "properties": {"days": {"const": 3}}, "required": ["days"]})
    done = client.chat(roomy.model, HI, tools=[weather], options={"num_predict": 80}, stream=stream)
    parts = list(done) if stream else [done]
    message = parts[-1].message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"days": 3})
    result = {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}
    again = client.chat(roomy.model, [*HI, message, result], tools=[weather], options=GREEDY)
    assert again.eval_count == 8 and again.prompt_eval_count > parts[-1].prompt_eval_count
    with pytest.raises(ollama.ResponseError, match="no call before this message"):
        client.chat(roomy.model, [*HI, result], options=GREEDY)


WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": DAYS}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}}


def test_a_call_as_langchain_for_javascript_sends_it_back(roomy):
    """LangChain sends the type of the call, and no name in the result."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"days": 3}}}
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "content": "rain"})
    body = {"model": roomy.model, "tools": [WEATHER], "stream": False, "options": GREEDY}
    answer = roomy.ask("POST", "/api/chat", {**body, "messages": messages})
    assert answer.status == 200, answer.body
    messages[-1]["name"] = "weather"
    named = roomy.ask("POST", "/api/chat", {**body, "messages": messages})
    assert named.headers["x-ruvmlx-ignored"] == "messages[].name"
    assert named.json["message"] == answer.json["message"]


def test_a_conversation_as_open_webui_sends_it(roomy):
    """Open WebUI sends the field `index` of a call, and the option `reasoning_effort`."""
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": {"days": 3}}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], "content": ""}]
    messages.append({"role": "tool", "content": "rain", "tool_call_id": "c1"})
    options = {"num_ctx": 2048, "mirostat": 0, "reasoning_effort": "low", **GREEDY}
    body = {"model": roomy.model, "messages": messages, "stream": True, "tools": [WEATHER]}
    answer = roomy.ask("POST", "/api/chat", {**body, "options": options})
    assert answer.status == 200, answer.body
    ignored = answer.headers["x-ruvmlx-ignored"].split(", ")
    assert {"options.reasoning_effort", "options.num_ctx"} <= {*ignored}


def test_a_result_in_several_messages(roomy):
    """Strands sends one message for each part of a result. The server refuses a result without a call."""
    function = {"name": "weather", "arguments": {"days": 3}}
    messages = [*HI, {"role": "assistant", "content": "let me"}]
    messages.append({"role": "assistant", "tool_calls": [{"function": function}]})
    messages += [{"role": "tool", "content": "rain"}, {"role": "tool", "content": '{"mm": 3}'}]
    body = {"model": roomy.model, "tools": [WEATHER], "stream": False, "options": GREEDY}
    answer = roomy.ask("POST", "/api/chat", {**body, "messages": [*messages, *HI]})
    assert answer.status == 200, answer.body
    fewer = roomy.ask("POST", "/api/chat", {**body, "messages": [*messages[:-1], *HI]})
    assert answer.json["prompt_eval_count"] > fewer.json["prompt_eval_count"]
    messages[-1]["tool_name"] = "time"
    refused = roomy.ask("POST", "/api/chat", {**body, "messages": messages})
    assert refused.status == 400 and refused.json["param"] == "messages[4].role"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", {"", "weather", "time"}),
        ("none", {""}),
        ("required", {"weather", "time"}),
        ({"type": "function", "name": "time"}, {"time"}),
    ],
)
def test_a_choice_of_a_tool(roomy, choice, names, stream):
    """The AI SDK of Vercel sends a choice with each request that has tools; without a wish, it is "auto"."""
    body = {"messages": HI, "tools": [WEATHER, TIME], "tool_choice": choice, "stream": stream}
    options = {"temperature": 1.0, "seed": 3, "num_predict": 400}
    answer = roomy.ask("POST", "/api/chat", {"model": roomy.model, "options": options, **body})
    assert answer.status == 200, answer.body
    last = json.loads(answer.body.splitlines()[-1])
    calls = last["message"].get("tool_calls", [])
    assert ({call["function"]["name"] for call in calls} or {""}) <= names
    for call in calls:
        if call["function"]["name"] == "weather" and choice != "auto":
            jsonschema.validate(call["function"]["arguments"], DAYS)


def test_a_choice_of_a_tool_that_is_not_there(roomy):
    body = {"model": roomy.model, "messages": HI, "tools": [TIME]}
    refused = roomy.ask("POST", "/api/chat", {**body, "tool_choice": {"type": "function", "name": "x"}})
    assert refused.status == 400 and refused.json["param"] == "tool_choice"


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_that_are_no_json_do_not_vanish(client, roomy, says, stream):
    says('<tool_call>{"name": "weather", "arguments": {days: 3}}</tool_call>')
    tool = {"function": {"name": "weather", "parameters": {"type": "object"}}}
    done = client.chat(roomy.model, HI, tools=[tool], options=GREEDY, stream=stream)
    [call] = (list(done) if stream else [done])[-1].message.tool_calls
    assert call.function.arguments == {"INVALID_JSON": "{days: 3}"}


def test_logprobs(client, roomy):
    done = client.chat(roomy.model, HI, options=GREEDY, logprobs=True, top_logprobs=2)
    want = roomy.chat("hello", logprobs=True, top_logprobs=2).json["choices"][0]["logprobs"]["content"]
    assert [info.token for info in done.logprobs] == [info["token"] for info in want]
    assert all(len(info.top_logprobs) == 2 for info in done.logprobs)


def test_embed(client, roomy):
    """The same vectors as OpenAI's form has."""
    done = client.embed(roomy.model, ["hello", "a river"])
    body = {"model": roomy.model, "input": ["hello", "a river"]}
    want = roomy.ask("POST", "/v1/embeddings", body).json
    np.testing.assert_array_equal(done.embeddings, [row["embedding"] for row in want["data"]])
    assert done.prompt_eval_count == want["usage"]["prompt_tokens"]
    assert 0 < done.load_duration < done.total_duration
    np.testing.assert_array_equal(client.embeddings(roomy.model, "a river").embedding, done.embeddings[1])


def test_a_long_text_is_cut_unless_the_client_refuses(client, roomy):
    """As in ollama; OpenAI's form has no such field, and a text that is too long is an error there."""
    long = "word " * 9000
    cut, longer = client.embed(roomy.model, long), client.embed(roomy.model, f"{long} end")
    assert cut.prompt_eval_count == longer.prompt_eval_count == 8192
    np.testing.assert_allclose(cut.embeddings, longer.embeddings, atol=1e-5)
    with pytest.raises(ollama.ResponseError, match="8192 tokens"):
        client.embed(roomy.model, long, truncate=False)
    body = {"model": roomy.model, "input": long}
    assert roomy.ask("POST", "/v1/embeddings", body).error["code"] == "context_length_exceeded"


def test_a_seed_of_minus_one_is_random(client, roomy):
    said = {
        client.generate(roomy.model, "hi", options={"seed": -1, "temperature": 5}).response for _ in range(4)
    }
    assert len(said) > 1


def test_models(client, roomy):
    """What is listed can be asked, with ollama's tag, too."""
    names = [model.model for model in client.list().models]
    assert names == [roomy.model, f"{roomy.model}@none"]
    for name in [*names, f"{roomy.model}:latest"]:
        assert client.generate(name, "hello", options={"num_predict": 1}).eval_count == 1
        for path in ("completions", "responses/input_tokens", "embeddings"):
            asked = {"prompt": "hello", "max_tokens": 1} if path == "completions" else {"input": "hello"}
            answer = roomy.ask("POST", f"/v1/{path}", {"model": name, **asked})
            assert answer.status == 200, answer.body
    shown = client.show(roomy.model)
    assert shown.modelinfo["llama.context_length"] == 1536 and "tools" in shown.capabilities
    [loaded] = client.ps().models
    assert loaded.model == roomy.model and loaded.size > 0 and loaded.context_length == 1536
    assert roomy.ask("GET", "/api/version").json["version"]


def test_a_reply_can_be_rated(serve):
    running = serve()
    body = {"model": running.model, "prompt": "hello", "stream": False, "options": GREEDY}
    done = running.ask("POST", "/api/generate", body).json
    rated = running.ask("POST", "/v1/ratings", {"id": done["id"], "rating": "up"})
    assert rated.status == 200 and rated.json["applied"]


def test_errors_are_the_clients_own(client, roomy):
    """With the status, before a stream begins; a line where it has begun."""
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("another", HI)
    assert caught.value.status_code == 404
    for stream in (False, True):
        with pytest.raises(ollama.ResponseError, match="maximum context length") as caught:
            list(client.chat(roomy.model, [{"role": "user", "content": "long " * 400}], stream=stream))
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="mirostat"):
        client.chat(roomy.model, HI, options={"mirostat": 2})
    with pytest.raises(ollama.ResponseError, match="think"):
        client.chat(roomy.model, HI, think=True)


def test_what_copilot_chat_asks_of_a_server(roomy):
    """Copilot Chat compares each number of the version with 0.6.4, and shows the base name of a model."""
    version = roomy.ask("GET", "/api/version").json["version"]
    assert [int(number) for number in version.split(".")] >= [0, 6, 4]
    facts = roomy.ask("POST", "/api/show", {"model": roomy.model}).json
    family = facts["model_info"]["general.architecture"]
    assert facts["model_info"]["general.basename"] == roomy.model
    assert facts["model_info"][f"{family}.context_length"] > 0 and "tools" in facts["capabilities"]


def test_show_by_an_older_field(roomy):
    by_model, by_name = ({field: roomy.model} for field in ("model", "name"))
    answers = [roomy.ask("POST", "/api/show", body) for body in (by_model, by_name, {})]
    assert [answer.status for answer in answers] == [200, 200, 400] and answers[0].json == answers[1].json


def test_a_models_time_is_that_of_its_file(roomy):
    """Ollama's clients sort models by it; the start of the server says nothing."""
    path = roomy.serving.runtime.model.path
    os.utime(path, (1_600_000_000, 1_600_000_000))
    shown = roomy.ask("POST", "/api/show", {"model": roomy.model}).json["modified_at"]
    [listed] = [m for m in roomy.ask("GET", "/api/tags").json["models"] if m["name"] == roomy.model]
    assert shown == listed["modified_at"] == "2020-09-13T12:26:40Z"


def test_details_of_a_model(starter, roomy):
    """The details name the number of parameters and the type of most weights, in ollama's form."""
    found = _details(ModelFacts.of(starter, 2048))
    assert (found.parameter_size, found.quantization_level) == ("134.52M", "Q4_1")
    mixed = replace(starter, file_type="Q4_K_M", types={"Q5_0": 9, "Q4_K": 1})
    assert _details(ModelFacts.of(mixed, 2048)).quantization_level == "Q4_K_M"
    assert _details(ModelFacts.of(replace(mixed, file_type=""), 2048)).quantization_level == "Q5_0"
    assert starter.file_type == survey("s", starter.path).file_type == Facts.of(starter).file_type == "Q4_1"
    listed = roomy.ask("GET", "/api/tags").json["models"][0]
    assert listed["details"]["parameter_size"].endswith("M")

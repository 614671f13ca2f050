"""langchain-openai: chat models over both of OpenAI's forms, tools, answers as classes, embeddings."""

import json

import jsonschema
import numpy as np
import pytest

from .test_tools import DAYS

pytest.importorskip("langchain_openai", reason="the dependency group `clients` is not installed")

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

FORMS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": DAYS, "strict": True},
}


class Answer(BaseModel, extra="forbid"):  # a random model would never end an open object
    """An answer."""

    sure: bool


@pytest.fixture
def llm(roomy, monkeypatch):
    """llm(responses, ...) -> a chat model. Nothing is asked of other hosts."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")

    def make(responses, **more):
        more = {"max_tokens": 8, "temperature": 0, **more}
        return ChatOpenAI(
            model=roomy.model, base_url=roomy.url, api_key="x", max_retries=0, timeout=600,
            use_responses_api=responses, **more,
        )  # fmt: skip

    return make


@FORMS
def test_invoke_and_stream(llm, roomy, responses):
    """The same text, and the usage."""
    want = roomy.chat("hello").json
    done = llm(responses).invoke("hello")
    assert done.text == want["choices"][0]["message"]["content"]
    assert done.usage_metadata["input_tokens"] == want["usage"]["prompt_tokens"]
    chunks = list(llm(responses, stream_usage=True).stream("hello"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.text == done.text and len(chunks) > 3
    assert whole.usage_metadata["output_tokens"] == 8


@FORMS
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bind_tools(llm, roomy, responses, stream):
    """A call, and the conversation with its result."""
    model = llm(responses, max_tokens=300, temperature=1.0)
    forced = model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    if stream:
        first, *rest = forced.stream("hello")
        done = first
        for chunk in rest:
            done += chunk
    else:
        done = forced.invoke("hello")
    [call] = done.tool_calls
    assert call["name"] == "weather"
    jsonschema.validate(call["args"], DAYS)
    told = [
        HumanMessage("hello"),
        AIMessage(done.content, tool_calls=[call]),
        ToolMessage("sunny", tool_call_id=call["id"]),
    ]
    again = llm(responses).bind_tools([WEATHER], tool_choice="none").invoke(told)
    written = {"id": call["id"], "type": "function",
               "function": {"name": "weather", "arguments": json.dumps(call["args"])}}  # fmt: skip
    chat = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [written]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]  # fmt: skip
    assert again.usage_metadata["input_tokens"] == roomy.chat(messages=chat).json["usage"]["prompt_tokens"]


@FORMS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(llm, responses, method):
    model = llm(responses, max_tokens=300).with_structured_output(Answer, method=method)
    assert isinstance(model.invoke("Is it?"), Answer)


def test_embeddings(roomy):
    """check_embedding_ctx_length=False: else it sends the token ids of another model's vocabulary."""
    embeddings = OpenAIEmbeddings(
        model=roomy.model, base_url=roomy.url, api_key="x", check_embedding_ctx_length=False, max_retries=0
    )
    many, one = embeddings.embed_documents(["one text", "another"]), embeddings.embed_query("another")
    np.testing.assert_allclose(many[1], one, rtol=1e-6)
    assert np.linalg.norm(one) == pytest.approx(1, rel=1e-4)

"""litellm: chat, streams, tools, Responses, Anthropic's form and embeddings.

Its group holds back other packages, so it has an environment of its own; pyproject.toml says how.
"""

import json

import jsonschema
import numpy as np
import pytest

from .test_tools import DAYS, HI, TOOLS

litellm = pytest.importorskip("litellm", reason="the dependency group `old-clients` is not installed")


@pytest.fixture
def request_fields(roomy):
    return {
        "model": f"openai/{roomy.model}", "api_base": roomy.url, "api_key": "x", "max_tokens": 8,
        "temperature": 0, "num_retries": 0, "timeout": 60,
    }  # fmt: skip


def test_chat(request_fields, roomy):
    """Whole and as a stream, with the usage."""
    want = roomy.chat("hello").json
    done = litellm.completion(**request_fields, messages=HI)
    assert done.choices[0].message.content == want["choices"][0]["message"]["content"]
    assert done.choices[0].finish_reason == "length" and done.usage.completion_tokens == 8
    chunks = list(
        litellm.completion(**request_fields, messages=HI, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == want["choices"][0]["message"]["content"]
    assert litellm.stream_chunk_builder(chunks).usage.prompt_tokens == want["usage"]["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_tools(request_fields, stream):
    choice = {"type": "function", "function": {"name": "weather"}}
    want = {**request_fields, "messages": HI, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300}
    done = litellm.completion(**want, stream=stream)
    done = litellm.stream_chunk_builder(list(done)) if stream else done
    [call] = done.choices[0].message.tool_calls
    assert done.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), DAYS)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    for message in (done.choices[0].message, done.choices[0].message.model_dump()):
        again = litellm.completion(**{**request_fields, "messages": [*HI, message, result], "tools": TOOLS})
        assert again.usage.prompt_tokens > done.usage.prompt_tokens


def test_responses(request_fields, roomy):
    """It asks for 16 tokens at the least."""
    done = litellm.responses(
        model=request_fields["model"], api_base=roomy.url, api_key="x", input="hello", max_output_tokens=16,
        temperature=0,
    )  # fmt: skip
    want = roomy.chat("hello", max_tokens=16).json["choices"][0]["message"]["content"]
    assert done.output[0].content[0].text == want


def test_anthropics_form(request_fields, roomy):
    done = litellm.completion(
        **{**request_fields, "model": f"anthropic/{roomy.model}", "api_base": roomy.url.removesuffix("/v1")},
        messages=HI,
    )
    assert done.choices[0].message.content == roomy.chat("hello").json["choices"][0]["message"]["content"]


def test_embeddings(request_fields, roomy):
    own = roomy.ask("POST", "/v1/embeddings", {"model": roomy.model, "input": "another"}).json
    place = {key: request_fields[key] for key in ("model", "api_base", "api_key")}
    done = litellm.embedding(**place, input=["one text", "another"])
    np.testing.assert_allclose(done.data[1]["embedding"], own["data"][0]["embedding"], rtol=1e-6)

"""The command `llm` and its models of OpenAI's kind, which extra-openai-models.yaml lists: over chat
completions and over Responses."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jsonschema
import pytest

pytestmark = pytest.mark.skipif(find_spec("llm") is None, reason="the group `clients` is not installed")

MODELS = """
- {{model_id: chat, model_name: {name}, api_base: "{url}", supports_schema: true, supports_tools: true}}
- {{model_id: responses, model_name: {name}, api_base: "{url}", supports_schema: true, supports_tools: true,
    responses: true}}
"""
BOTH = pytest.mark.parametrize("model", ["chat", "responses"])
DOG = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2]}},
    "required": ["age"],
    "additionalProperties": False,
}
NOON = "def noon() -> str:\n    'The time of lunch.'\n    return 'half past twelve'"


@pytest.fixture
def ask(roomy, tmp_path):
    """ask("hello", "-m", "chat") -> what the command prints."""
    folder = tmp_path / "llm"
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(name=roomy.model, url=roomy.url))
    home = {"LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": "", "OPENAI_API_KEY": "x"}

    def run(*words):
        command = [sys.executable, "-m", "llm", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=False, env={**os.environ, **home}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def limits(model, tokens):
    return ["-m", model, "-o", "temperature", "0", "-o", "max_tokens", str(tokens)]


@BOTH
@pytest.mark.parametrize("stream", [["--no-stream"], []], ids=["whole", "stream"])
def test_a_reply(ask, roomy, model, stream):
    said = ask("hello", *limits(model, 8), *stream)
    assert said.strip() == roomy.chat("hello").json["choices"][0]["message"]["content"].strip()


@BOTH
def test_a_schema(ask, model):
    jsonschema.validate(json.loads(ask("hello", *limits(model, 200), "--schema", json.dumps(DOG))), DOG)


@pytest.mark.parametrize(
    ("model", "stream"), [("chat", []), ("responses", ["--no-stream"]), ("responses", [])]
)
def test_a_tool(ask, calls_first, model, stream):
    """The command runs the function, and the model reads what it returned."""
    seen = calls_first("noon", {"type": "object", "properties": {}, "additionalProperties": False})
    ask("When is lunch?", *limits(model, 200), *stream, "--functions", NOON)
    first, second = (" ".join(message.content for message in request.messages) for request in seen)
    assert "The time of lunch." in first and "half past twelve" not in first
    assert "half past twelve" in second


@BOTH
def test_a_conversation_goes_on(ask, roomy, model):
    said = ask("hello", *limits(model, 8)).strip()
    more = ask("and now", "-c", *limits(model, 8))
    turns = [("user", "hello"), ("assistant", said), ("user", "and now")]
    chat = roomy.chat(messages=[{"role": role, "content": content} for role, content in turns])
    assert more.strip() == chat.json["choices"][0]["message"]["content"].strip()

"""ollama's API, with its official JavaScript client from npm."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "ollama_client.cjs"


@pytest.fixture(scope="module")
def packages():
    """The folder in which npm has put the client."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    command = ["npm", "root", "--global"]
    found = os.environ.get("RUVMLX_TEST_NODE_PATH") or subprocess.check_output(command, text=True).strip()
    if not (Path(found) / "ollama").is_dir():
        pytest.skip("the client is not installed: npm install -g ollama")
    return found


def test_all_its_calls(packages, roomy, calls_first):
    """It chats, streams, calls a tool, embeds, lists models, stops a stream, and knows an error's status."""
    calls_first("weather", {"type": "object", "properties": {}})
    done = subprocess.run(
        ["node", SCRIPT, f"http://127.0.0.1:{roomy.port}", roomy.model],
        env=os.environ | {"NODE_PATH": packages}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    text = roomy.chat("hello").json["choices"][0]["message"]["content"]
    assert [call["function"] for call in got["called"]] == [{"name": "weather", "arguments": {}}]
    assert got["again"] == 8
    assert {got[name] for name in ("chat", "stream", "generate", "pieces")} == {text}
    assert got["vectors"] == [got["vector"]] * 2 and got["vector"] > 0
    assert roomy.model in got["names"] and got["open"] == [roomy.model]
    assert "completion" in got["able"] and got["version"]
    assert got["missing"] == ["ResponseError", 404]
    name, pieces = got["aborted"]
    assert name == "AbortError" and pieces == 3

"""What was read before a restart is not read again: caches of conversations survive on disk."""

from contextlib import suppress

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits
from ruvmlx.apps.server.writing import LONG_SYSTEM, is_likely_to_go_on

from ruvmlx.backends.select import open_backend
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

from .conftest import run_server

KEY = "a key of twenty characters".replace(" ", "-")
RULES = " ".join(f"Rule {i} of the house." for i in range(110))  # each byte is a token


@pytest.fixture
def restart(tmp_path):
    """restarted(**settings) -> a server on the same data, after the one before has stopped."""
    model = load_model(str(make_safetensors_model(tmp_path / "byte-llama", max_context=4096)))
    servers = []

    def start(keys=(), **settings):
        for running in servers:
            running.stop()
        settings = {"adapter": "none", "kv_disk": 64} | settings

        def open_runtime():
            backend = open_backend("native", model, threads=1)
            return Runtime(Store(tmp_path / "ruvmlx.db"), model, backend, Settings(**settings), learn=False)

        servers.append(run_server(open_runtime, Access(keys), ServerLimits()))
        return servers[-1]

    yield start
    for running in servers:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


def ask(running, path="/v1/chat/completions", key="", **body):
    """(tokens of the prompt, tokens of it that were cached)"""
    headers = {"x_api_key": key} if key else {}
    got = running.ask(
        "POST", path, {"model": running.model, "temperature": 0, "max_tokens": 8, **body}, **headers
    )
    assert got.status == 200, got.body
    usage = got.json["usage"]
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def turns(*said):
    return [
        {"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, said, strict=False)
    ]


SYSTEM = [{"role": "system", "content": RULES}]


def test_a_long_system_prompt_is_read_once(restart):
    first = restart()
    total, cached = ask(first, messages=[*SYSTEM, *turns("Hello")])
    assert total > 2000 and cached == 0
    total, cached = ask(restart(), messages=[*SYSTEM, *turns("Something else")])
    assert (
        total > 2000 and total - cached < 64 + 256 + 40
    )  # a page, those that must be in f16, and the question


def test_a_conversation_goes_on_in_both_forms(restart):
    before = turns("Tell me of the sea " * 20, "It is wide. " * 20, "And deep?")
    ask(restart(), messages=before)
    longer = [*before, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "How deep?"}]
    total, cached = ask(restart(), messages=longer)
    assert total - cached < 128 and cached > 500
    total, cached = ask(restart(), "/v1/messages", messages=longer)
    assert total - cached < 128


def test_a_short_question_is_not_kept(restart, tmp_path):
    ask(restart(), messages=turns("Hello " * 30))
    assert ask(restart(), messages=turns("Hello " * 30))[1] == 0
    assert not list((tmp_path / "kv").glob("*.hot"))


def size_of(folder) -> int:
    """Bytes of the files; a file that the server is writing may get its name meanwhile."""
    total = 0
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


def test_keys_and_the_budget_of_the_disk(restart, tmp_path):
    """Another key finds nothing of the first one's; without a budget nothing is written."""
    asked = {"messages": [*SYSTEM, *turns("Hello")]}
    ask(restart([KEY, KEY + "2"]), key=KEY, **asked)
    again = restart([KEY, KEY + "2"])
    assert ask(again, key=KEY + "2", **asked)[1] == 0 and ask(again, key=KEY, **asked)[1] > 1900
    assert size_of(tmp_path / "kv") <= 64 << 20
    restart(kv_disk=0)
    assert ask(restart(kv_disk=0), **asked)[1] == 0


def test_what_is_likely_to_go_on():
    user, reply = Message("user", "Hi"), Message("assistant", "Hello")
    assert not is_likely_to_go_on({"messages": [user]}) and not is_likely_to_go_on({"prompt": "x" * 9999})
    assert is_likely_to_go_on({"messages": [user, reply, user]})
    assert is_likely_to_go_on({"messages": [Message("system", "x" * LONG_SYSTEM), user]})
    assert not is_likely_to_go_on({"messages": [Message("system", "Be brief."), user]})
    assert is_likely_to_go_on({"messages": [user], "tools": ({"type": "function"},)})

"""The fields of every verb's JSON: no field of json_fields.json may disappear.

`pytest tests/cli/test_json_fields.py --write-fields` adds new ones.
"""

import gc
import json
from pathlib import Path

import pytest

from .test_adapters import tiny_cli  # noqa: F401 - a fixture

FIELDS = Path(__file__).with_name("json_fields.json")
REPLY = ("--max-tokens", "4", "--ignore-eos", "--temp", "0")


def paths(value, at="") -> set[str]:
    """The path of every field, such as "checks[].name"."""
    if isinstance(value, dict):
        return {at}.union(*(paths(part, f"{at}.{name}") for name, part in value.items()))
    if isinstance(value, list):
        return {at}.union(*(paths(part, f"{at}[]") for part in value))
    return {at}


@pytest.fixture
def scenario(tiny_cli, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    """Verb -> its JSON, in a run through chats, ratings and training."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    chat = tmp_path / "chat.json"
    chat.write_text(
        json.dumps([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}])
    )
    said = {}

    def say(name: str, *args: str):
        code, out, err = tiny_cli(*args, "--json")
        assert code == 0, (args, err)
        said[name] = out
        return out

    def story():
        say("generate", "generate", "hi", *REPLY)
        say("generate --logprobs", "generate", "hi", *REPLY, "--logprobs", "2", "--seed", "1")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text('{"prompt": "hi"}\n')
        results = ("--prompts", str(prompts), "--out", str(tmp_path / "results.jsonl"))
        say("generate --prompts", "generate", *results, *REPLY)
        say("rate", "rate", "last", "up")
        say("generate again", "generate", "hi", *REPLY, "--seed", "2", "--temp", "1")
        say("generate", "generate", "you", *REPLY)
        say("rate --note", "rate", "last", "1", "--note", "too short")
        one, other = (said[name]["reply_id"] for name in ("generate --logprobs", "generate again"))
        say("rate --better", "rate", "--better", one, "--worse", other)
        say("learn status", "learn", "status")
        say("learn check", "learn", "check", "--max-tokens", "4")
        say("learn export", "learn", "export")
        say("learn chart", "learn", "chart")
        say("learn kv", "learn", "kv")
        say("learn router", "learn", "router")
        say("generate --best-of", "generate", "hi", *REPLY, "--best-of", "2", "--temp", "1")
        say("adapters save", "adapters", "save", "other")
        say("adapters ls", "adapters", "ls")
        say("adapters export", "adapters", "export", str(tmp_path / "exported"))
        say("adapters fuse", "adapters", "fuse", str(tmp_path / "fused"))
        say("adapters use", "adapters", "use", "other")
        say("adapters use", "adapters", "use", "default")
        say("adapters rm", "adapters", "rm", "other")
        say("learn undo", "learn", "undo")
        say("learn rollback", "learn", "rollback", "0")
        say("learn reset", "learn", "reset")
        say("sessions import", "sessions", "import", str(chat))
        say("sessions ls", "sessions", "ls")
        last = said["sessions ls"][0]["id"]
        say("sessions show", "sessions", "show", last)
        say("sessions export", "sessions", "export", last)
        say("sessions export --out", "sessions", "export", last, "--out", str(tmp_path / "last.json"))
        say("sessions search", "sessions", "search", "hi")
        say("sessions search --like", "sessions", "search", "--like", "hi")
        say("embed", "embed", "hi")
        say("embed --out", "embed", "hi", "--out", str(tmp_path / "vectors.npy"))
        say("sessions fork", "sessions", "fork", last)
        say("sessions rename", "sessions", "rename", last, "Travel")
        say("sessions pin", "sessions", "pin", last)
        say("sessions folder", "sessions", "folder", last, "Work")
        say("sessions rm", "sessions", "rm", said["sessions fork"]["id"])
        say("sessions forget", "sessions", "forget", "--all")
        say("log show", "log", "show")
        say("log verify", "log", "verify")
        say("log export", "log", "export")
        say("log export --out", "log", "export", "--out", str(tmp_path / "log.jsonl"))
        say("backup", "backup", str(tmp_path / "saved.db"))
        gc.collect()  # earlier verbs' stores: `run` stays in this process
        say("restore", "restore", str(tmp_path / "saved.db"))
        say("perplexity", "perplexity", str(text))
        say("ls", "ls")
        say("models", "models")
        part = tmp_path / "hub" / "models--owner--tiny" / "blobs" / "1.incomplete"
        part.parent.mkdir(parents=True)
        part.write_bytes(bytes(400))
        with monkeypatch.context() as m:
            m.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
            say("rm", "rm", "owner/tiny")
        say("show", "show", str(tiny_folder))
        say("show --memory", "show", str(tiny_folder), "--memory")
        say("config show", "config", "show")
        say("config set", "config", "set", "max_tokens", "200")
        say("config unset", "config", "unset", "max_tokens")
        say("completion install --print", "completion", "install", "--shell", "bash", "--print")
        say("doctor", "doctor")
        return {name: sorted(paths(value)) for name, value in said.items()}

    return story


def test_no_field_is_gone(scenario, request):
    found = scenario()
    if request.config.getoption("--write-fields"):
        before = json.loads(FIELDS.read_text()) if FIELDS.exists() else {}
        kept = {name: sorted({*fields, *before.get(name, [])}) for name, fields in found.items()}
        FIELDS.write_text(json.dumps(kept, indent=1) + "\n")
    wanted = json.loads(FIELDS.read_text())
    gone = {name: missing for name in wanted if (missing := sorted({*wanted[name]} - {*found.get(name, [])}))}
    assert not gone


def test_a_field_that_is_gone_is_seen():
    assert paths({"a": [{"b": 1}], "c": 2}) == {"", ".a", ".a[]", ".a[].b", ".c"}

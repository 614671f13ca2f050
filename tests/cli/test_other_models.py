"""Architectures that the project does not name, through the command line: chat, rate, undo, export."""

import json
import os

import pytest

from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from tests.models.other_models import ARCHITECTURES, make_other_model

from ..test_runtime import say
from .verbs import one_line

REPLY = ("--max-tokens", "6", "--ignore-eos", "--temp", "0", "--json")


@pytest.fixture(params=sorted(ARCHITECTURES))
def verb(request, run, tmp_path, monkeypatch):
    """Run a verb on a small random model of each architecture; returns what it prints, or its JSON."""
    monkeypatch.setenv("RUVMLX_MODEL", str(make_other_model(tmp_path / "model", request.param)))
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "home"))

    def run_it(*args: str):
        code, out, err = run(*args)
        assert code == 0 and "Traceback" not in err, err
        return json.loads(out) if "--json" in args else out

    return run_it


def test_ratings_change_the_weights_and_undo_brings_them_back(verb):
    first = verb("generate", "hello", *REPLY)
    down = verb("rate", "last", "down", "--json")
    assert down["applied"] and down["logprob_after"] < down["logprob_before"]
    changed = verb("learn", "status", "--json")
    assert changed["kl"] > 0 and changed["pending"] == 0  # nothing waits for a training that cannot be
    verb("learn", "undo")
    again = verb("generate", "hello", *REPLY)
    assert again["token_ids"] == first["token_ids"] and again["adapter"] == "default@0"
    up = verb("rate", "last", "up", "--json")
    assert up["applied"] and up["logprob_after"] > up["logprob_before"]
    assert verb("generate", "hello", *REPLY)["adapter"] == f"default@{up['adapter_version']}"


def test_a_chat_goes_on_where_it_was_and_an_adapter_is_exported(verb, tmp_path):
    """The next process finds the chat's KV cache on disk."""
    settings = Settings(model=os.environ["RUVMLX_MODEL"], temperature=0, max_tokens=8)
    with Runtime.open(settings) as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "one " * 30)
        assert runtime.rate("last", "up").applied
    with Runtime.open(settings) as runtime:
        assert say(runtime, chat, "two").cached_tokens > 64
    verb("adapters", "export", str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_config.json").is_file()


TYPED = "hello\n/rate up\nagain\n/rate down\n/undo\n/quit\n"


def test_the_chat_itself_rates_and_takes_back(verb, process, tmp_path):
    """`chat --plain`, fed from a pipe; the ratings are there for the next command."""
    done = process("chat", "--plain", "--max-tokens", "5", "--temp", "0", stdin=TYPED)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0 and "Traceback" not in err, err
    assert out.count("Assistant:") == 2 and "mlx-lm's own code" in out + err
    status = verb("learn", "status", "--json")
    assert status["ratings"] == 1 and status["kl"] > 0  # the second one was taken back
    verb("adapters", "export", str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_show_says_what_such_a_model_cannot_have(verb):
    shown = verb("show", os.environ["RUVMLX_MODEL"], "--json")
    assert "tiers" in shown["note"] and "background" in shown["note"]


def test_what_cannot_be_had_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RUVMLX_MODEL", str(make_other_model(tmp_path / "m", "mixtral")))
    for args in (
        ("generate", "hi", "--backend", "native"),
        ("generate", "hi", "--backend", "reference"),
        ("adapters", "fuse", str(tmp_path / "out")),
    ):
        code, out, err = run(*args)
        assert code in (1, 2, 4) and one_line(err) and not out, (args, code, err)
    run("config", "set", "learn_targets", "all")
    code, _, err = run("generate", "hi")
    assert code and "mixtral" in err and one_line(err)

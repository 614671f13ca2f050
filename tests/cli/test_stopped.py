"""Ctrl+C and SIGTERM end a verb while its tokenizer works on a text without end, or a schema is compiled.

The limits of time are switched off here: without a signal these verbs would run for days.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

ENDLESS = "а б в г д " * 100 + "x9"
SPLIT = {
    "type": "Split",
    "pattern": {"Regex": "[\u0400-\u04ff ]*" * 3 + "[0-9]"},
    "behavior": "Isolated",
    "invert": False,
}
VERB = f"""
import sys
from ruvmlx.engine import grammar
from ruvmlx.models.text import tokenizer_process
from ruvmlx.platform import bounded_process

tokenizer_process.TEXT_SECONDS = grammar.SECONDS = 1e5
answer = bounded_process._Child.answer

def tell_and_answer(self, request):
    if {ENDLESS[:20]!r} in str(request["request"]):
        print("ENCODING", file=sys.stderr, flush=True)
    return answer(self, request)

bounded_process._Child.answer = tell_and_answer
check = grammar._check

def told_schema(*of):
    print("COMPILING", file=sys.stderr, flush=True)
    check(*of)

grammar._check = told_schema
from ruvmlx.apps.main import main
main()
"""


@pytest.fixture
def endless(tmp_path, tiny_folder):
    """A model whose tokenizer never ends at ENDLESS."""
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [SPLIT, whole["pre_tokenizer"]]}
    file.write_text(json.dumps(whole))
    return str(folder)


def started(*arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", VERB, *arguments]
    pipe = subprocess.PIPE
    keys = pipe if arguments[0] == "chat" else subprocess.DEVNULL  # `generate` would read a pipe to its end
    return subprocess.Popen(command, stdin=keys, stdout=pipe, stderr=pipe, text=True)


def wait_until(verb: subprocess.Popen, word: str) -> None:
    assert verb.stderr is not None
    for line in verb.stderr:
        if word in line:
            return
    pytest.fail(f"it ended before {word}")


def ended(verb: subprocess.Popen) -> tuple[int, str]:
    """The exit code and standard error; fails where the verb does not end."""
    assert verb.stderr is not None
    try:
        said = verb.communicate(timeout=600)[1]
    finally:
        verb.kill()
    assert "Traceback" not in said and "unexpected" not in said
    return verb.returncode, said


def workers(model: str) -> list[int]:
    """Processes that work for a model's tokenizer; none where there is no /proc."""
    commands = Path("/proc").glob("[0-9]*/cmdline")
    found = []
    for file in commands:
        with suppress(OSError):
            words = file.read_bytes().decode(errors="replace").split("\0")
            if words[-2:-1] == [model] and "ruvmlx.models.text.tokenizer_process" in words:
                found.append(int(file.parent.name))
    return found


def assert_no_worker(model: str) -> None:
    """Fails if a child of a process that has ended still works."""
    until = time.monotonic() + 60
    while left := workers(model):
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("name", ["generate", "perplexity", "chat"])
def test_a_verb(endless, tmp_path, name, number):
    (tmp_path / "text").write_text(ENDLESS)
    arguments = {"generate": [ENDLESS], "perplexity": [str(tmp_path / "text")], "chat": ["--plain"]}[name]
    verb = started(name, *arguments, "--model", endless)
    if name == "chat":
        verb.stdin.write(ENDLESS + "\n")
        verb.stdin.flush()
    wait_until(verb, "ENCODING")
    verb.send_signal(number)
    if name == "chat" and number == signal.SIGINT:  # it ends the reply, not the chat
        verb.stdin.write("/exit\n")
    code, _ = ended(verb)
    assert code != 0 or name == "chat"
    assert_no_worker(endless)


SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "integer", "multipleOf": 999983}},
}
WORK = {
    "a text": ("ENCODING", {"messages": [{"role": "user", "content": ENDLESS}]}),
    "schemas": ("COMPILING", {"messages": [{"role": "user", "content": "hi"}], "response_format": SCHEMA}),
}


@pytest.mark.parametrize("name", WORK)
def test_serve(endless, name):
    """Of clients there are more than threads for schemas."""
    verb = started("serve", "--json", "--port", "0", "--model", endless)
    assert verb.stdout is not None
    ready = json.loads(verb.stdout.readline())
    word, fields = WORK[name]
    url, body = f"{ready['base_url']}/chat/completions", json.dumps({"model": "m", **fields}).encode()

    def ask() -> None:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with suppress(OSError):
            urllib.request.urlopen(request, timeout=300).close()

    clients = [Thread(target=ask) for _ in range(12 if name == "schemas" else 1)]
    for client in clients:
        client.start()
    wait_until(verb, word)
    os.kill(verb.pid, signal.SIGTERM)
    ended(verb)
    for client in clients:
        client.join()

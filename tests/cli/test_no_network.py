"""No command but those of the hub opens a connection."""

import json
import os
import subprocess
import sys

import pytest

# Prints each address to which the process connects, and each name that the process looks up.
PROGRAM = """
import json, sys
seen = []
def note(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo"):
        seen.append([event, str(args[1:] if event == "socket.connect" else args)])
sys.addaudithook(note)
from ruvmlx.apps.main import main
try:
    main()
finally:
    print("seen", json.dumps(seen), file=sys.stderr)
"""


def connections_of(home, *words, stdin=""):
    """Run a command as a stranger does, without a setting that forbids the network."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "RUVMLX_"))}
    environment |= {
        "RUVMLX_HOME": str(home),
        "HF_HOME": str(home / "hub"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], env=environment, input=stdin, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("seen "), done.stderr
    return json.loads(last.removeprefix("seen ")), done.returncode


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "a question", "--max-tokens", "3"],
        ["chat", "--plain", "--max-tokens", "3"],
        ["rate", "last", "up"],
        ["learn", "status"],
        ["sessions", "ls"],
        ["models"],
        ["doctor"],
        ["embed", "some words"],
    ],
    ids=" ".join,
)
def test_a_command_opens_no_connection(home, tiny_folder, words):
    model = ["--model", str(tiny_folder)]
    assert connections_of(home, "generate", "first", "--max-tokens", "3", *model) == ([], 0)
    typed = "a question\n/rate up\n/exit\n" if words[0] == "chat" else ""
    own = model if words[0] in ("generate", "chat", "rate", "learn", "embed") else []
    found, code = connections_of(home, *words, *own, stdin=typed)
    assert found == [] and code in (0, 1)


def test_the_hub_is_asked_when_a_command_names_its_model(home):
    """The same check sees the connection of `pull`."""
    found, code = connections_of(home, "pull", "owner/name")
    assert code != 0 and any("127.0.0.1" in where for _, where in found)

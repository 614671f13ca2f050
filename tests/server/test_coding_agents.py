"""Claude Code and Codex: their own requests, as they were recorded, and the command lines themselves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .coding_agents import END, follow_script, read_again, run_claude, run_codex
from .conftest import run_server

RECORDED = Path(__file__).parent / "recorded"


@pytest.fixture
def start(starter, home, serve_all):
    """start(context) -> a server with the starter for prompts of this many tokens."""

    def begin(context=None):
        shape = replace(starter.config, max_context=context or starter.config.max_context)
        model = replace(starter, shape=shape)

        def open_runtime():
            settings = Settings(adapter="none", kv_disk=None)
            return Runtime(Store(home / "ruvmlx.db"), model, NativeBackend(model), settings, learn=False)

        serve_all.append(run_server(open_runtime, Access(), ServerLimits()))
        return serve_all[-1]

    yield begin
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "note.txt").write_text("The colour is red.\n")
    return folder


def steps_of(name, folder):
    """The calls that read and edit the note."""
    note = str(folder / "note.txt")
    if name == "claude":
        edit = {"file_path": note, "old_string": "red", "new_string": "blue", "replace_all": False}
        return [("Read", {"file_path": note}), ("Edit", edit)]
    return [
        ("exec_command", {"cmd": "cat note.txt"}),
        ("exec_command", {"cmd": "sed -i s/red/blue/ note.txt"}),
    ]


def fill_names(body, **names):
    """A recorded body with the names of now: of the model, and of the calls in replies."""
    text = json.dumps(body)
    for name, value in names.items():
        text = text.replace(name, value)
    return json.loads(text)


def test_recorded_requests_of_claude_code(start):
    """Each turn is understood, calls its tool, and reads only what is new; unused fields are named."""
    recorded = json.loads((RECORDED / "claude_code.json").read_text())
    running, ids = start(), {}
    turns = follow_script(running, steps_of("claude", Path("/project")))
    for body in recorded["turns"]:
        sent = fill_names(body, MODEL=running.model, **ids)
        answer = running.ask("POST", "/v1/messages?beta=true", sent, anthropic_beta=recorded["beta"])
        assert answer.status == 200, answer.body
        events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line[:6] == "data: "]
        starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
        calls = [block for block in starts if block["type"] == "tool_use"]
        ids |= {f"CALL_{len(ids)}": call["id"] for call in calls}
        ignored = answer.headers["x-ruvmlx-ignored"].split(", ")
        assert {"context_management", "output_config.effort", "metadata"} <= {*ignored}
        assert not any(name.startswith("mid-conversation-system") for name in ignored)
    assert events[-2]["delta"]["stop_reason"] == "end_turn" and not calls and len(ids) == 2
    assert events[-2]["usage"]["max_tokens"] < 32_000
    assert len(turns) == 3 and read_again(turns) <= 1.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "run"), [("claude", run_claude), ("codex", run_codex)], ids=["claude", "codex"]
)
def test_the_command_line_edits_a_file(start, project, name, run):
    """It reads the file, edits it and ends; only what is new is read."""
    running = start()
    turns = follow_script(running, steps_of(name, project))
    said = run(running, project)
    assert (project / "note.txt").read_text() == "The colour is blue.\n" and END in said
    assert len(turns) == 3 and read_again(turns) <= 1.05

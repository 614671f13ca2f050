"""Coding agents at a server whose model does what a script says: read a file, edit it, end.

The model's own words do not matter here. A grammar forces its replies, one after the other.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ruvmlx.engine.grammar import Constraint
from ruvmlx.engine.tools import forced_calls, tool_form
from ruvmlx.engine.types import GenerationRequest, GenerationResponse

Call = tuple[str, Mapping[str, Any]]  # a tool's name, and its arguments
PACKAGES = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}
TASK = "Change red to blue in note.txt."
END = "Done."


@dataclass(frozen=True)
class Turn:
    """A request with tools, and the response to it."""

    request: GenerationRequest
    response: GenerationResponse


def follow_script(running: Any, replies: Sequence[Call | str]) -> list[Turn]:
    """From now on, the replies to requests with tools are these calls and texts; then END. Returns the turns,
    as they are made."""
    submit, turns, waiting = running.serving.host.submit, list[Turn](), list(replies)
    model = running.serving.runtime.model

    async def submit_scripted(request: GenerationRequest) -> Any:
        if request.shows_calls:
            reply = waiting.pop(0) if waiting else END
            request = replace(request, constraint=_constraint_to(model.tokenizer, reply))
        async for chunks in submit(request):
            if request.shows_calls and chunks[-1].response is not None:
                turns.append(Turn(request, chunks[-1].response))
            yield chunks

    running.serving.host.submit = submit_scripted
    return turns


def _constraint_to(tokenizer: Any, reply: Call | str) -> Constraint:
    """Allows this reply alone."""
    if isinstance(reply, str):
        return Constraint.lark(f"start: {json.dumps(reply)}")
    name, arguments = reply
    parameters = {
        "type": "object",
        "properties": {key: {"const": value} for key, value in arguments.items()},
        "required": [*arguments],
    }
    function = {"name": name, "parameters": parameters, "strict": True}
    return forced_calls(tokenizer, tool_form(tokenizer), [function])


def read_again(turns: Sequence[Turn]) -> float:
    """Of the turns behind the first one: prompt tokens that were read, for each token that no request has
    held before."""
    read = new = 0
    for before, turn in pairwise(turns):
        held = (
            before.response.prompt_tokens + before.response.generation_tokens - 1
        )  # the last one is not read
        new += turn.response.prompt_tokens - held
        read += turn.response.prompt_tokens - turn.response.cached_tokens
    return read / new


def command(name: str) -> str:
    """The path of an agent's command line; skips where it is not installed."""
    found = os.environ.get(f"RUVMLX_TEST_{name.upper()}") or shutil.which(name)
    return found or pytest.skip(f"{name} is not installed: npm install -g {PACKAGES[name]}")


def run(name: str, make: Callable[[str], Sequence[str]], folder: Path, **variables: str) -> str:
    """What an agent prints; it sees no settings but these. make: its flags behind the command."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / "home"), **variables}
    (folder / "home").mkdir(exist_ok=True)
    done = subprocess.run(
        make(command(name)), cwd=folder, env=environment, stdin=subprocess.DEVNULL, text=True,
        capture_output=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_claude(running: Any, folder: Path) -> str:
    """Claude Code with the tools Read and Edit, in this folder; what it prints."""
    return run(
        "claude",
        lambda path: [
            path, "-p", TASK, "--permission-mode", "acceptEdits", "--tools", "Read,Edit",
            "--system-prompt", "You edit files.", "--output-format", "text",
        ],
        folder,
        ANTHROPIC_BASE_URL=f"http://127.0.0.1:{running.port}", ANTHROPIC_API_KEY="none-needed",
        ANTHROPIC_MODEL=running.model, ANTHROPIC_SMALL_FAST_MODEL=running.model,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
    )  # fmt: skip


CODEX = """
model = "{model}"
model_provider = "ruvmlx"
model_instructions_file = "{folder}/instructions.md"
[model_providers.ruvmlx]
name = "ruvmlx"
base_url = "{url}"
wire_api = "responses"
"""


def run_codex(running: Any, folder: Path) -> str:
    """Codex in this folder; what it prints."""
    (folder / "instructions.md").write_text("You edit files.")
    settings = folder / "codex"
    settings.mkdir(exist_ok=True)
    text = CODEX.format(model=running.model, folder=folder, url=running.url)
    (settings / "config.toml").write_text(text)
    return run(
        "codex",
        lambda path: [
            path, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK,
        ],
        folder,
        CODEX_HOME=str(settings), OPENAI_API_KEY="none-needed",
    )  # fmt: skip

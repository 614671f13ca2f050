"""What tests of verbs share: how one is run, in this process or in its own."""

import os
import subprocess
import sys

import pytest
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli.output import run_plainly


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a verb in this process: (exit code, stdout, stderr)."""

    def run_it(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ruvmlx", *args])
        code = run_plainly(cli)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run_it


@pytest.fixture
def process():
    """Run a verb in its own process, without a terminal."""

    def run_it(*args: str, stdin: str | bytes = "", **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "ruvmlx", *args],
            input=stdin if isinstance(stdin, bytes) else stdin.encode(),
            capture_output=True,
            timeout=600,
            env={**os.environ, **env},
        )

    return run_it


def one_line(err: str) -> bool:
    return err.startswith("ruvmlx: ") and err.count("\n") == 1 and "Traceback" not in err

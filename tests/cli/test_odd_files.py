"""Pipes, devices and folders in place of files: one line, soon, and no memory taken."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import limit_memory

MODEL = [
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja",
    "chat_template.json", "added_tokens.json", "model.safetensors", "model.safetensors.index.json",
]  # fmt: skip
LIMIT = 4 << 30  # bytes of address space; reading /dev/zero would pass it
SECONDS = 60


def replaced(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def limited() -> None:
    limit_memory(LIMIT)


def run(*args: object, cwd: Path) -> tuple[int, str]:
    """Exit code and standard error of the command line, which must end in time."""
    command = [sys.executable, "-m", "ruvmlx", *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, cwd=cwd, preexec_fn=limited, check=False
    )
    return done.returncode, done.stderr


def check(code: int, err: str) -> None:
    """It worked, or failed in one line that is meant for people."""
    assert code in (0, 1, 2, 3, 4), err
    assert len(err.strip().splitlines()) == (code != 0), err
    assert "internal error" not in err and "Traceback" not in err


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", MODEL)
def test_in_a_model(tiny_folder, tmp_path, name, kind, full):
    if not full and kind != "device":
        pytest.skip("a second each: --full")
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    replaced(folder / name, kind)
    code, err = run("generate", "hi", "--max-tokens", "2", "--model", folder, cwd=tmp_path)
    check(code, err)
    assert code or kind == "folder"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["config.toml", "ruvmlx.toml"])
def test_in_settings(home, tmp_path, name, kind):
    home.mkdir(exist_ok=True)
    replaced((home if name == "config.toml" else tmp_path) / name, kind)
    code, err = run("config", "show", cwd=tmp_path)
    check(code, err)
    assert code == 2 and name in err


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_as_a_chat_or_a_backup(tmp_path, kind):
    replaced(tmp_path / "x", kind)
    for verb in (("sessions", "import"), ("restore",)):
        code, err = run(*verb, tmp_path / "x", cwd=tmp_path)
        check(code, err)
        assert code


ODD = {
    "generation_config.json": [
        {"temperature": 10**400}, {"top_k": 10**30}, {"eos_token_id": 10**30}, {"eos_token_id": [[1]]},
        {"temperature": [1]}, {"repetition_penalty": "x"},
    ],
    "tokenizer_config.json": [
        {"chat_template": value}
        for value in (
            [{"name": ["a"], "template": "x"}], [1, 2], [], {}, {"default": 1}, [{"template": "x"}], 5
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name in ODD for change in ODD[name]], ids=str
)
def test_odd_values(tiny_folder, tmp_path, name, change, invoke):
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    check(*invoke("generate", "hi", "--max-tokens", "2", "--model", str(folder)))


@pytest.fixture
def invoke(capfd):
    """The command line in this process: exit code and standard error."""
    from ruvmlx.apps.cli import cli
    from ruvmlx.apps.cli.output import run_plainly

    def call(*args: str) -> tuple[int, str]:
        argv, sys.argv = sys.argv, ["ruvmlx", *args]
        try:
            return run_plainly(cli), capfd.readouterr().err
        finally:
            sys.argv = argv

    return call


def test_too_many_threads(invoke):
    code, err = invoke("generate", "hi", "--threads", "100000")
    check(code, err)
    assert code == 2 and "1024" in err


def test_standard_input_without_an_end(tmp_path):
    with open("/dev/zero", "rb") as endless:
        done = subprocess.run(
            [sys.executable, "-m", "ruvmlx", "generate", "-"],
            stdin=endless, capture_output=True, text=True, timeout=SECONDS, preexec_fn=limited, check=False,
        )  # fmt: skip
    check(done.returncode, done.stderr)
    assert done.returncode == 2 and "8.4 MB" in done.stderr

"""Tokenizers that panic, never end or take all memory are refused in one line, by a process that may die."""

import json
import shutil
import subprocess
import sys
from base64 import b64encode

import pytest

from ruvmlx.errors import CorruptFile, RuvmlxError
from ruvmlx.models import tokenizer_trial
from ruvmlx.models.load import load_model
from ruvmlx.models.tokenizer_json import folder_tokenizer
from ruvmlx.models.tokenizer_trial import PASSED, try_tokenizer
from tests.limits import peak_memory


@pytest.fixture
def model(tmp_path, tiny_folder):
    """A copy of the tiny model, and a function that changes parts of its tokenizer.json."""
    folder = shutil.copytree(tiny_folder, tmp_path / "m")
    whole = json.loads((folder / "tokenizer.json").read_text())

    def change(**parts) -> None:
        pre = parts.pop("before", None)
        if pre:
            parts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [pre, whole["pre_tokenizer"]]}
        (folder / "tokenizer.json").write_text(json.dumps(whole | parts))

    return folder, change


def replaced(by: str, times: int = 1) -> dict:
    step = {"type": "Replace", "pattern": {"String": "e"}, "content": by}
    return {"type": "Sequence", "normalizers": [step] * times}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def charsmap(data: bytes) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": b64encode(data).decode()}


PUT_IN_FRONT = [{"SpecialToken": {"id": "<gone>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
BAD = {
    "a post-processor with a token that is not there": {
        "post_processor": {
            "type": "TemplateProcessing", "single": PUT_IN_FRONT, "pair": PUT_IN_FRONT, "special_tokens": {}
        }
    },
    "pieces of length 0": {"before": {"type": "FixedLength", "length": 0}},
    "a regular expression that tries all ways": {"before": split("(a+)+$")},
    "another": {"before": split(r"(\w+\s?)+$")},
    "a letter that becomes 10^12": {"normalizer": replaced("e" * 1000, 4)},
    "a letter that becomes 100": {"normalizer": replaced("e" * 100)},
    "a table of characters that is none": {"normalizer": charsmap(b"\4\0\0\0" + b"\xff" * 8)},
    "one of 2 GB": {"normalizer": charsmap(b"\xff\xff\xff\x7f" + b"a" * 100)},
    "a vocabulary of words without the unknown one": {
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tokenizers_are_refused(model, name, capfd):
    """In one line, with nothing on the screen and no memory taken here."""
    folder, change = model
    change(**BAD[name])
    before = peak_memory()
    with pytest.raises(CorruptFile, match=r"^tokenizer\.json") as refused:
        load_model(str(folder))
    assert "\n" not in str(refused.value)
    assert peak_memory() - before < 50 << 20
    assert capfd.readouterr() == ("", "")


def test_a_library_that_ends_the_process(model, monkeypatch):
    """What ends the child ends the load in one line; a child that does not end is stopped by the clock."""
    folder, change = model
    change(normalizer=replaced("e" * 1000, 4))
    for limit in "MEMORY", "WAIT":
        with monkeypatch.context() as patched:
            if limit == "WAIT":
                patched.setattr(tokenizer_trial, limit, 0.001)
            with pytest.raises(
                CorruptFile, match="breaks the library that reads it, or needs more than 5 sec"
            ):
                try_tokenizer(folder)


def test_a_sound_one_is_tried_once(model, home, tried, monkeypatch):
    """A verdict is kept by content: any change of the files is tried again, a refusal always is."""
    folder, change = model
    (home / PASSED).unlink()
    try_tokenizer(folder)
    passed = list((home / PASSED).iterdir())
    assert len(passed) == 1 and passed[0].stat().st_mode & 0o777 == 0o600 and not passed[0].read_bytes()
    monkeypatch.setattr(tokenizer_trial, "_tried", lambda *_: pytest.fail("tried twice"))
    try_tokenizer(folder)
    monkeypatch.undo()
    monkeypatch.setenv("RUVMLX_HOME", str(home))
    change(normalizer=replaced("e" * 100))
    for _ in range(2):
        with pytest.raises(CorruptFile):
            try_tokenizer(folder)
    assert list((home / PASSED).iterdir()) == passed


def test_a_read_only_data_folder(model, home, tmp_path, monkeypatch):
    """Nothing is remembered then, and all works."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path / "file" / "home"))
    try_tokenizer(model[0])


def test_the_working_folder_runs_nothing(model, home, tmp_path, monkeypatch):
    """A module of the working folder is not imported by the child."""
    (home / PASSED).unlink()
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    (tmp_path / "tokenizers.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    try_tokenizer(model[0])


def test_a_text_that_breaks_a_tokenizer_later(model):
    """A panic in the middle of a chat is one line, too."""
    folder, change = model
    change(before=split("(q+)+$"))
    tokenizer = folder_tokenizer(folder)
    assert tokenizer.encode("quiet")
    with pytest.raises(RuvmlxError, match=r"tokenizer.json: the library that reads it fails"):
        tokenizer.encode("q" * 40 + "!")


def test_the_command_line(model, home):
    folder, change = model
    change(before={"type": "FixedLength", "length": 0})
    command = [sys.executable, "-m", "ruvmlx", "generate", "hi", "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and len(done.stderr.strip().splitlines()) == 1
    assert "tokenizer.json breaks the library" in done.stderr

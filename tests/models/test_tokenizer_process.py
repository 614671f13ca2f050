"""Tokenizers that panic, never end or take all memory end a process of their own, whatever the text."""

import json
import shutil
import subprocess
import sys
import threading
from base64 import b64encode

import pytest

from ruvmlx.errors import CorruptFile, Interrupted
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from ruvmlx.platform import bounded_process
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


def replacement(by: str, times: int = 1, what: str = "e") -> dict:
    step = {"type": "Replace", "pattern": {"String": what}, "content": by}
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
    "a letter that becomes 10^12": {"normalizer": replacement("e" * 1000, 4)},
    "a letter that becomes 100": {"normalizer": replacement("e" * 100)},
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


# What only some texts show: a file, and a text.
LATER = {
    "a word that becomes 10^12": ({"normalizer": replacement("capital" * 1000, 4, "capital")}, "the capital"),
    "a word that becomes 100": ({"normalizer": replacement("capital" * 100, 1, "capital")}, "capital"),
    "a regular expression that tries all ways": (
        {"before": split("[\u0400-\u04ff ]*" * 3 + "[0-9]")}, "а б в г д " * 100 + "x9"
    ),
    "one that the library gives up": ({"before": split("(щ+)+$")}, "щ" * 40 + "!"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_texts_that_break_a_tokenizer_later(model, name, capfd):
    """One line, and other texts go on being encoded. Nothing is on the screen, no memory is taken here."""
    folder, change = model
    parts, text = LATER[name]
    change(**parts)
    tokenizer = load_model(str(folder)).tokenizer
    before = peak_memory()
    for _ in range(2):
        with pytest.raises(CorruptFile, match=r"tokenizer\.json") as refused:
            tokenizer.encode_chat([Message("user", text)])
        assert "\n" not in str(refused.value)
        assert tokenizer.decode(tokenizer.encode("quiet")) == "quiet"
    assert peak_memory() - before < 50 << 20
    assert capfd.readouterr() == ("", "")


def test_the_tokenizer_is_that_of_its_files(tiny_folder, tiny):
    """Facts, bytes and ids are those that the files give when they are read here."""
    here, there = folder_tokenizer(tiny_folder, [[2, 0]]), tiny.tokenizer
    names = "vocab_size bos_id adds_bos eos_id eos_ids chat_template strips_leading_space special_tokens"
    for name in names.split():
        assert getattr(here, name) == getattr(there, name)
    assert [here.token_bytes(i) for i in range(-1, 330)] == [there.token_bytes(i) for i in range(-1, 330)]
    for text in ("", "the <|im_end|> end", "é\ud800x\0\U0010ffff", "word " * 20_000):
        assert here.encode(text) == there.encode(text)
        assert here.encode(text, special=True) == there.encode(text, special=True)


def test_the_working_folder_runs_nothing(model, tmp_path, monkeypatch):
    """A module of the working folder is not imported by the child."""
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    (tmp_path / "tokenizers.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert load_model(str(model[0])).tokenizer.encode("a")


@pytest.mark.parametrize("name", ["one that the library gives up", "pieces of length 0"])
def test_the_command_line(model, name):
    """One line and no traceback, at a model's opening and at a text."""
    folder, change = model
    parts, text = LATER.get(name) or (BAD[name], "hi")
    change(**parts)
    command = [sys.executable, "-m", "ruvmlx", "generate", text, "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and len(done.stderr.strip().splitlines()) == 1
    assert "tokenizer.json" in done.stderr and "the library that reads it" in done.stderr


def test_a_stop_says_nothing_of_the_file(tiny_folder, monkeypatch):
    """A server that ends refuses a text; the tokenizer is as good as before."""
    tokenizer = load_model(str(tiny_folder)).tokenizer
    with monkeypatch.context() as stopped:
        ending = threading.Event()
        ending.set()
        stopped.setattr(bounded_process, "ending", ending)
        with pytest.raises(Interrupted, match="was stopped"):
            tokenizer.encode("a text")
    assert tokenizer.encode("a text")


def test_the_child_starts_without_numpy():
    """Every opening of a folder's model starts a child: numpy would take most of its time."""
    code = "import sys, ruvmlx.models.text.tokenizer_process; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0

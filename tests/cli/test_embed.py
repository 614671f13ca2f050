"""`embed` and `sessions search --like` on the command line."""
# ruff: noqa: F811 - fixtures of another file

import io
import json
import sys
import types

import numpy as np
import pytest

import ruvmlx
from ruvmlx.sona import embedding
from ruvmlx.sona.embedding import whitening
from ruvmlx.store.database import Database
from tests.models.encoder_models import EncoderShape, make_encoder

from .test_adapters import tiny_cli  # noqa: F401 - a fixture
from .test_mistakes import refuse

TEXTS = ("a river", "a stream of water", "tax law")
REPLY = ("--max-tokens", "2", "--ignore-eos", "--temp", "0")


@pytest.fixture
def stdin(monkeypatch):
    """stdin(data): what standard input has."""

    def fill(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(data)))

    return fill


def test_the_vectors_are_those_of_the_api(tiny_cli, tiny_folder):
    """As one object, as lines, and in a .npy file: the same numbers, each of length 1."""
    code, out, err = tiny_cli("embed", *TEXTS, "--json")
    assert code == 0, err
    wanted = np.array(ruvmlx.embed(TEXTS, tiny_folder))
    assert (out["dimensions"], out["model"]) == (wanted.shape[1], "tiny-llama")
    assert np.allclose(out["embeddings"], wanted, atol=1e-3)
    assert np.allclose(np.linalg.norm(out["embeddings"], axis=1), 1, atol=1e-5)
    lines = [json.loads(line) for line in tiny_cli("embed", *TEXTS)[1].splitlines()]
    assert [line["index"] for line in lines] == [0, 1, 2]
    assert [line["embedding"] for line in lines] == out["embeddings"]


def test_lines_of_standard_input_become_a_npy_file(tiny_cli, stdin, tmp_path):
    """The last line may lack its end; the file is new, float32, and a row is a line."""
    file = tmp_path / "vectors.npy"
    stdin("\n".join(TEXTS).encode())
    code, facts, err = tiny_cli("embed", "-", "--out", str(file), "--json")
    assert code == 0, err
    array = np.load(file, allow_pickle=False)
    assert array.dtype == np.float32 and array.shape == (3, facts["dimensions"]) and facts["count"] == 3
    assert np.array_equal(array, np.float32(tiny_cli("embed", *TEXTS, "--json")[1]["embeddings"]))
    code, _, err = tiny_cli("embed", "hi", "--out", str(file))
    assert code == 2 and "exists already" in err


@pytest.mark.parametrize("out", [False, True])
def test_empty_lines_are_left_out_and_told(tiny_cli, stdin, tmp_path, out):
    """`index` counts the texts, and a row of the file is a text."""
    stdin(b"\none\n \r\n\ntwo\n\n")
    words = ("--out", str(tmp_path / "a.npy"), "--json") if out else ()
    code, printed, err = tiny_cli("embed", "-", *words)
    assert code == 0 and err.splitlines() == [
        "note: left out 4 empty lines; vectors are numbered without them."
    ]
    wanted = tiny_cli("embed", "one", "two", "--json")[1]["embeddings"]
    lines = [] if out else [json.loads(line) for line in printed.splitlines()]
    assert [line["index"] for line in lines] == ([] if out else [0, 1])
    found = np.load(tmp_path / "a.npy") if out else [line["embedding"] for line in lines]
    assert np.allclose(found, wanted, atol=1e-6)


def test_a_missing_folder_is_told_before_the_work(run, tmp_path):
    out = str(tmp_path / "nosuch" / "vectors.npy")
    code, _, err = run("embed", "hi", "--out", out, "--model", "no/such/model/here")
    assert code == 2 and "there is no folder" in err


def test_vectors_are_printed_before_standard_input_ends(tiny_cli, monkeypatch, capsys):
    """A pipe that writes slowly gets each vector as soon as it is there."""
    seen = []

    class SlowPipe:
        lines = (b"one\n", b"two\r\n", b"")

        def readline(self, _):
            seen.append(capsys.readouterr().out.count("\n"))
            return self.lines[len(seen) - 1]

    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=SlowPipe()))
    assert tiny_cli("embed", "-")[0] == 0
    assert seen == [0, 1, 1]


@pytest.mark.parametrize(
    ("words", "data", "said"),
    [
        (["a", "", "--json"], b"", "text 2: a text to embed is empty"),
        (["-"], b"\n" + b"a" * 9000, "line 2: "),
        (["-"], b"ok\n\xff\n", "line 2 is not UTF-8 text (byte 0)"),
        (["-"], b"x" * (1 << 21), "line 1 is over 1,048,576 bytes"),
        (["-", "--out", "new.npy"], b"", "standard input is empty"),
        (["a", "--out", "new.txt"], b"", "must end in .npy"),
        (["a" * 9000], b"", "more than 8192 tokens"),
    ],
)
def test_a_text_that_cannot_be_embedded_is_one_line(
    tiny_cli, stdin, words, data, said, tmp_path, monkeypatch
):
    """The line says which text; no file is left."""
    monkeypatch.chdir(tmp_path)
    stdin(data)
    code, _, err = tiny_cli("embed", *words)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*new*"))


def test_search_like_prints_chats_and_how_like_they_are(tiny_cli, tmp_path):
    """The same text is as like as can be; words and --like exclude each other."""
    for name, text in (("a", "how do I boil an egg"), ("b", "0123456789")):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps([{"role": "user", "content": text}]))
        assert tiny_cli("sessions", "import", str(file))[0] == 0
    code, found, err = tiny_cli("sessions", "search", "--like", "how do I boil an egg", "--json")
    assert code == 0, err
    assert found[0]["text"] == "how do I boil an egg" and found[0]["similarity"] > 0.99
    fields = {"id", "title", "turns", "updated", "pinned", "folder", "message_id", "text", "similarity"}
    assert fields == found[0].keys()
    one = tiny_cli("sessions", "search", "--like", "how do I boil an egg", "--limit", "1")[1]
    header, row = one.splitlines()
    assert header.split() == ["ID", "LIKE", "IT", "TITLE", "ASKED"] and "100%  how do I boil an egg" in row
    for wrong in (["--like", "x", "egg"], []):
        code, _, err = tiny_cli("sessions", "search", *wrong)
        assert code == 2 and "give words" in err


def test_a_disk_that_takes_nothing_is_read(tiny_cli, open_tiny, tmp_path, monkeypatch):
    """The store has no data of the model. The model's whitening is measured once, and only in memory."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"role": "user", "content": "how do I boil an egg"}]))
    assert tiny_cli("sessions", "import", str(file))[0] == 0
    wanted = tiny_cli("embed", *TEXTS)[1]
    with open_tiny() as runtime, runtime.store.transaction():
        for table in ("whitening", "known_models"):
            runtime.store.db.execute(f"DELETE FROM {table}")
    measured = []
    monkeypatch.setattr(embedding, "whitening", lambda states: measured.append(1) or whitening(states))
    monkeypatch.setattr(Database, "_open", refuse)
    code, out, err = tiny_cli("embed", *TEXTS)
    assert code == 0 and measured == [1], err
    found, expected = (
        [json.loads(line)["embedding"] for line in text.splitlines()] for text in (out, wanted)
    )
    np.testing.assert_allclose(found, expected, atol=1e-3)  # two measurements can differ by rounding
    code, found, err = tiny_cli("sessions", "search", "--like", "how do I boil an egg", "--json")
    assert code == 0 and found[0]["similarity"] > 0.99, err


def test_an_encoder_embeds_and_is_listed_so(tiny_cli, tmp_path, monkeypatch):
    """`embed`, `ls`, `show` and the API know it; `chat` and `generate` refuse it in one line."""
    folder = make_encoder(tmp_path / "store" / "tests" / "encoder", EncoderShape(), "mean")
    monkeypatch.setenv("LMSTUDIO_MODELS", str(tmp_path / "store"))
    name = "lmstudio:tests/encoder"
    code, out, err = tiny_cli("embed", *TEXTS, "--model", name, "--json")
    assert code == 0 and (out["dimensions"], out["model"]) == (40, name), err
    assert np.allclose(out["embeddings"], ruvmlx.embed(TEXTS, folder), atol=1e-6)
    rows = {row["name"]: row for row in tiny_cli("ls", "--json")[1]}
    assert rows[name]["embeds"] and rows[name]["fit"]["longest_context"] == 37
    assert "embeds, 37 tokens" in tiny_cli("ls")[1]
    assert "A text can have 37 tokens" in tiny_cli("show", name)[1]
    assert tiny_cli("show", name, "--json")[1]["config"]["pooling"] == "mean"
    code, out, err = tiny_cli("generate", "hi", "--model", name)
    assert code == 2 and "embeds texts and writes none" in err and len(err.strip().splitlines()) == 1


def test_a_chat_with_an_encoder_does_not_begin(tiny_cli, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        tiny_cli("chat", "--plain", "--model", str(make_encoder(tmp_path / "m", EncoderShape())))
    err = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and err.splitlines() == [err] and "m embeds texts and writes none" in err

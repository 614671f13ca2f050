"""Models in the stores of ollama and LM Studio: listed, opened, refused in one line, never written."""

import json
import os

import pytest

from ruvmlx.errors import CorruptFile, ModelNotFound, RuvmlxError, UnsupportedModel
from ruvmlx.models.find import other_stores
from ruvmlx.models.find.local import list_local_models, readable_models
from ruvmlx.models.find.other_stores import find_stored, stored_models
from ruvmlx.models.find.resolve import find_model
from ruvmlx.models.load import load_model

from .make_gguf import make_gguf_model
from .store_layouts import (
    REGISTRY,
    add_blob,
    add_ollama_model,
    make_lmstudio_store,
    make_ollama_store,
    write_manifest,
)

OLLAMA = ["ollama:hf.co/owner/Tiny-GGUF:Q4_K_M", "ollama:llama3.2:1b", "ollama:smollm2:latest",
          "ollama:somebody/own:v1"]  # fmt: skip
LMSTUDIO = ["lmstudio:mlx-community/tiny-4bit", "lmstudio:one/Tiny-GGUF",
            "lmstudio:two/Tiny-GGUF/Tiny-Q4_K_M.gguf", "lmstudio:two/Tiny-GGUF/Tiny-Q8_0.gguf"]  # fmt: skip


@pytest.fixture(autouse=True)
def no_others(tmp_path, monkeypatch):
    """No starter, and no repositories."""
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def gguf(tmp_path):
    return make_gguf_model(tmp_path / "made" / "tiny.gguf")


@pytest.fixture
def ollama(tmp_path, gguf):
    """Where the fixture `home` has set OLLAMA_MODELS."""
    return make_ollama_store(tmp_path / "ollama", gguf.read_bytes())


@pytest.fixture
def lmstudio(tmp_path, gguf):
    return make_lmstudio_store(tmp_path / "lmstudio", gguf)


def one_line_error(error, words, name):
    with pytest.raises(error, match=words) as caught:
        load_model(name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    return str(caught.value)


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_both_stores_are_listed_opened_and_left_as_they_were(ollama, lmstudio):
    """Every listed name opens the file that is listed; vision parts are no models."""
    before = contents(ollama) | contents(lmstudio)
    rows = {row["name"]: row for row in list_local_models()}
    assert sorted(rows) == sorted(OLLAMA + LMSTUDIO)
    assert [facts.name for facts in readable_models()] == list(rows)
    for name, row in rows.items():
        model = load_model(name)
        assert (model.name, str(model.path), row["problem"]) == (name, row["path"], "")
        assert dict(model.load_weights()) and row["parameters"] == model.parameters
    json.dumps(list(rows.values()))
    assert contents(ollama) | contents(lmstudio) == before


def test_blobs_are_the_same_model_as_the_file(ollama, gguf):
    """An adapter for the file fits ollama's blob: one fingerprint."""
    assert load_model("ollama:llama3.2:1b").fingerprint == load_model(str(gguf)).fingerprint


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("ollama:smollm2", "ollama:smollm2:latest"),
        (f"ollama:{REGISTRY}/library/llama3.2:1b", "ollama:llama3.2:1b"),
        (f"ollama:{REGISTRY}/somebody/own:v1", "ollama:somebody/own:v1"),
        ("lmstudio:one/Tiny-GGUF/Tiny-Q4_K_M.gguf", "lmstudio:one/Tiny-GGUF"),
    ],
)
def test_names_may_be_longer_or_shorter(ollama, lmstudio, asked, found):
    """ollama's own default is the tag "latest"."""
    assert find_model(asked).name == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ollama:llama3.2", r"ollama has no model 'ollama:llama3\.2'.*it has: .*ollama:llama3\.2:1b"),
        ("ollama:../../../etc/passwd:x", "ollama has no model"),
        ("ollama:", "ollama has no model"),
        ("lmstudio:two/Tiny-GGUF", "holds 2 models; name one: lmstudio:two/Tiny-GGUF/Tiny-Q4_K_M.gguf, "),
        ("lmstudio:one/Tiny-GGUF/mmproj-Tiny-f16.gguf", "LM Studio has no model"),
        ("lmstudio:../../made/tiny.gguf", "LM Studio has no model"),
    ],
)
def test_a_name_that_is_not_listed_is_refused_with_those_that_are(ollama, lmstudio, name, words):
    """Paths that leave the store are among them: names are compared, not joined to paths."""
    one_line_error(ModelNotFound, words, name)


def test_machines_without_these_programs(tmp_path):
    """Nothing is listed, and a name says so."""
    assert list(stored_models()) == []
    one_line_error(ModelNotFound, "no models of ollama are on this machine", "ollama:llama3.2")
    one_line_error(ModelNotFound, "no models of LM Studio are on this machine", "lmstudio:a/b")


def layer(digest, kind="model"):
    return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": digest, "size": 4}


HEX = "0123456789abcdef" * 4
BROKEN = [
    ([], UnsupportedModel, "names 0 layers of type application/vnd.ollama.image.model; one GGUF file"),
    (None, UnsupportedModel, "names 0 layers"),
    ([layer("sha256:" + HEX, "tensor"), "text"], UnsupportedModel, "names 0 layers"),
    ([layer("sha256:" + HEX)] * 2, UnsupportedModel, "names 2 layers"),
    ([layer("sha256:" + HEX), layer("sha256:" + HEX, "adapter")], UnsupportedModel, "has an adapter layer"),
    (
        [layer("sha256:" + HEX)],
        CorruptFile,
        r"sha256-0123456789ab\.\.\. is missing.*`ollama pull broken:latest`",
    ),
    ([layer("../../../../made/tiny.gguf")], CorruptFile, "the digest '../../../../made/tiny.gguf' is not"),
    ([layer("sha256-../" + HEX[3:])], CorruptFile, "is not sha256 and 64 hexadecimal digits"),
    ([layer("sha256:" + HEX.upper())], CorruptFile, "is not sha256 and 64 hexadecimal digits"),
    ([layer(None)], CorruptFile, "the digest 'None' is not"),
]


@pytest.mark.parametrize(("layers", "error", "words"), BROKEN)
def test_manifests_that_cannot_be_opened(ollama, layers, error, words):
    """One line when opened; listed with the same line, and the other models with them."""
    write_manifest(ollama, f"{REGISTRY}/library/broken/latest", layers)
    said = one_line_error(error, words, "ollama:broken")
    rows = {row["name"]: row for row in list_local_models()}
    assert sorted(rows) == sorted([*OLLAMA, "ollama:broken:latest"])
    assert rows["ollama:broken:latest"]["problem"] == said and rows["ollama:broken:latest"]["bits"] is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "ollama:broken:latest: the manifest latest is not sound JSON"),
        (b'{"layers": [', "not sound JSON"),
        (b"[" * 100_000, "not sound JSON"),
        (b"\xff\xfe", "not sound JSON"),
        (b"[]", "does not hold a JSON object"),
        (b" " * (other_stores._MANIFEST_BYTES + 1), r"it has more than 4194304 bytes"),
    ],
)
def test_manifests_that_are_no_sound_json(ollama, data, words):
    """Bounded: a huge file is not read."""
    write_manifest(ollama, f"{REGISTRY}/library/broken/latest", []).write_bytes(data)
    one_line_error(CorruptFile, words, "ollama:broken")
    assert len(list_local_models()) == len(OLLAMA) + 1


def test_a_blob_that_is_no_gguf_file(ollama):
    """Its listing says so, too."""
    add_ollama_model(ollama, f"{REGISTRY}/library/broken/latest", b"PK\3\4 a zip file")
    one_line_error(CorruptFile, "ollama:broken:latest is not a GGUF file.*blobs/sha256-", "ollama:broken")
    (row,) = [row for row in list_local_models() if "broken" in row["name"]]
    assert "GGUF" in row["problem"] and row["bytes"] == 15


def test_files_that_are_no_manifests(ollama):
    """Files of the system, names that could not be typed, folders that are too deep or not deep enough."""
    for place in (f"{REGISTRY}/library/x/.DS_Store", f"{REGISTRY}/library/a b/c", f"{REGISTRY}/library/flat",
                  f"{REGISTRY}/library/too/deep/tag"):  # fmt: skip
        write_manifest(ollama, place, [])
    assert [model.name for model in stored_models()] == OLLAMA


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_store_that_may_not_be_read(ollama):
    """As of the service on Linux: nothing is listed, nothing fails."""
    (ollama / "manifests").chmod(0)
    try:
        assert list(stored_models()) == []
    finally:
        (ollama / "manifests").chmod(0o755)


def test_the_usual_places(tmp_path, gguf, monkeypatch):
    """Without the variables: the user's own folders, the older one of LM Studio once if it is a link."""
    monkeypatch.delenv("OLLAMA_MODELS")
    monkeypatch.delenv("LMSTUDIO_MODELS")
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    add_ollama_model(tmp_path / "user/.ollama/models", f"{REGISTRY}/library/mine/7b", gguf.read_bytes())
    make_lmstudio_store(tmp_path / "user/.lmstudio/models", gguf)
    (tmp_path / "user/.cache").mkdir()
    (tmp_path / "user/.cache/lm-studio").symlink_to(tmp_path / "user/.lmstudio")
    names = [model.name for model in stored_models()]
    assert "ollama:mine:7b" in names and [n for n in names if n.startswith("lmstudio:")] == LMSTUDIO


def test_split_files_are_one_model_and_half_of_one_is_none(lmstudio, gguf):
    for part in ("00001-of-00002", "00002-of-00002"):
        (lmstudio / "one/Tiny-GGUF" / f"Big-Q6_K-{part}.gguf").write_bytes(gguf.read_bytes())
    names = [model.name for model in stored_models()]
    assert "lmstudio:one/Tiny-GGUF/Big-Q6_K-00001-of-00002.gguf" in names and len(names) == 5
    (lmstudio / "one/Tiny-GGUF/Big-Q6_K-00002-of-00002.gguf").unlink()
    assert [model.name for model in stored_models()] == LMSTUDIO


def test_every_error_is_of_one_tree(ollama):
    write_manifest(ollama, f"{REGISTRY}/library/broken/latest", [layer("x")])
    with pytest.raises(RuvmlxError):
        find_stored("ollama:broken")


def test_blob_names_of_either_spelling(ollama, gguf):
    """Manifests have had sha256-... as well as sha256:..."""
    known = add_blob(ollama, gguf.read_bytes(), "model")
    write_manifest(
        ollama, f"{REGISTRY}/library/old/1", [known | {"digest": known["digest"].replace(":", "-")}]
    )
    assert load_model("ollama:old:1").format == "gguf"

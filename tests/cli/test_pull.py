"""`pull`, `ls`, `show` and `rm` with repositories of GGUF files and with other programs' models."""

import json

from ..models.make_gguf import make_gguf_model
from ..models.store_layouts import make_lmstudio_store, make_ollama_store
from ..models.test_fetching import NAME, served  # noqa: F401
from ..models.test_gguf_repositories import repository  # noqa: F401
from .verbs import one_line


def test_pull_says_which_file_it_takes_and_why(repository, run):  # noqa: F811
    """One line for each file on stderr, without a terminal, too; stdout has the JSON alone."""
    code, out, err = run("pull", NAME, "--json")
    said = json.loads(out)
    assert code == 0 and said["name"] == NAME and said["path"].endswith("Tiny-Q8_0.gguf")
    words = " ".join(err.split())
    assert (
        words.startswith("owner/tiny: Tiny-Q8_0.gguf (") and "the best that leaves a third of 1.0 GB" in words
    )
    others = [line.split()[:2] for line in err.splitlines() if line.split()[0] == "or"]
    assert others == [["or", "Q4_0"], ["or", "F16"]]
    assert run("pull", NAME)[2] == ""  # it is here now
    code, out, _ = run("ls", "--json")
    assert [row["name"] for row in json.loads(out)] == [NAME]


def test_pull_of_what_the_repository_does_not_have(repository, run):  # noqa: F811
    code, out, err = run("pull", f"{NAME}:Q2_K")
    assert (code, out) == (3, "") and one_line(err) and "owner/tiny:Q8_0" in err


def test_rm_deletes_the_files_of_a_gguf_repository(repository, run, tmp_path, monkeypatch):  # noqa: F811
    for wanted in (":Q4_0", ":F16"):
        assert run("pull", NAME + wanted)[0] == 0
    code, _, err = run("rm", f"{NAME}:F16")
    assert code == 2 and one_line(err) and f"`ruvmlx rm {NAME}`" in err
    data = tmp_path / "hub" / "datasets--owner--tiny" / "snapshots" / "1" / "data.csv"
    data.parent.mkdir(parents=True)
    data.write_text("mine")
    code, out, _ = run("rm", NAME)
    assert code == 0 and "Deleted owner/tiny with all its files: " in out and " 0 B" not in out
    assert not list((tmp_path / "hub").rglob("*.gguf")) and data.read_text() == "mine"


def test_rm_deletes_what_an_interrupted_pull_left(run, tmp_path, monkeypatch):
    """The folder has a part of a file, and names a revision that is not there."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    part = tmp_path / "hub" / "models--owner--tiny" / "blobs" / "1.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(4000))
    code, out, _ = run("rm", "owner/tiny")
    assert code == 0 and "4.0 kB are free again" in out and not part.parent.parent.exists()
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(400))
    code, out, _ = run("rm", "owner/tiny", "--json")
    assert code == 0 and json.loads(out) == {"name": "owner/tiny", "bytes": 400}


def test_other_programs_models(run, tmp_path, monkeypatch):
    """Listed and shown under their names; `rm` leaves them alone."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    file = make_gguf_model(tmp_path / "tiny.gguf")
    make_ollama_store(tmp_path / "ollama", file.read_bytes())
    make_lmstudio_store(tmp_path / "lmstudio", file)
    _, out, _ = run("ls")
    for name in ("ollama:llama3.2:1b", "lmstudio:one/Tiny-GGUF"):
        assert f"\n{name} " in out
        code, shown, _ = run("show", name, "--json")
        assert code == 0 and json.loads(shown)["name"] == name
        code, _, err = run("rm", name)
        assert code == 2 and one_line(err)
    assert run("show", "ollama:llama3.2:1b")[0] == 0

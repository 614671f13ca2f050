"""Fetching from a hub: what is told, stopped, gone on with, and what a bad line does."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading

import pytest

from ruvmlx.errors import (
    CorruptFile,
    Interrupted,
    ModelNotFound,
    RuvmlxError,
    StoreBusy,
    UnsupportedModel,
)
from ruvmlx.models.find import fetching, hub
from ruvmlx.models.load import load_model
from ruvmlx.progress import Watch

from .fake_hub import FakeHub
from .make_models import make_safetensors_model

NAME = "owner/tiny"


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A hub with a model of 3 MB, an empty cache, and huggingface-hub that asks there."""
    import huggingface_hub.constants as constants

    folder = make_safetensors_model(tmp_path / "served", hidden_size=256, intermediate_size=768)
    made = FakeHub(folder, NAME)
    template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", made.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    yield made
    made.close()


class NotingWatch(Watch):
    """Remembers what it was told; leaves after so many bytes."""

    def __init__(self, leave_at=None):
        self.facts, self.lines, self.leave_at = [], [], leave_at

    def note_facts(self, facts):
        self.facts.append(facts)

    def progress(self, progress):
        self.lines.append(progress.line)
        if (
            self.leave_at is not None
            and progress.what.startswith("Fetching")
            and progress.done > self.leave_at
        ):
            raise Interrupted("enough")


def partial(tmp_path):
    """huggingface-hub's own such files, of the small ones, have one more dot in their names."""
    found = (tmp_path / "hub").glob("models--owner--tiny/blobs/*.incomplete")
    return [path for path in found if path.name.count(".") == 1]


def wait_for_fetching():
    """The thread that fetches notices at its next piece that nobody waits, and lets go of the file."""
    for thread in threading.enumerate():
        if thread.name == "fetch":
            thread.join(10)


def test_fetched_told_and_used(served):
    """The size is known before the weights come; afterwards it is an ordinary cached model."""
    watch = NotingWatch()
    model = load_model(NAME, watch)
    (facts,) = watch.facts
    weights = (served.folder / "model.safetensors").stat().st_size
    assert facts.name == NAME and facts.to_fetch == facts.bytes == weights
    assert facts.parameters == model.parameters and 15 < facts.bits < 17
    assert dict(model.load_weights())
    served.close()
    assert load_model(NAME, watch).fingerprint == model.fingerprint and len(watch.facts) == 1


def test_stopped_and_gone_on_with(served, tmp_path):
    """What came before the stop is not fetched again."""
    served.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, NotingWatch(leave_at=300_000))
    (left,) = partial(tmp_path)
    wait_for_fetching()
    held = left.stat().st_size
    assert 300_000 < held < (served.folder / "model.safetensors").stat().st_size
    assert hub.cached_folder(NAME) is None
    served.pace, watch = 0.0, NotingWatch()
    load_model(NAME, watch)
    assert served.ranges == [0, held] and not partial(tmp_path)
    assert watch.facts[0].to_fetch == watch.facts[0].bytes - held


def test_killed_and_gone_on_with(served, tmp_path):
    """The same when the process is killed."""
    served.pace = 0.05
    code = f"from ruvmlx.models.load import load_model\nload_model({NAME!r})"
    env = {**os.environ, "HF_ENDPOINT": served.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
    process = subprocess.Popen([sys.executable, "-c", code], env=env)
    while not (partial(tmp_path) and partial(tmp_path)[0].stat().st_size > 200_000):
        assert process.poll() is None
    process.kill()
    process.wait()
    held, served.pace = partial(tmp_path)[0].stat().st_size, 0.0
    assert load_model(NAME).name == NAME
    assert served.ranges == [0, held]


def test_a_line_that_breaks(served):
    """It goes on by itself where it was."""
    served.drops = [100_000, 500_000]
    assert load_model(NAME).name == NAME
    assert served.ranges == [0, 100_000, 600_000]


def test_a_line_that_stays_broken(served, tmp_path):
    """One line in the end, and what came is kept."""
    served.drops = [100_000] + [0] * 20
    with pytest.raises(ModelNotFound) as caught:
        load_model(NAME)
    assert "\n" not in str(caught.value) and partial(tmp_path)[0].stat().st_size == 100_000
    served.drops = []
    assert load_model(NAME).name == NAME


def test_damaged_on_the_way(served, tmp_path):
    """Bytes that are not those of the hub never become a model; the next attempt begins anew."""
    served.damaged = True
    with pytest.raises(CorruptFile, match="arrived damaged"):
        load_model(NAME)
    assert hub.cached_folder(NAME) is None and partial(tmp_path)[0].stat().st_size == 0
    served.damaged = False
    assert dict(load_model(NAME).load_weights())


def test_not_enough_room_on_the_disk(served, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")(10, 10, 1000)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(RuvmlxError, match=r"needs 3.1 MB more on the disk, where 1.0 kB are free"):
        load_model(NAME)
    assert served.ranges == []


def test_a_second_download_waits_for_the_first(served, tmp_path):
    """The second is told to wait; it does not write into the first one's file."""
    served.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, NotingWatch(leave_at=100_000))
    wait_for_fetching()
    with partial(tmp_path)[0].open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreBusy, match="another process is fetching"):
            load_model(NAME)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_cache_whose_files_cannot_be_locked(served, monkeypatch, code):
    """The user was told to wait for another process, or "Operation not supported"."""

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fetching.fcntl, "flock", refuse)
    with pytest.raises(ModelNotFound, match=r"has no locks .*; set HF_HUB_CACHE to a folder on a local disk"):
        load_model(NAME)


@pytest.mark.parametrize("left", [0, 100])
def test_a_small_file_that_a_crash_of_the_machine_cut_off_is_fetched_again(served, tmp_path, left):
    """huggingface-hub keeps each file that has its name: the damaged config.json stopped every attempt."""
    served.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, NotingWatch(leave_at=100_000))
    wait_for_fetching()
    (config,) = (tmp_path / "hub").rglob("config.json")
    os.truncate(config.resolve(), left)
    served.pace = 0.0
    assert dict(load_model(NAME).load_weights())


GAP, LONG = slice(100_000, 200_000), 4_000_000


@pytest.mark.parametrize("left", ["a gap", "a gap in all bytes", "too many bytes"])
def test_a_partial_file_that_a_crash_of_the_machine_damaged_is_fetched_again(served, tmp_path, left):
    """The disk can have a later write without an earlier one. `pull` fetched the rest and found a wrong hash.
    It then asked the user to fetch the model again."""
    served.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, NotingWatch(leave_at=300_000))
    wait_for_fetching()
    (file,) = partial(tmp_path)
    data = bytearray((file if left == "a gap" else served.folder / "model.safetensors").read_bytes())
    held, size = len(data), (served.folder / "model.safetensors").stat().st_size
    data[GAP] = bytes(100_000)
    file.write_bytes(data.ljust(LONG, b"x") if left == "too many bytes" else data)
    served.pace, served.ranges = 0.0, []
    assert dict(load_model(NAME).load_weights())
    assert served.ranges == ([held, 0] if held < size else [0]) and not partial(tmp_path)


@pytest.mark.parametrize("left", ["whole", "a gap", "too few bytes", "too many bytes"])
def test_a_file_that_another_program_put_into_the_cache_is_checked(served, tmp_path, monkeypatch, left):
    """A whole file is not fetched. Of one with too few bytes, only the others are."""
    monkeypatch.setattr(fetching, "_SMALL_BYTES", 100_000)
    data = bytearray((served.folder / "model.safetensors").read_bytes())
    name = hashlib.sha256(data).hexdigest()
    if left == "a gap":
        data[GAP] = bytes(100_000)
    sizes = {"too few bytes": 300_000, "too many bytes": LONG}
    file = tmp_path / "hub" / "models--owner--tiny" / "blobs" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(data.ljust(LONG, b"x")[: sizes.get(left, len(data))])
    assert dict(load_model(NAME).load_weights()) and not partial(tmp_path)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == name
    assert served.ranges == {"whole": [], "too few bytes": [300_000]}.get(left, [0])


def test_a_damaged_partial_file_and_a_hub_that_sends_other_bytes(served, tmp_path):
    """The whole file is fetched once more, and no third time."""
    served.pace = 0.02
    with pytest.raises(Interrupted):
        load_model(NAME, NotingWatch(leave_at=300_000))
    wait_for_fetching()
    held = partial(tmp_path)[0].stat().st_size
    served.pace, served.ranges, served.damaged = 0.0, [], True
    with pytest.raises(CorruptFile, match="arrived damaged"):
        load_model(NAME)
    assert served.ranges == [held, 0] and partial(tmp_path)[0].stat().st_size == 0


def test_all_files_of_a_fetched_model_are_on_the_disk(served, tmp_path, monkeypatch):
    """huggingface-hub syncs nothing: after a power failure, an empty config.json counted as fetched."""
    synced, fsync = set(), os.fsync

    def note(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    folder = load_model(NAME).path
    repo = tmp_path / "hub" / "models--owner--tiny"
    wanted = [*folder.iterdir(), folder, *(repo / name for name in ("blobs", "refs", "snapshots")), repo]
    assert [path.name for path in wanted if path.stat().st_ino not in synced] == []


def test_a_model_that_is_not_run_is_not_fetched(served):
    """config.json says so before the weights come."""
    config = served.folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"mpnet"'))
    with pytest.raises(UnsupportedModel, match="mpnet"):
        load_model(NAME)
    assert served.ranges == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_repository_without_safetensors(served, missing):
    """A repository of GGUF files or pickles is named as what it is not."""
    (served.folder / missing).unlink()
    (served.folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"no config\.json with model"):
        load_model(NAME)


def test_stopped_before_anything_came(served):
    """A watch that leaves at once does not wait for the network."""

    class Leaves(Watch):
        def progress(self, progress):
            raise Interrupted("at once")

    with pytest.raises(Interrupted):
        load_model(NAME, Leaves())
    assert served.ranges == []


def test_a_repository_in_its_makers_layout(served):
    """Without a config.json: refused before any weights are fetched."""
    for file in (*served.folder.glob("*.safetensors"), *served.folder.glob("*.index.json")):
        file.rename(served.folder / "consolidated.safetensors")
    (served.folder / "config.json").rename(served.folder / "params.json")
    with pytest.raises(UnsupportedModel, match=f"repository '{NAME}' holds params.json"):
        load_model(NAME)
    assert served.ranges == []

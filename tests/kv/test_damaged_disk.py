"""Caches on disk after damage: whatever is wrong with a file, nobody notices."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from functools import partial

import numpy as np
import pytest

from ruvmlx.kv import owners, page_file
from ruvmlx.kv.cache import PagedCache, facts_of
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import F16
from ruvmlx.kv.pool import PagePool
from ruvmlx.tiers import HOT, PAGE

from .disk import KEY, SMALL, bytes_of, chats_with_pages, files, names_of, read_back, save, tokens_of


def test_nobody_else_may_read_it(saved_backend, folder):
    assert {file.stat().st_mode & 0o777 for file in folder.path.iterdir()} == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert sorted(file.suffix for file in folder.path.iterdir()) == [
        ".cold",
        ".hot",
        ".tail",
        ".uses",
        ".warm",
    ]


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_is_found_and_the_file_removed(saved_backend, folder, seed):
    """One bit anywhere, the end missing, something behind it, another program's file: no token of that file
    is used, nor one after it; and none before it where only pages of 4 bits would be left."""
    rng, file = np.random.default_rng(seed), files(folder)[seed % 4]
    left = {".cold": 0, ".warm": 0, ".hot": 128, ".tail": 192}[file.suffix]
    data = bytearray(file.read_bytes())
    match seed % 5:
        case 0 | 1:
            at = int(rng.integers(len(data) if seed % 2 else 40))
            data[at] ^= 1 << int(rng.integers(8))
        case 2:
            del data[int(rng.integers(len(data))) :]
        case 3:
            data = data + b"x"
        case 4:
            data = bytearray(rng.bytes(5000))
    file.write_bytes(data)
    assert read_back(folder, saved_backend) == left
    assert not file.exists() or file.suffix == ".tail"


@pytest.fixture
def soon():
    """An error if the test takes a minute: it waits for a pipe, or searches without end."""

    def late(*_args):
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put_page_like(file, kind: str) -> None:
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "folder":
            file.mkdir()
        case "device":
            file.symlink_to("/dev/zero")
        case "link to itself":
            file.symlink_to(file)
        case "huge":
            with file.open("wb") as opened:
                opened.truncate(page_file.MAX_FILE_BYTES + 1)
        case "garbage":
            file.write_bytes(b"garbage" * 1000)


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to itself", "huge", "garbage"])
@pytest.mark.parametrize("ending", [".cold", ".hot", ".tail", ".uses"])
def test_an_odd_file_is_read_in_no_time(saved_backend, folder, monkeypatch, soon, kind, writable, ending):
    """In place of a page or a list, also where it cannot be removed: it is passed over."""
    (file,) = (file for file in folder.path.iterdir() if file.suffix == ending)
    put_page_like(file, kind)
    if not writable:
        monkeypatch.setattr(page_file, "unlink", lambda path: None)
    left = {".cold": 0, ".hot": 128, ".tail": 192, ".uses": 200}[ending]
    assert read_back(folder, saved_backend) == left
    folder.tidy({"chat"})
    folder.remove("chat")


def test_a_large_file_of_garbage_takes_no_memory(tmp_path):
    """The file is not over the limit. Only its header is read."""
    file = tmp_path / "x.hot"
    with file.open("wb") as opened:
        opened.truncate(min(page_file.MAX_FILE_BYTES, 256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="another one"):
            page_file.read(file, b"x" * 20, HOT)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_facts_of_any_form_are_no_error(saved_backend, folder, soon):
    """A sound file whose cache says something else than its name."""
    (file,) = (file for file in files(folder) if file.suffix == ".tail")
    for facts in ({"layout": "x", "tokens": 7}, {"tokens": [[]]}, {"tokens": [-1]}, {"tokens": {"a": 1}}):
        text = json.dumps(facts).encode()
        head = page_file.HEAD.pack(b"RUVMLXPG", page_file.FORMAT, HOT, b"x" * 20, len(text), 5) + text
        file.write_bytes(head + b"short" + struct.pack("<I", zlib.crc32(head + b"short")))
        assert read_back(folder, saved_backend) == 192
    deep = b'{"tokens": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    head = page_file.HEAD.pack(b"RUVMLXPG", page_file.FORMAT, HOT, b"x" * 20, len(deep), 0) + deep
    file.write_bytes(head + struct.pack("<I", zlib.crc32(head)))
    assert read_back(folder, saved_backend) == 192


def test_a_cache_that_does_not_fit_into_memory_is_read_again_and_stays_on_disk(
    saved_backend, folder, monkeypatch
):
    """The reply failed, although the model can read the prompt in small pieces."""
    before, read = files(folder), page_file.read_ordinary

    def short(path, most):
        if path.suffix == ".warm":
            raise MemoryError
        return read(path, most)

    monkeypatch.setattr(page_file, "read_ordinary", short)
    assert read_back(folder, saved_backend) == 0
    monkeypatch.undo()
    assert files(folder) == before and read_back(folder, saved_backend) > 0


def test_swapped_files_are_never_used(saved_backend, folder, tiny):
    """A page under the name of another page, of another tier, or of another model's page."""
    prompt = tokens_of(200)
    (cold,) = (file for file in files(folder) if file.suffix == ".cold")
    (warm,) = (file for file in files(folder) if file.suffix == ".warm")
    one, two = cold.read_bytes(), warm.read_bytes()
    cold.write_bytes(two), warm.write_bytes(one)
    assert read_back(folder, saved_backend) == 0 and not cold.exists()
    warm.write_bytes(two), cold.with_suffix(".warm").write_bytes(one)
    assert read_back(folder, saved_backend) == 0
    names, others = names_of(prompt), names_of(prompt, KEY | {"model": "other"})
    for mine, other in zip(names, others, strict=True):
        for file in files(folder):
            if file.name.startswith(mine.hex()):
                shutil.copy(file, folder.path / file.name.replace(mine.hex(), other.hex()))
    assert read_back(folder, saved_backend, KEY | {"model": "other"}) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"format": page_file.FORMAT + 1},
        {"tier": HOT},
        {"name": b"x" * 20},
        {"facts": {"layout": "another"}},
        {"facts": {}},
        {"facts": [1]},
        {"body": b"short"},
    ],
)
def test_a_sound_file_of_something_else(saved_backend, folder, change):
    """Its checksum is right, what it says is not."""
    (file,) = (file for file in files(folder) if file.suffix == ".cold")
    data = file.read_bytes()
    magic, version, tier, name, length, _ = page_file.HEAD.unpack_from(data)
    text = json.dumps(change.get("facts", json.loads(data[page_file.HEAD.size :][:length]))).encode()
    body = change.get("body", data[page_file.HEAD.size + length : -4])
    version, tier = change.get("format", version), change.get("tier", tier)
    head = page_file.HEAD.pack(magic, version, tier, change.get("name", name), len(text), len(body)) + text
    file.write_bytes(head + body + struct.pack("<I", zlib.crc32(head + body)))
    assert read_back(folder, saved_backend) == 0 and not file.exists()


def test_another_model_version_policy_salt_or_beginning_is_left_alone(saved_backend, folder, monkeypatch):
    """The files may be of use again: nothing is loaded, nothing removed."""
    there = files(folder)
    assert not read_back(folder, saved_backend, KEY | {"base": "f00"})
    assert not read_back(folder, saved_backend, KEY | {"model": "n"})
    assert not read_back(folder, saved_backend, KEY | {"policy": {"name": "f16"}})
    assert not read_back(folder, saved_backend, salt="another")
    assert not read_back(folder, saved_backend, prompt=tokens_of(200, seed=9))
    with monkeypatch.context() as patch:
        patch.setattr("ruvmlx.kv.chain.MADE_BY", "0.0.0")
        assert not read_back(folder, saved_backend)
    assert files(folder) == there and read_back(folder, saved_backend) == 200


@pytest.mark.parametrize("name", ["../chat", "a/b", "", ".kv", "x" * 65])
def test_a_name_stays_in_the_folder(saved_backend, folder, name):
    cache = saved_backend.new_cache(SMALL)
    saved_backend.prefill(tokens_of(200), cache)
    before = sorted(folder.path.parent.rglob("*"))
    assert not save(folder, tokens_of(200), cache, name)
    folder.remove(name)
    assert sorted(folder.path.parent.rglob("*")) == before


def test_a_list_of_uses_that_is_damaged_keeps_nothing(saved_backend, folder):
    """Better read again than left on disk after the chat is deleted."""
    (uses,) = folder.path.glob("*.uses")
    uses.write_bytes(uses.read_bytes()[:-3])
    folder.tidy({"chat"})
    assert files(folder) == []


def test_what_takes_too_long_is_given_up(saved_backend, folder):
    """Whole pages stay."""
    before, cache, tokens = files(folder), saved_backend.new_cache(SMALL), tokens_of(300)
    saved_backend.prefill(tokens, cache)
    assert not folder.save("chat", names_of(tokens), tokens, cache, time.monotonic() - 1)
    assert files(folder) == before and not list(folder.path.glob("*.new"))


def test_a_folder_that_cannot_be_written(saved_backend, tmp_path):
    """No error: the chat is read again."""
    cache = saved_backend.new_cache(SMALL)
    saved_backend.prefill(tokens_of(200), cache)
    (tmp_path / "file").write_text("no folder")
    blocked = CacheFolder(tmp_path / "file", 1 << 30)
    assert not save(blocked, tokens_of(200), cache)
    assert (
        blocked.load(names_of(tokens_of(200)), tokens_of(200), partial(saved_backend.new_cache, SMALL))
        is None
    )
    blocked.remove("chat"), blocked.tidy(set()), blocked.discard(names_of(tokens_of(200)))
    assert blocked.contents() == (0, 0)


WRITE_FOREVER = """
import sys
from pathlib import Path
from ruvmlx.kv.cache import PagedCache, facts_of
from ruvmlx.kv.chain import extend, root
from ruvmlx.kv.disk import CacheFolder
from tests.kv.test_damaged_disk import KEY, NumberedStorage, numbered_cache
folder = CacheFolder(Path(sys.argv[1]), 40 << 20)
print("go", flush=True)
for i in range(10**9):
    cache, tokens = numbered_cache(i % 50)
    folder.save(f"chat{i % 7}", extend([root(KEY)], tokens), tokens, cache, float("inf"))
    if i % 5 == 4:
        folder.remove(f"chat{i % 7}")
"""


class NumberedStorage:
    """A cache of 8 pages of 1 MiB and a part of one, each filled with a number that its tokens tell."""

    layout, background = "filled", False

    def __init__(self):
        self.pages: dict[int, bytes] = {}

    def page_bytes(self, tier):
        return 1 << 20

    def new_table(self):
        from tests.oracles.plain_storage import PlainTable

        return PlainTable()

    def dump(self, page, tier):
        return np.frombuffer(self.pages[page], np.uint8)

    def load(self, data, tier):
        self.pages[len(self.pages)] = data
        return len(self.pages) - 1

    def free(self, page, tier): ...


def numbered_cache(i: int) -> tuple[PagedCache, list[int]]:
    """Sequences that begin alike: page j of sequence i has the tokens and the bytes of i >> (8 - j)."""
    cache, tokens = PagedCache(PagePool(NumberedStorage(), pressure=lambda: 0.0), F16), []
    parts = [i >> (8 - j) for j in range(9)]
    for j, part in enumerate(parts):
        tokens += [part, j] * 32
    tokens = tokens[: 8 * PAGE + 10]
    bodies = iter(parts)
    facts = facts_of(NumberedStorage.layout, len(tokens), 0, [0, 0])
    cache.restore(facts, lambda n: bytes([next(bodies)]) * n)
    return cache, tokens


def test_kill_9_while_writing_leaves_whole_pages_or_none(folder):
    """After each kill every sequence is found as far as it was written, with the right bytes; and what
    belongs to nobody is gone after the next start."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOREVER, str(folder.path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout.readline() == "go\n"
        time.sleep(float(rng.uniform(0.05, 0.4)))
        child.send_signal(signal.SIGKILL)
        child.wait()
        folder.tidy({f"chat{i}" for i in range(7)})
        assert {file.name for file in files(folder)} <= owners.used_files(
            folder.path, chats_with_pages(folder)
        )
        for i in range(0, 50, 7):
            want, tokens = numbered_cache(i)
            make = partial(PagedCache, want.pool, F16)
            if (back := folder.load(names_of(tokens), tokens, make)) is not None:
                n = len(back[1]) // PAGE
                assert bytes_of(back[0])[:n] == bytes_of(want)[:n]
                found += n
    assert found > 20

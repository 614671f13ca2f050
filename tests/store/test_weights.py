"""Weights of versions as differences: they are exact, and damage is found."""

import io
import os
import signal
import tracemalloc
import zlib
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, NotFound, StoreError
from ruvmlx.store import HeadMoved, Store, weights
from ruvmlx.store.audit import disagreement
from ruvmlx.store.differences import add_differences, difference

KEY = "model", "default"


def packed_weights(rng, zeros=0.9, **sizes) -> bytes:
    """Weights as a .npz file: floats of all sizes, most of them 0."""
    arrays = {}
    for name, size in sizes.items():
        numbers = rng.standard_normal(size) * 10.0 ** rng.integers(-20, 20, size)
        arrays[name] = np.where(rng.random(size) < zeros, 0, numbers).astype(np.float32)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def weights_of(seed: int) -> bytes:
    """Weights that differ a little from those of the seed before."""
    rng, out = np.random.default_rng(7), io.BytesIO()
    b, evidence = rng.standard_normal(300).astype(np.float32), rng.standard_normal(50).astype(np.float32)
    b[::3] = 0
    np.savez(out, b=b * np.float32(1 + seed / 100), evidence=evidence + np.float32(seed / 1000))
    return out.getvalue()


@pytest.fixture
def path(home):
    return home / "ruvmlx.db"


@pytest.fixture
def store(path):
    return Store(path)


def add(store, parent: int, state: bytes, name: str = "default") -> int:
    with store.transaction():
        return store.versions.add("model", name, parent, state, 0.01, 0.5)


def grown(store, n: int, name: str = "default") -> dict[int, bytes]:
    """n versions, each the child of the one before: {version: weights}."""
    states = {version: weights_of(version) for version in range(1, n + 1)}
    for version, state in states.items():
        assert add(store, version - 1, state, name) == version
    return states


def read(path, versions) -> dict[int, bytes]:
    """The weights of versions, as a process reads them that has written none."""
    with closing(Store(path)) as store:
        return {version: store.versions.get(*KEY, version).state for version in versions}


def sources(store, name: str = "default") -> list[int]:
    return [
        row[0] for row in store.db.rows("SELECT source FROM adapters WHERE name = ? ORDER BY version", name)
    ]


# -- differences -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_of_differences_is_exact(seed):
    """At odd sizes, for numbers that appear, vanish or change their sign, for infinities and NaN."""
    rng = np.random.default_rng(seed)
    sizes = {"a": int(rng.integers(1, 40)), "longer": int(rng.integers(1, 40)), "empty": 0}
    states = [packed_weights(rng, zeros, **sizes) for zeros in (1.0, 0.5, 0.9, 0.0, 1.0)]
    odd = bytearray(states[-1])
    odd[-9:-1] = np.array([np.nan, -np.inf], "<f4").tobytes()
    states.append(bytes(odd))
    chain = [difference(now, before) for before, now in pairwise(states)]
    for n, state in enumerate(states):
        assert add_differences(states[0], chain[:n]) == state


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 131])
def test_bytes_of_any_length_have_a_difference(size):
    rng = np.random.default_rng(size)
    before, now = rng.bytes(size), rng.bytes(size)
    assert add_differences(before, [difference(now, before)]) == now


def test_weights_of_another_form_have_no_difference():
    rng = np.random.default_rng(0)
    state = packed_weights(rng, a=5, b=7)
    assert difference(state, state + b"x") is None
    assert difference(packed_weights(rng, a=7, b=5), state) is None


def test_small_changes_take_little_room():
    """A difference of numbers with 11 significant bits takes less than 70% of the compressed numbers."""
    rng = np.random.default_rng(1)

    def rounded_bytes(numbers):
        words = numbers.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
        return words.tobytes()

    numbers = rng.standard_normal(4000)
    before, now = rounded_bytes(numbers), rounded_bytes(numbers * (1 + 0.01 * rng.standard_normal(4000)))
    assert 10 * len(difference(now, before)) < 7 * len(zlib.compress(now))


def test_a_difference_that_grows_without_end_is_damaged():
    """A difference has at most two words for each number of the weights."""
    bomb = b"0000" + zlib.compress(bytes(64 << 20), 1)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile):
            add_differences(weights_of(1), [bomb])
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at", [0, 3, 4, 9, -1])
def test_a_damaged_difference_is_found(at):
    before, now = weights_of(1), weights_of(2)
    damaged = bytearray(difference(now, before))
    damaged[at] ^= 0x10
    with pytest.raises(CorruptFile, match="damaged"):
        add_differences(before, [bytes(damaged)])
    with pytest.raises(CorruptFile, match="damaged"):
        add_differences(weights_of(3), [difference(now, before)])  # of another parent


# -- chains in the store -----------------------------------------------------------------------------


def test_every_version_is_exact_and_chains_are_short(store, path, monkeypatch):
    monkeypatch.setattr(weights, "MOST_DIFFERENCES", 4)
    states = grown(store, 12)
    assert sources(store) == [0, 1, 2, 3, 4, 0, 6, 7, 8, 9, 0, 11]
    assert read(path, states) == states and disagreement(store) == ""


def test_a_whole_copy_comes_after_31_differences(store):
    grown(store, 34)
    assert [version for version, source in enumerate(sources(store), 1) if source == 0] == [1, 33]


def test_chains_are_short_in_a_tree_and_in_a_process_that_starts(path, monkeypatch):
    """Each process reads its parent from the store; a branch goes on from any version."""
    monkeypatch.setattr(weights, "MOST_DIFFERENCES", 2)
    states, parents = {}, [0, 1, 2, 3, 2, 5, 3, 3, 8, 1]
    for version, parent in enumerate(parents, 1):
        with closing(Store(path)) as store:
            if store.versions.head(*KEY) != parent:
                with store.transaction():
                    store.versions.move_head(*KEY, parent)
            states[version] = weights_of(10 * version)
            assert add(store, parent, states[version]) == version
    assert read(path, states) == states
    with closing(Store(path)) as store:
        assert sources(store) == [0, 1, 2, 0, 2, 0, 0, 0, 8, 1]
        assert disagreement(store) == ""


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE adapters SET source = 2 WHERE version = 4",  # a wrong parent
        "UPDATE adapters SET source = 0 WHERE version = 4",
        "UPDATE adapters SET source = 6 WHERE version = 4",  # a circle
        "UPDATE adapters SET source = 99 WHERE version = 4",
        "UPDATE adapters SET state = NULL WHERE version = 4",  # a lost link
        "UPDATE adapters SET state = (SELECT state FROM adapters WHERE version = 3) WHERE version = 4",
        "DELETE FROM adapters WHERE version = 4",
    ],
)
def test_a_wrong_parent_and_a_lost_link_are_found(store, path, damage):
    """Versions before it are exact. Those after it are refused, and no wrong weights are ever given."""
    states = grown(store, 6)
    store.db.execute(damage)
    assert "version" in disagreement(store)
    assert read(path, (1, 2, 3)) == {version: states[version] for version in (1, 2, 3)}
    with closing(Store(path)) as other:
        for version in (4, 5, 6):
            with pytest.raises((CorruptFile, NotFound)):
                other.versions.get(*KEY, version)


def test_a_version_after_damage_is_whole(store, path):
    """It does not need the weights that nobody can read."""
    grown(store, 3)
    store.db.execute("UPDATE adapters SET state = x'00' WHERE version = 2")
    with closing(Store(path)) as other:
        assert add(other, 3, weights_of(4)) == 4
    assert read(path, [4]) == {4: weights_of(4)}


def test_weights_in_memory_are_not_taken_for_those_of_another_adapter(store, path):
    """Another process removes the adapter and makes a new adapter of the same name. The first version of the
    new adapter has the next number."""
    add(store, 0, weights_of(1))
    with closing(Store(path)) as other:
        other.adapters.delete(*KEY)
        assert add(other, 0, weights_of(50)) == 2
    with pytest.raises(HeadMoved):
        add(store, 1, weights_of(2))
    add(store, 2, weights_of(2))
    assert read(path, (2, 3)) == {2: weights_of(50), 3: weights_of(2)}


def test_weights_of_a_transaction_that_failed_are_forgotten(store, path):
    add(store, 0, weights_of(1))
    with pytest.raises(StoreError), store.transaction():
        store.versions.add(*KEY, 1, weights_of(60), 0.01, 0.5)
        raise StoreError("no")
    with closing(Store(path)) as other:
        add(other, 1, weights_of(2))
    add(store, 2, weights_of(3))
    assert read(path, (1, 2, 3)) == {version: weights_of(version) for version in (1, 2, 3)}


def test_the_oldest_are_deleted_and_the_rest_is_exact(store, path, monkeypatch):
    monkeypatch.setattr(weights, "KEEP_NEAREST", 2)
    monkeypatch.setattr(weights, "KEEP_NEWEST", 5)
    states = grown(store, 12)
    assert store.versions.kept_versions(*KEY) == [8, 9, 10, 11, 12]
    assert sources(store)[7:] == [0, 8, 9, 10, 11]
    assert read(path, range(8, 13)) == {version: states[version] for version in range(8, 13)}
    assert disagreement(store) == ""


def test_weights_beyond_the_bytes_are_deleted_and_the_rest_is_exact(store, path, monkeypatch):
    """The oldest leave until the rest takes so many bytes at most. The nearest stay even with more bytes."""
    whole = len(zlib.compress(weights_of(1), level=1))
    monkeypatch.setattr(weights, "KEEP_BYTES", 4 * whole)
    monkeypatch.setattr(weights, "KEEP_NEAREST", 2)
    states = grown(store, 15)
    assert store.versions.kept_versions(*KEY)[0] > 1
    sizes = dict(tuple(row) for row in store.db.rows("SELECT version, length(state) FROM adapters"))
    kept = {version: size for version, size in sizes.items() if size}
    assert sum(kept.values()) <= 4 * whole + max(kept.values())
    assert list(kept) == list(range(min(kept), 16)) and 3 < len(kept) < 9
    assert read(path, kept) == {version: states[version] for version in kept}
    assert disagreement(store) == ""
    monkeypatch.setattr(weights, "KEEP_BYTES", 1)
    add(store, 15, weights_of(16))
    assert store.versions.kept_versions(*KEY) == [15, 16]


def test_a_copy_needs_nothing_of_its_original(store):
    states = grown(store, 12)
    store.adapters.copy(*KEY, "copy")
    store.adapters.delete(*KEY)
    kept = store.versions.kept_versions("model", "copy")
    assert kept == list(range(5, 13)) and sources(store, "copy")[3:6] == [0, 0, 5]
    assert {v: store.versions.get("model", "copy", v).state for v in kept} == {v: states[v] for v in kept}
    assert disagreement(store) == ""


@pytest.mark.parametrize("place", ["before the weights", "after the weights"])
def test_a_kill_between_two_writes_leaves_the_version_before(path, place):
    """The row, the weights, the head and the log are one transaction."""
    with closing(Store(path)) as store:
        states = grown(store, 3)
    if (child := os.fork()) == 0:
        try:
            _add_and_die(path, place)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert read(path, states) == states
    with closing(Store(path)) as store:
        assert store.versions.head(*KEY) == 3 and store.versions.kept_versions(*KEY) == [1, 2, 3]
        assert store.integrity() == "ok" and disagreement(store) == ""
        assert add(store, 3, weights_of(4)) == 4
    assert read(path, [4]) == {4: weights_of(4)}


def _add_and_die(path, place: str) -> None:
    write = weights.Weights.write

    def dying(self, *args):
        if place == "after the weights":
            write(self, *args)
        os.kill(os.getpid(), signal.SIGKILL)

    weights.Weights.write = dying
    add(Store(path), 3, weights_of(40))

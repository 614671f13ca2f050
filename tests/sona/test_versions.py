"""Versions of an adapter: each rating makes one, undo and rollback go back to them bit for bit."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, NotFound
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona import objective
from ruvmlx.store import weights as weights_module
from ruvmlx.store.audit import disagreement

from .feedback import reply, weights


def test_undo_is_bit_for_bit(open_tiny):
    with open_tiny() as runtime:
        states = [weights(runtime)]
        for i in range(4):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
            states.append(weights(runtime))
        assert len(set(states)) == 5
        for expected in reversed(states[:-1]):
            runtime.undo()
            assert weights(runtime) == expected
        with pytest.raises(NotFound, match="no rating"):
            runtime.undo()


def test_a_rating_that_changed_nothing_can_be_undone_and_rolled_back_like_any(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        a, b = reply(runtime, seed=1), reply(runtime, seed=2)
        runtime.rate(a, "up")
        with monkeypatch.context() as m:
            m.setattr(objective, "dro_weight", lambda *_: 0.0)
            assert not runtime.rate(b, "5").applied
        runtime.undo()
        version = runtime.rate(b, "1").adapter_version
        assert runtime.rollback(version).ratings == 2
        assert [r.rating for r in runtime.learner.history.ratings()] == ["up", "1"]
        assert runtime.rollback(2).ratings == 2
        assert [r.rating for r in runtime.learner.history.ratings()] == ["up", "5"]


def test_what_undo_needs_is_never_thrown_away(open_tiny, monkeypatch):
    """Roll back to the oldest version that is kept, rate once more: that rating can be undone."""
    monkeypatch.setattr(weights_module, "KEEP_NEAREST", 5)
    monkeypatch.setattr(weights_module, "KEEP_NEWEST", 5)
    with open_tiny() as runtime:
        for i in range(12):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
        oldest = runtime.status().versions[0]
        assert oldest > 1
        runtime.rollback(oldest)
        state = weights(runtime)
        runtime.rate(reply(runtime, seed=50), "up")
        runtime.undo()
        assert weights(runtime) == state


def test_every_version_can_be_gone_back_to(open_tiny, monkeypatch):
    """Most are differences from their parents: their weights are bit for bit what they were, in the audit,
    too."""
    monkeypatch.setattr(weights_module, "MOST_DIFFERENCES", 3)
    with open_tiny() as runtime:
        known = {0: weights(runtime)}
        for i in range(12):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
            known[runtime.learner.version] = weights(runtime)
        assert runtime.status().versions == list(range(1, 13))
        rows = runtime.store.db.rows("SELECT source, length(state) AS size FROM adapters ORDER BY version")
        assert [row["source"] for row in rows] == [0, 1, 2, 3, 0, 5, 6, 7, 0, 9, 10, 11]
        assert all(row["size"] < rows[8]["size"] for row in rows[-3:])  # the whole weights before them
        assert disagreement(runtime.store) == ""
        for version in (1, 12, 5, 0, 9):
            runtime.rollback(version)
            assert weights(runtime) == known[version]
        runtime.store.db.execute("UPDATE adapters SET state = substr(state, 1, 50) WHERE version = 4")
        assert disagreement(runtime.store) == "version 4 of adapter 'default' is not what was written"
        with pytest.raises(CorruptFile, match="damaged"):
            runtime.rollback(4)


def test_matrices_of_a_wrong_shape_are_a_damaged_adapter(tiny):
    config = tiny.shape
    blank = MicroLoRA.fresh(np.zeros((config.hidden_size, 2), np.float32), config.vocab_size)
    flat = replace(blank, lora_b=blank.lora_b.ravel()).to_bytes()
    with pytest.raises(CorruptFile, match="wrong shape"):
        MicroLoRA.from_bytes(flat, config.hidden_size, config.vocab_size)


def test_back_to_a_date(open_tiny, monkeypatch):
    """The version that was in use then comes back with its ratings, also if an undo took it back later."""
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(6)]
        history, clock = runtime.learner.history, [1000.0]
        monkeypatch.setattr(time, "time", lambda: clock[0])
        monkeypatch.setattr(time, "time_ns", lambda: int(clock[0] * 1e9))
        moves = [lambda i=i: runtime.rate(ids[i], "up") for i in range(4)]
        moves += [runtime.undo, runtime.undo, lambda: runtime.rate(ids[4], "down")]
        moves += [lambda: runtime.rollback(1), lambda: runtime.rollback(0), lambda: runtime.rollback(5)]
        known = {995.0: (0, [])}
        for move in moves:
            clock[0] += 10
            move()
            given = [(row.reply_id, row.rating) for row in history.ratings()]
            known[clock[0] + 5] = history.version(), given
        assert [version for version, _ in known.values()] == [0, 1, 2, 3, 4, 3, 2, 5, 1, 0, 5]
        clock[0] = 5000.0
        for when, (version, given) in known.items():
            status, then = history.rollback_before(when)
            assert status.adapter_version == then == version
            assert [(row.reply_id, row.rating) for row in history.ratings()] == given


def test_back_to_a_date_whose_version_is_no_longer_kept(open_tiny, monkeypatch):
    """The newest version before it on the way to it is used, and the caller learns which was asked for."""
    with open_tiny() as runtime:
        clock = [1000.0]
        monkeypatch.setattr(time, "time", lambda: clock[0])
        monkeypatch.setattr(time, "time_ns", lambda: int(clock[0] * 1e9))
        for i in range(3):
            clock[0] += 10
            runtime.rate(reply(runtime, seed=i), "up")
        clock[0] += 10
        runtime.rollback(0)
        runtime.store.db.execute("UPDATE adapters SET state = NULL WHERE version > 1")
        status, then = runtime.learner.history.rollback_before(1035)
        assert (status.adapter_version, status.ratings, then) == (1, 1, 3)


def test_a_circle_of_versions_ends(open_tiny):
    """In a damaged store a version may be its own grandparent: ratings and undo come to an end."""
    with open_tiny() as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "up")
        runtime.store.db.execute("UPDATE adapters SET parent = 3 WHERE version = 2")
        runtime.rate(reply(runtime, seed=9), "up")
        assert runtime.undo().adapter_version == 3


def test_random_walks_through_ratings_undos_and_rollbacks(open_tiny):
    """The store's answers equal those of a plain model: a version is its parent's ratings and one more."""
    rng = random.Random(7)
    for _ in range(3):
        with open_tiny() as runtime:
            ids = [reply(runtime, seed=rng.randrange(99)) for _ in range(4)]
            runtime.rollback(0)
            known = {0: ({}, weights(runtime))}
            parent, head = {}, 0
            for _ in range(25):
                move = rng.choice(["rate", "rate", "rate", "undo", "rollback"])
                if move == "rate":
                    reply_id, rating = rng.choice(ids), rng.choice(["up", "down", "1", "3", "5"])
                    new = runtime.rate(reply_id, rating).adapter_version
                    assert new not in known
                    parent[new], head = head, new
                    known[new] = (known[parent[new]][0] | {reply_id: rating}, weights(runtime))
                elif move == "undo" and head:
                    runtime.undo()
                    head = parent[head]
                elif move == "rollback":
                    head = rng.choice(list(known))
                    runtime.rollback(head)
                in_force, state = known[head]
                assert weights(runtime) == state
                assert {r.reply_id: r.rating for r in runtime.learner.history.ratings()} == in_force


def test_rollback_and_what_counts_after_it(open_tiny):
    with open_tiny() as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "up")
            if i == 1:
                second = weights(runtime)
        assert runtime.rollback(2).ratings == 2
        assert weights(runtime) == second
        assert runtime.rollback(3).ratings == 3
        assert runtime.rollback(0).ratings == 0
        assert runtime.learner.history.version() == 0
        with pytest.raises(NotFound, match="version 9"):
            runtime.rollback(9)


def test_versions_are_never_reused(open_tiny):
    """An undone version keeps its number, so a stale trace cannot pass for a fresh one."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        runtime.undo()
        assert runtime.rate(reply(runtime, seed=2), "up").adapter_version == 2


def test_a_version_in_memory_is_the_one_in_the_store(open_tiny):
    """Undo, rollback and a restart bring back the weights with which replies were written."""
    with open_tiny() as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
        used = runtime.learner.micro
    with open_tiny() as runtime:
        stored = runtime.learner.micro
    for name in ("lora_a", "lora_b", "evidence", "taste"):
        assert (getattr(used, name) == getattr(stored, name)).all()
    assert (stored.gain, stored.trend) == (used.gain, used.trend)

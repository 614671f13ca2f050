"""The deep loop on a tiny model: it anchors, merges and prunes, stops, resumes, and says when it is due."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.lora.merge import HEAD
from ruvmlx.pausing import stop_when
from ruvmlx.sona import background, deep, promotion
from ruvmlx.sona.background import Background
from ruvmlx.sona.optional.ewc import TASKS, penalty

from .pauses import Watch
from .test_bases import promote
from .training_runs import QUICK, answer, rated_runtime, steady, tiny_backend  # noqa: F401 - fixtures


@pytest.fixture
def promoted_runtime(rated_runtime):  # noqa: F811
    """The same ratings, and a base to anchor."""
    promote(rated_runtime)
    return rated_runtime


def test_it_anchors_what_is_liked(promoted_runtime):
    """The anchor is the base in use, its Fisher the mean over the liked replies, each by itself."""
    seen = []
    report = promoted_runtime.learning.loops.deepen(lambda done, total: seen.append((done, total)))
    assert report["anchored"], report
    n, history, anchors = (
        report["examples"],
        promoted_runtime.learner.history,
        promoted_runtime.learner.anchors,
    )
    assert seen == [(i + 1, n) for i in range(n)] and 3 <= n <= 7 and report["anchors"] == 1
    (anchor,) = anchors.load()
    assert anchor.base.to_bytes() == promoted_runtime.learner.base.to_bytes() and anchor.fisher.examples == n
    assert anchor.fisher.squares.keys() == promoted_runtime.learner.base.pairs.keys() - {HEAD}
    assert all(x.all() and np.isfinite(x).all() for pair in anchor.fisher.squares.values() for x in pair)
    assert history.deep.last_run().report == {k: report[k] for k in report if k != "seconds"}
    body = promoted_runtime.store.witness.rows("deep")[-1].body
    assert (
        body["anchored"]
        and body["reason"] == report["reason"]
        and len(promoted_runtime.store.witness.rows("anchor")) == 1
    )


def test_without_a_base_there_is_only_the_memory_to_tidy(rated_runtime):  # noqa: F811
    report = rated_runtime.learning.loops.deepen()
    assert not report["anchored"] and "consolidated" in report["reason"] and "merged" in report
    assert (
        rated_runtime.learner.anchors.load() == []
        and rated_runtime.learner.history.deep.last_run() is not None
    )
    assert rated_runtime.store.witness.rows("deep")[-1].body["reason"] == report["reason"]


def test_too_few_ratings(open_tiny):
    with open_tiny() as runtime:
        report = runtime.learning.loops.deepen()
        assert not report["anchored"] and "at least 10 rated replies" in report["reason"]
        assert runtime.learner.history.deep.last_run() is None and not runtime.learning.is_due()


def test_the_same_task_is_not_anchored_twice(promoted_runtime):
    assert promoted_runtime.learning.loops.deepen()["anchored"]
    report = promoted_runtime.learning.loops.deepen()
    assert not report["anchored"] and "since the last one; there are 0" in report["reason"]
    assert len(promoted_runtime.learner.anchors.load()) == 1


def test_an_undo_takes_the_anchor_back(promoted_runtime):
    assert promoted_runtime.learning.loops.deepen()["anchored"]
    promoted_runtime.rollback(10)
    assert promoted_runtime.learner.anchors.load() == []
    promoted_runtime.rollback(15)
    assert len(promoted_runtime.learner.anchors.load()) == 1


class SetAfter(threading.Event):
    """An event that is set after n queries."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def is_set(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("at", [0, 7, 90, 160])
@pytest.mark.parametrize("restart", [False, True])
def test_stopped_and_resumed_equals_uninterrupted(promoted_runtime, at, restart, monkeypatch):
    """Bit for bit; what was measured is not measured again."""
    loop, loading = promoted_runtime.learning.loops.deep(), []
    task = loop._task(loop._buffer(lambda: loading.append(1)))
    report = promoted_runtime.learning.loops.deepen(cancel=SetAfter(1 + len(loading) + at))
    assert not report["anchored"] and "stopped after" in report["reason"], report
    history, anchors = promoted_runtime.learner.history, promoted_runtime.learner.anchors
    assert anchors.load() == [] and history.deep.last_run() is None
    if restart:
        promoted_runtime.learning.loops.close()
        assert history.deep.measurement() is not None
    assert (
        promoted_runtime.learning.is_due()
        and promoted_runtime.learning.loops.deep().why_due() == "it was stopped"
    )
    seen = []
    assert promoted_runtime.learning.loops.deepen(lambda done, total: seen.append(done))["anchored"]
    assert seen == list(range(len(task.examples) - len(seen) + 1, len(task.examples) + 1))
    if at == 160:
        assert len(seen) < len(task.examples)
    got = anchors.load()[0].fisher.to_bytes()
    assert history.deep.measurement() is None
    promoted_runtime.store.db.execute("DELETE FROM anchors")
    assert promoted_runtime.learning.loops.deepen()["anchored"] and anchors.load()[0].fisher.to_bytes() == got


@pytest.mark.parametrize("restart", [False, True])
def test_stopped_at_every_kind_of_pause(promoted_runtime, restart):
    """Each place in the code that pauses ends the run once, and it goes on: the same Fisher, bit for bit."""
    assert promoted_runtime.learning.loops.deepen()["anchored"]
    anchors = promoted_runtime.learner.anchors
    want = anchors.load()[0].fisher.to_bytes()
    promoted_runtime.store.db.execute("DELETE FROM anchors")
    promoted_runtime.learning.loops.close()
    known: set[str] = set()
    for _ in range(100):
        report = promoted_runtime.learning.loops.deepen(cancel=(cancel := Watch(known)))
        if not cancel.is_set():
            break
        assert not report["anchored"] and anchors.load() == []
        if restart:
            promoted_runtime.learning.loops.close()
    assert report["anchored"] and anchors.load()[0].fisher.to_bytes() == want
    for part in ("replay._examples", "graph._by_blocks", "trainer.squares", "deep._measure"):
        assert any(part in place for place in known), part


def test_a_damaged_measurement_is_done_again(promoted_runtime):
    for junk in (b"junk", b'{"base": 1}\njunk'):
        promoted_runtime.learner.history.deep.put_measurement(junk)
        assert deep.FisherRun.from_bytes(junk, promoted_runtime.learner.anchors.read_importance) is None
    assert promoted_runtime.learning.loops.deepen()["anchored"]


def test_another_base_meanwhile(promoted_runtime, monkeypatch):
    """Nothing is written: what was measured is not what is in use."""
    history, anchors = promoted_runtime.learner.history, promoted_runtime.learner.anchors
    monkeypatch.setattr(promoted_runtime.store.versions, "base_of", lambda *_: 77)
    report = promoted_runtime.learning.loops.deepen()
    assert not report["anchored"] and "meanwhile" in report["reason"]
    assert anchors.load() == [] and history.deep.last_run() is None


def test_what_is_pruned_stays_so_after_a_restart_but_counts(open_tiny):
    """And comes back with a better rating."""
    with open_tiny() as runtime:
        ids = []
        for i in range(24):
            request = GenerationRequest(
                request_id=f"reply-{i}", prompt=("tea?", "0123456789 what?")[i % 2], max_new_tokens=5,
                sampling=Sampling(seed=i), ignore_eos=True,
            )  # fmt: skip
            list(runtime.writer.generate(request))
            runtime.learning.settle()
            ids.append(request.request_id)
            runtime.rate(request.request_id, "up" if i % 2 else "down")
        report = runtime.learning.loops.deepen()
        bank = runtime.learner.rating_index.bank
        pruned = {r for r in ids if not bank.is_placed(r)}
        assert report["pruned"] >= 1 and pruned == set(ids[::2]), report
        counts = bank.counts.copy()
    with open_tiny() as runtime:
        memory = runtime.learner.rating_index
        memory.sync()
        assert {r for r in ids if not memory.bank.is_placed(r)} == pruned
        np.testing.assert_array_equal(memory.bank.counts, counts)
        assert len(runtime.learner.history.ratings()) == 24
        runtime.rate(ids[0], "up")
        assert memory.bank.is_placed(ids[0])
        assert runtime.learning.loops.deepen()["pruned"] == 0  # and what was pruned before is not forgotten
        assert set(runtime.learner.history.deep.pruned_ratings()) == pruned - {ids[0]}
    with open_tiny() as runtime:
        runtime.learner.rating_index.sync()
        assert runtime.learner.rating_index.bank.is_placed(ids[0])


def test_what_is_pruned_follows_from_the_ratings_and_not_from_the_process(open_tiny):
    """Another process rates a pruned entry better and takes this rating back. Lookups then find the entry,
    and skip it again, as after a restart."""
    with open_tiny() as one, open_tiny() as two:
        ids = [answer(one, i) for i in range(10)]
        for reply_id in ids:
            one.rate(reply_id, "down")
        memories = [runtime.learner.rating_index for runtime in (one, two)]
        one.learning.loops.deepen()
        for better in (True, False):
            two.rate(ids[0], "up") if better else one.undo()
            with open_tiny() as again:
                for memory in (*memories, again.learner.rating_index):
                    memory.sync()
                    assert memory.bank.is_placed(ids[0]) == better and not memory.bank.is_placed(ids[1])


def test_due_after_a_week(promoted_runtime, monkeypatch):
    loop, history = promoted_runtime.learning.loops.deep(), promoted_runtime.learner.history
    began = history.first_rating()
    assert loop.why_due(began + deep.WEEK - 1) == ""
    assert loop.why_due(began + deep.WEEK) == "a week has passed"
    promoted_runtime.learning.loops.deepen()
    ended = history.deep.last_run().created
    assert loop.why_due(ended + 9 * deep.WEEK) == ""  # nothing is new
    promoted_runtime.rate(answer(promoted_runtime, 14), "up")
    assert loop.why_due(ended + 1) == "" and loop.why_due(ended + deep.WEEK) == "a week has passed"
    # the clock was months ahead in the last run: before, no run was due for months
    assert loop.why_due(ended - 9 * deep.WEEK) == "a week has passed"


def test_due_where_a_new_task_began(promoted_runtime, monkeypatch):
    """Its replies are not part of the task that is anchored; `consolidate` runs the deep loop first."""
    monkeypatch.setattr(deep, "boundaries", lambda rewards, questions: [9] if len(rewards) > 12 else [])
    assert (
        promoted_runtime.learning.loops.deep().why_due() == "a new task began"
        and promoted_runtime.learning.is_due()
    )
    held = promoted_runtime.learning.consolidate(settings=replace(QUICK, ewc=1.0))["deep"]
    assert held["anchored"] and held["boundary"] == 10, held
    replies = {e.reply_id for e in promoted_runtime.learning.loops.deep()._buffer().train if e.version >= 10}
    assert held["examples"] < 7 and replies
    assert promoted_runtime.learning.loops.deep().why_due() == ""
    assert "deep" not in promoted_runtime.learning.consolidate(settings=QUICK)


def test_without_ewc_nothing_is_anchored_unasked(promoted_runtime, monkeypatch):
    monkeypatch.setattr(deep, "boundaries", lambda rewards, questions: [9])
    held = promoted_runtime.learning.consolidate(settings=replace(QUICK, ewc=0.0))["deep"]
    assert not held["anchored"] and "EWC is off" in held["reason"] and "merged" in held
    assert (
        promoted_runtime.learner.history.deep.last_run() is not None
        and not promoted_runtime.learner.anchors.load()
    )


def test_a_run_is_written_whole_or_not_at_all(promoted_runtime, monkeypatch):
    """The last row of the transaction cannot be written: no anchor, no pruned entries, no log."""
    record = promoted_runtime.store.witness.record

    def failing(kind, body):
        if kind == "deep":
            raise RuntimeError("a test")
        record(kind, body)

    promoted_runtime.learner.history.deep.put_measurement(b"what was stopped")
    monkeypatch.setattr(promoted_runtime.store.witness, "record", failing)
    with pytest.raises(RuntimeError):
        promoted_runtime.learning.loops.deepen()
    history, anchors = promoted_runtime.learner.history, promoted_runtime.learner.anchors
    assert anchors.load() == [] and history.deep.last_run() is None and history.deep.pruned_ratings() == {}
    assert (
        history.deep.measurement() == b"what was stopped"
        and promoted_runtime.store.witness.check().broken is None
    )


def test_the_background_loop_pays_the_penalty(promoted_runtime):
    """Its loss and gradients are those without, plus the penalty and its gradient."""
    promoted_runtime.learning.loops.deepen()
    learner = promoted_runtime.learner
    found = []
    for strength in (0.0, 1e4):
        loop = Background(learner, promoted_runtime.model, replace(QUICK, ewc=strength))
        buffer = deep.Deep(learner, promoted_runtime.model)._buffer()
        training = loop._fresh(buffer)
        for a, b in training.pairs.values():  # away from the anchor
            a += np.float32(0.1)
            b += np.float32(0.1)
        pause = stop_when(None)
        loop._trainer = background.Trainer(promoted_runtime.model, backend=learner.backend)
        loop._anchors = learner.anchors.load() if loop.settings.ewc else []
        loop._accumulate(training, buffer, promotion.PromotionTest(learner, buffer, pause), pause)
        steps = []
        training.update = lambda grads, *_: steps.append(grads)  # noqa: B023 - called at once
        found.append((loop._apply(training, pause), *steps))
        learner.active.install()
    value, grads = penalty(training.base, learner.anchors.load(), 1e4)
    assert value > 0 and found[1][0] - found[0][0] == pytest.approx(value, rel=1e-3)
    for place, pair in grads.items():
        for plain, more, own in zip(found[0][1][place], found[1][1][place], pair, strict=True):
            np.testing.assert_allclose(more - plain, own, rtol=1e-3, atol=1e-3 * np.abs(own).max())


def test_a_stopped_training_does_not_go_on_under_other_anchors(promoted_runtime):
    settings = replace(QUICK, ewc=1.0)
    loop = Background(promoted_runtime.learner, promoted_runtime.model, settings)
    loop.run(cancel=SetAfter(60))
    assert loop.is_paused
    training = loop._paused
    assert loop._resumable_run() is training
    promoted_runtime.learning.loops.deepen()
    loop._paused = training
    assert loop._resumable_run() is None


def test_the_store_keeps_ten_and_merges_the_oldest(promoted_runtime):
    history, anchors, store = (
        promoted_runtime.learner.history,
        promoted_runtime.learner.anchors,
        promoted_runtime.store,
    )
    fisher = _measured_fisher(promoted_runtime)
    for i in range(TASKS + 3):
        assert anchors.end_run(15, promoted_runtime.learner.state.base, fisher, {"reason": str(i)}, {})
        assert len(anchors.load()) == min(TASKS, i + 1)
    oldest, *rest = (a.fisher for a in anchors.load())
    weight = 1 + 0.95 + 0.95**2 + 0.95**3
    place = next(iter(fisher.squares))
    np.testing.assert_allclose(oldest.mean(place)[0], weight * fisher.mean(place)[0], rtol=1e-5)
    assert oldest.examples == 4 * fisher.examples and all(f.examples == fisher.examples for f in rest)
    assert history.deep.last_run().report == {"reason": str(TASKS + 2)}
    assert store.witness.check().broken is None


def _measured_fisher(runtime):
    assert runtime.learning.loops.deepen()["anchored"]
    (anchor,) = runtime.learner.anchors.load()
    runtime.store.db.execute("DELETE FROM anchors")
    return anchor.fisher


def test_those_left_behind_by_an_undo_go_first(promoted_runtime):
    history, fisher = promoted_runtime.learner.history, _measured_fisher(promoted_runtime)
    for version in (15, 15, 14, 14):
        with promoted_runtime.store.transaction():
            promoted_runtime.store.anchors.add(*history._key, version, 1, fisher.to_bytes(), 4, None)
    promoted_runtime.rollback(14)
    with promoted_runtime.store.transaction():
        promoted_runtime.store.anchors.add(*history._key, 14, 1, fisher.to_bytes(), 4, None)
    rows = promoted_runtime.store.db.rows("SELECT version FROM anchors ORDER BY id")
    assert [row["version"] for row in rows] == [14, 14, 14]


def test_an_anchors_base_is_kept(promoted_runtime, monkeypatch):
    """Even when no version stands on it any more whose weights are."""
    assert promoted_runtime.learning.loops.deepen()["anchored"]
    from ruvmlx.store import weights

    monkeypatch.setattr(weights, "KEEP_NEAREST", 2)
    monkeypatch.setattr(weights, "KEEP_NEWEST", 2)
    base = promoted_runtime.learner.base.to_bytes()
    promote(promoted_runtime, seed=4)
    for i in range(14, 19):
        promoted_runtime.rate(answer(promoted_runtime, i), "up" if i % 2 else "down")
    assert promoted_runtime.learner.anchors.load()[0].base.to_bytes() == base
    promoted_runtime.store.adapters.delete(promoted_runtime.model.fingerprint, "default")
    for table in ("anchors", "deep_runs", "pruned"):
        assert promoted_runtime.store.db.value(f"SELECT count(*) FROM {table}") == 0
    # what was measured of the model alone stays
    left = promoted_runtime.store.db.value("SELECT group_concat(name) FROM measurements")
    assert left == "reference/whole"

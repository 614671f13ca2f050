"""Slow replies: what is tried, in which order, what is kept, put back and undone, read from the log."""

import threading

import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import StoreError, UsageError
from ruvmlx.optimizer import monitor as monitor_module
from ruvmlx.optimizer.monitor import JUDGED, LoadWatch
from ruvmlx.optimizer.optimizer import TOKENS_PER_SECOND
from ruvmlx.settings import Settings
from ruvmlx.store.audit import disagreement

from ..test_runtime import say


def write(runtime, i: int, text: str = "name three rivers", best_of: int = 1) -> list[int]:
    """A greedy reply; with best_of, samples that are written together."""
    sampling = Sampling(temperature=float(best_of > 1), seed=i)
    request = GenerationRequest(
        prompt=text, max_new_tokens=20, sampling=sampling, ignore_eos=True, best_of=best_of
    )
    for chunk in runtime.writer.generate(request):
        last = chunk
    return last.response.token_ids


def write_some(runtime, first: int = 0, count: int = JUDGED) -> None:
    for i in range(first, first + count):
        write(runtime, i, f"river {i}")


def rest(runtime) -> list[dict]:
    """Idle time until nothing is due: the reports of the trials."""
    reports = []
    while runtime.optimizer.due_when_idle():
        reports.append(runtime.optimizer.work())
        assert len(reports) < 9
    return reports


def rows(runtime) -> list:
    return runtime.store.witness.rows("optimizer")


def outcomes(runtime) -> list[tuple[str, str, str, str]]:
    return [(r.body["knob"], r.body["before"], r.body["after"], r.body["outcome"]) for r in rows(runtime)]


def test_a_faster_number_of_cores_is_kept_and_the_rest_put_back(open_tiny, speed):
    """25 tokens a second with four cores, 40 with two; guesses do not help. Greedy tokens stay the same."""
    speed.seconds = {4: 0.04, 3: 0.039, 2: 0.025, 1: 0.05}
    with open_tiny() as runtime:
        write_some(runtime)
        assert runtime.optimizer.monitor.speed() == pytest.approx(25, rel=0.06)
        before = write(runtime, 50)
        rest(runtime)
        speculated, tried = outcomes(runtime)
        assert speculated[0] == "speculate" and speculated[3] == "put back"
        assert tried == ("threads", "4", "2", "kept") and speed.threads == 2
        kept = rows(runtime)[1].body
        assert kept["measured_before"] == pytest.approx(25, rel=0.06)
        assert kept["measured_after"] == pytest.approx(40, rel=0.06)
        assert "+60%" in kept["why"] and kept["facts"]["target"] == TOKENS_PER_SECOND
        assert runtime.optimizer.in_force == {"threads": "2"}
        assert write(runtime, 50) == before
        assert runtime.store.witness.check().broken is None and disagreement(runtime.store) == ""
    with open_tiny() as again:  # what was kept is in force from the start
        assert speed.threads == 2 and again.optimizer.in_force == {"threads": "2"}
        assert not again.optimizer.due_when_idle()


def test_guesses_that_help_are_kept(open_tiny, speed):
    """Checks cost nothing: a fixed draft beats the setting that the engine measures."""
    speed.slope = 0.0
    with open_tiny() as runtime:
        before = write(runtime, 50, "a b a b a b a b")
        for i in range(JUDGED):
            write(runtime, i, "a b a b a b a b")
        speed.seconds = dict.fromkeys(range(5), 0.2)
        write_some(runtime)
        rest(runtime)
        assert write(runtime, 50, "a b a b a b a b") == before
        assert [row[0] for row in outcomes(runtime)] == ["speculate", "threads"]


def test_a_kept_value_that_slows_replies_is_undone(open_tiny, speed):
    speed.seconds = {4: 0.04, 2: 0.025}
    with open_tiny() as runtime:
        write_some(runtime)
        rest(runtime)
        kept = rows(runtime)[-1]
        assert kept.body["outcome"] == "kept" and speed.threads == 2
        speed.seconds[2] = 0.08  # the machine changed
        write_some(runtime, 20, 2 * JUDGED)
        undone = rows(runtime)[-1].body
        assert (undone["knob"], undone["before"], undone["after"]) == ("threads", "2", "4")
        assert undone["outcome"] == "undone" and undone["undoes"] == kept.seq
        assert undone["measured_after"] < 0.9 * undone["measured_before"]
        assert speed.threads == 4 and runtime.optimizer.in_force == {}
        assert disagreement(runtime.store) == ""


@pytest.mark.parametrize("mode", ["watch", "off"])
def test_the_setting_only_watches_or_does_nothing(open_tiny, speed, mode):
    speed.seconds = {4: 0.04, 2: 0.025}
    with open_tiny(optimizer=mode) as runtime:
        write_some(runtime)
        rest(runtime)
        assert [row[3] for row in outcomes(runtime)] == ["watched"] * 2 * (mode == "watch")
        assert speed.threads == 4 and runtime.optimizer.in_force == {}
    with open_tiny() as acting:  # switched on, it tries what it only watched
        assert [knob["knob"] for knob in rest(acting)] == ["speculate", "threads"]
        assert acting.optimizer.in_force == {"threads": "2"}


def test_a_wrong_setting_is_refused():
    with pytest.raises(UsageError, match="optimizer"):
        Settings(optimizer="sometimes")


@pytest.mark.parametrize(
    "settings,left",
    [({"speculate": "off"}, ["threads"]), ({"threads": 4}, ["speculate"])],
)
def test_a_setting_overrides_its_knob(open_tiny, speed, settings, left):
    with open_tiny(**settings) as runtime:
        write_some(runtime)
        assert [report["knob"] for report in rest(runtime)] == left


def test_nothing_is_tried_for_another_reason_to_be_slow(open_tiny, speed, monkeypatch):
    """Fast replies, too few replies, other programs, memory pressure."""
    with open_tiny() as runtime:
        write_some(runtime, count=JUDGED - 1)
        assert not runtime.optimizer.due_when_idle()
        monkeypatch.setattr(LoadWatch, "others", lambda self: 1.0)
        write_some(runtime)
        assert not runtime.optimizer.due_when_idle()
        monkeypatch.setattr(LoadWatch, "others", lambda self: 0.0)
        monkeypatch.setattr(monitor_module, "HIGH", 0.05)
        assert not runtime.optimizer.due_when_idle()
        monkeypatch.undo()


def test_fast_replies_need_no_trial(open_tiny, speed):
    speed.seconds = dict.fromkeys(range(5), 0.005)
    with open_tiny() as runtime:
        write_some(runtime)
        assert runtime.optimizer.monitor.speed() > TOKENS_PER_SECOND
        assert not runtime.optimizer.due_when_idle()


def test_a_trial_can_be_stopped_and_changes_nothing_then(open_tiny, speed):
    with open_tiny() as runtime:
        write_some(runtime)
        cancel = threading.Event()
        cancel.set()
        report = runtime.optimizer.work(cancel)
        assert report["outcome"] == "none" and "stopped" in report["reason"]
        assert rows(runtime) == [] and speed.threads == 4 and runtime.optimizer.due_when_idle()


def test_memory_pressure_waits(open_tiny, speed, tiny_backend, monkeypatch):
    with open_tiny() as runtime:
        write_some(runtime)
        monkeypatch.setattr(tiny_backend.pool, "pressure", lambda: 0.85)
        assert runtime.optimizer.work()["reason"] == "memory is short" and rows(runtime) == []


def test_it_tries_again_only_when_replies_became_slower(open_tiny, speed):
    with open_tiny() as runtime:
        write_some(runtime)
        assert len(rest(runtime)) == 2
        write_some(runtime, 20)
        assert not runtime.optimizer.due_when_idle()
        speed.seconds = {4: 0.08}
        write_some(runtime, 40)
        assert runtime.optimizer.due_when_idle()


def test_a_batch_that_only_slows_its_replies_is_limited(open_tiny, speed):
    """From four replies on, more at a time write no more tokens together."""
    speed.seconds = {4: 0.03}
    with open_tiny() as runtime:
        for i in range(JUDGED):
            write(runtime, i, best_of=8)
        assert runtime.optimizer.monitor.shared_speed() < TOKENS_PER_SECOND
        reports = rest(runtime)
        assert [report["knob"] for report in reports] == ["batch"]
        assert outcomes(runtime) == [("batch", "64", "4", "kept")]
        body = rows(runtime)[0].body
        assert body["measured_after"] == pytest.approx(16 * body["measured_before"], rel=0.1)
        assert runtime.writer.scheduler.width == 4


def test_a_batch_that_gains_is_left_alone(open_tiny, speed):
    speed.seconds, speed.wide = {4: 0.03}, 1000
    with open_tiny() as runtime:
        for i in range(JUDGED):
            write(runtime, i, best_of=8)
        rest(runtime)
        assert outcomes(runtime) == [("batch", "64", "64", "put back")]
        assert runtime.writer.scheduler.width == 64


def test_a_full_disk_does_not_make_a_stored_reply_a_failure(open_tiny, monkeypatch):
    """The disk can fill after the commit of the reply."""
    with open_tiny() as runtime:

        def fail(*_):
            raise StoreError("the disk is full.")

        chat = runtime.chats.new_chat()
        with monkeypatch.context() as patch:
            patch.setattr(runtime.optimizer._levels, "record", fail)
            assert say(runtime, chat, "hello").text
        assert len(runtime.chats.turns(chat)) == 2


def test_a_changed_tuning_disagrees_with_the_log(open_tiny, speed):
    speed.seconds = {4: 0.04, 2: 0.025}
    with open_tiny() as runtime:
        write_some(runtime)
        rest(runtime)
        runtime.store.db.execute("UPDATE tunings SET value = '3' WHERE knob = 'threads'")
        assert (
            disagreement(runtime.store)
            == "the tuning 'threads' of the native backend is not what was written"
        )


def test_a_tuning_of_another_machine_is_not_used(open_tiny, speed, tiny_backend, monkeypatch):
    speed.seconds = {4: 0.04, 2: 0.025}
    with open_tiny() as runtime:
        write_some(runtime)
        rest(runtime)
    monkeypatch.setattr(tiny_backend, "kernels", "native other, 4 threads")
    with open_tiny() as elsewhere:
        assert elsewhere.optimizer.in_force == {} and speed.threads == 4

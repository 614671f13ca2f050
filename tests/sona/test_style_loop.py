"""The style loop on a tiny model: it moves the base, within the limits, as the ratings in force ask for."""

import errno
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.kernels.rating import Rule
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.sona import faults, instant, taste_push
from ruvmlx.sona.adapter_history import ATTEMPTS, STYLE_DUE
from ruvmlx.sona.instant import KL_CAP
from ruvmlx.sona.optional import style_bank, style_file, style_loop, style_scale, style_source
from ruvmlx.sona.optional.style_basis import MODULE, RANK, StyleBasis, sum_of_bases, trained_part
from ruvmlx.sona.optional.style_choice import DOUBT
from ruvmlx.sona.optional.style_file import StyleFiles
from ruvmlx.sona.optional.style_scale import NEXT_GROWTH
from ruvmlx.sona.optional.style_source import BasisSource
from ruvmlx.sona.slow_loops import AUTO, STYLE, TRAINING, loop_of_setting
from ruvmlx.sona.taste import TasteModel
from ruvmlx.sona.taste_fit import M
from ruvmlx.store import HeadMoved

from .training_runs import answer

PREDICT_GAIN = TasteModel.predict_gain


@pytest.fixture
def basis(tiny) -> StyleBasis:
    """Random directions, each of which is said to move its own measure."""
    rng, c = np.random.default_rng(3), tiny.config
    lora_a = rng.normal(0, c.intermediate_size**-0.5, (c.n_layers, c.intermediate_size, RANK))
    directions = rng.normal(0, 0.03, (M, c.n_layers, RANK, c.hidden_size))
    both = (x.astype(np.float32) for x in (lora_a, directions))
    return StyleBasis(*both, 0.01 * np.eye(M), 0.3 * np.eye(M), tuple(range(c.n_layers)))


@pytest.fixture
def rated_runtime(open_tiny, tiny, basis, monkeypatch):
    """A runtime with 12 ratings of two replies to a question: one is always liked, the other never. The
    instant loop hardly moves the weights, and the taste pushes no token, so they stay the same two replies.
    Samples of replies are short, and their variety does not count, because it is that of a random model."""

    slow = [replace(push, step=0.01 * push.step) for push in (instant.RULE.tokens, instant.RULE.along)]
    monkeypatch.setattr(instant, "RULE", Rule(*slow, instant.RULE.cap))
    monkeypatch.setattr(taste_push, "FIRST_END", 99)
    monkeypatch.setattr(faults, "MAX_REPLY_TOKENS", 6)
    monkeypatch.setattr(faults, "MIN_VARIETY", 0.0)
    monkeypatch.setattr(style_scale, "VARIETY_LOSS", 1.0)
    monkeypatch.setattr(faults, "questions", lambda: ("Why?", "How do bees fly?"))
    # a random model writes in random scripts, and random directions please nobody
    monkeypatch.setattr(faults, "is_foreign", lambda *_: False)
    monkeypatch.setattr(TasteModel, "predict_gain", lambda *_: (1.0, 0.0))
    StyleFiles(tiny.fingerprint).put_basis(basis)
    with open_tiny(slow_loop="style") as runtime:
        for i in range(12):
            rate(runtime, i)
        yield runtime


def test_auto_is_the_style_loop_where_a_basis_is_there(open_tiny, tiny, basis):
    assert loop_of_setting(AUTO, tiny.fingerprint) == TRAINING
    with open_tiny() as runtime:
        assert "loop" not in runtime.learning.consolidate()
    StyleFiles(tiny.fingerprint).put_basis(basis)
    assert loop_of_setting(AUTO, tiny.fingerprint) == STYLE
    assert loop_of_setting(TRAINING, tiny.fingerprint) == TRAINING
    with open_tiny() as runtime:
        assert runtime.learning.consolidate()["reason"] == "a style needs 10 rated replies; there are 0"


def rate(runtime, i):
    runtime.rate(answer(runtime, i), "up" if i % 2 else "down")


def style_of(runtime) -> dict:
    """The last columns of each pair of the base in use."""
    base = runtime.learner.base
    return {layer: b[-RANK:].copy() for (module, layer), (_, b) in base.pairs.items() if module == MODULE}


def test_ratings_move_the_base_within_the_limits(rated_runtime):
    assert rated_runtime.learning.is_due()
    report = rated_runtime.learning.consolidate()
    assert report["promoted"], report
    status = rated_runtime.status()
    assert 0 < status.kl <= KL_CAP and status.kl == pytest.approx(report["kl"])
    assert report["ppl_change"] <= np.expm1(style_scale.RISE) + 1e-6
    assert rated_runtime.backend.lora is rated_runtime.learner.base and set(
        rated_runtime.learner.base.pairs
    ) == {(MODULE, layer) for layer in range(rated_runtime.model.config.n_layers)}
    assert not rated_runtime.learning.is_due() and rated_runtime.learning.state().missing == STYLE_DUE


def test_the_same_ratings_give_the_same_base(rated_runtime):
    """It is a function of the ratings in force: going back and running again ends at the same weights."""
    assert rated_runtime.learning.consolidate()["promoted"]
    first = rated_runtime.learner.base.to_bytes()
    rated_runtime.rollback(12)
    rated_runtime.learner.sync()
    assert rated_runtime.backend.lora is None
    assert rated_runtime.learning.consolidate()["promoted"]
    assert rated_runtime.learner.base.to_bytes() == first


def test_the_next_step_begins_near_the_style_in_use(rated_runtime, monkeypatch):
    """So it measures one base as a whole, and searches no KL. The report that the store keeps says where."""
    first = rated_runtime.learning.consolidate()
    assert first["promoted"] and rated_runtime.status().last.report["used"] == first["used"]
    for i in range(12, 12 + STYLE_DUE):
        rate(rated_runtime, i)
    counts = count_measurements(rated_runtime.learner, monkeypatch)
    second = rated_runtime.learning.consolidate()
    assert second["promoted"] and counts == {"probe": 1, "replies": 1}
    growth = (second["used"]["predicted"] / first["used"]["predicted"]) ** 0.5
    assert growth * 1.0001 >= 1 / NEXT_GROWTH and growth <= NEXT_GROWTH * 1.0001


def test_replies_without_a_style_are_used_for_twenty_ratings(rated_runtime, monkeypatch):
    """A step uses the replies without a style again for twenty ratings. After an undo of these ratings, the
    next step writes new replies."""
    counts = count_measurements(rated_runtime.learner, monkeypatch)
    written = []
    for step in range(5):
        if step:
            for i in range(2 + STYLE_DUE * step, 2 + STYLE_DUE * (step + 1)):
                rate(rated_runtime, i)
        counts.clear()
        assert rated_runtime.learning.consolidate()["promoted"]
        written.append(counts["replies"])
    assert written == [3, 1, 1, 2, 1]  # the first step writes the original model's replies, too
    counts.clear()
    rated_runtime.rollback(32)
    assert rated_runtime.learning.consolidate()["promoted"] and counts["replies"] == 2


def test_a_refused_style_is_no_start(rated_runtime, monkeypatch):
    """The next step begins near the last style that was used."""
    used = rated_runtime.learning.consolidate()["used"]
    for refused in (True, False):
        monkeypatch.setattr(TasteModel, "predict_gain", lambda *_, no=refused: (-1.0 if no else 1.0, 0.0))
        counts = count_measurements(rated_runtime.learner, monkeypatch)
        report = rated_runtime.learning.consolidate()
        assert (report["used"] == used) == refused and counts == {"probe": 1, "replies": 1}
        assert bool(rated_runtime.learner.base.pairs) != refused


def test_a_trained_base_stays_whole_after_styles_were_refused(rated_runtime, monkeypatch):
    trained = promote_trained_base(rated_runtime)
    assert rated_runtime.learning.consolidate()["promoted"]
    monkeypatch.setattr(TasteModel, "predict_gain", lambda *_: (-1.0, 0.0))
    for _ in range(2):
        rated_runtime.learning.consolidate()
        assert {place: a.shape for place, (a, _) in rated_runtime.learner.base.pairs.items()} == {
            place: a.shape for place, (a, _) in trained.pairs.items()
        }


def test_undo_gives_back_the_base_before(rated_runtime):
    assert rated_runtime.learning.consolidate()["promoted"]
    first = rated_runtime.learner.base.to_bytes()
    for i in range(12, 12 + STYLE_DUE):
        rate(rated_runtime, i)
    rated_runtime.learning.consolidate()
    rated_runtime.undo()  # the newest rating, and what followed from it
    rated_runtime.learner.sync()
    assert rated_runtime.learner.base.to_bytes() == first
    for _ in range(STYLE_DUE):
        rated_runtime.undo()
    rated_runtime.learner.sync()
    assert rated_runtime.backend.lora is None


def test_more_faults_shrink_the_step_and_then_refuse_it(rated_runtime, monkeypatch):
    monkeypatch.setattr(faults, "MIN_VARIETY", 2.0)
    monkeypatch.setattr(faults, "is_foreign", lambda *_: False)
    tried = record_candidates(monkeypatch)
    report = rated_runtime.learning.consolidate()
    assert not report["promoted"] and "less variety" in report["reason"]
    shares = [one.scale / tried[0].scale for one in tried]
    assert shares == pytest.approx(style_scale.STEPS)
    assert rated_runtime.backend.lora is None and rated_runtime.status().adapter_version == 12
    assert (
        rated_runtime.status().last.report["reason"] == report["reason"]
        and not rated_runtime.learning.is_due()
    )


@pytest.mark.parametrize("has_trained_base", [False, True])
def test_a_smaller_step_is_measured_before_its_use(rated_runtime, monkeypatch, has_trained_base):
    """The replies with a smaller step need no measurement, unless the base LoRA has another part below it."""
    if has_trained_base:
        promote_trained_base(rated_runtime)
    tried = record_candidates(monkeypatch)
    monkeypatch.setattr(style_loop.StyleLoop, "_worse", lambda *_: ("bad" * (len(tried) < 3), 0.0))
    counts = count_measurements(rated_runtime.learner, monkeypatch)
    assert rated_runtime.learning.consolidate()["promoted"]
    first, second, third = (one.ground.probe.floor for one in tried)
    used = rated_runtime.learner.probe.floor
    assert used == pytest.approx(third, rel=0.5) and first > second > third > 0
    assert (third == pytest.approx(style_scale.STEPS[2] ** 2 * first, rel=1e-6)) == (not has_trained_base)
    assert counts["probe"] == (4 if has_trained_base else 2)


@pytest.mark.parametrize(("second", "share"), [("good", 0.8), ("worse", 1.0), ("unclear", 1.0)])
def test_replies_of_less_variety_lead_to_a_smaller_style(rated_runtime, monkeypatch, second, share):
    """If the smaller style has faults or no clear gain, the larger style stays."""
    monkeypatch.setattr(style_scale, "VARIETY_LOSS", 0.05)
    tried = record_candidates(monkeypatch)

    def worse(*_):
        return ("bad" * (second == "worse" and len(tried) > 1), 0.0625 if len(tried) == 1 else 0.04)

    def gain(*_):
        return (0.0, 1.0) if len(tried) > 1 and second == "unclear" else (1.0, 0.0)

    monkeypatch.setattr(style_loop.StyleLoop, "_worse", worse)
    monkeypatch.setattr(TasteModel, "predict_gain", gain)
    report = rated_runtime.learning.consolidate()
    assert report["promoted"] and report["share"] == pytest.approx(share)
    assert report["scale"] == pytest.approx(share * tried[0].scale) and report["gain"] == 1.0


@pytest.mark.parametrize("pleases", [True, False])
def test_a_style_whose_replies_please_less_is_not_used(rated_runtime, monkeypatch, pleases):
    """The taste model judges replies to questions that no user rated."""
    monkeypatch.setattr(TasteModel, "predict_gain", PREDICT_GAIN)
    backend, tokenizer = rated_runtime.backend, rated_runtime.model.tokenizer
    rated = sorted((rated_runtime.store.replies.get(f"reply-{i}").text, i % 2) for i in range(2))
    texts = {bool(is_liked): tokenizer.encode(text, add_bos=False) for text, is_liked in rated}

    def sample(model, backend, adapter, pause):
        has_style = backend.lora is not None and bool(backend.lora.pairs)
        return [(texts[has_style == pleases], True)] * len(faults.questions())

    monkeypatch.setattr(faults, "sample", sample)
    report = rated_runtime.learning.consolidate()
    assert report["promoted"] == pleases and (report["gain"] > DOUBT * report["gain_deviation"]) == pleases
    if not pleases:
        assert report["reason"].endswith("would please you more") and report["share"] == style_scale.STEPS[0]
    assert (backend.lora is not None) == pleases


def test_a_refused_style_keeps_the_stopped_run_of_the_background_loop(rated_runtime, monkeypatch):
    rated_runtime.learner.history.put_training(b"a run")
    monkeypatch.setattr(faults, "MIN_VARIETY", 2.0)
    assert not rated_runtime.learning.consolidate()["promoted"]
    assert rated_runtime.learner.history.training() == b"a run"


def test_ratings_without_a_style_take_the_old_one_back(rated_runtime):
    assert rated_runtime.learning.consolidate()["promoted"]
    learner = rated_runtime.learner
    assert any(b.any() for b in style_of(rated_runtime).values())
    for i in range(12):  # the same two replies, rated without any rule
        rated_runtime.rate(f"reply-{i}", "up" if i % 4 < 2 else "down")
    report = rated_runtime.learning.consolidate()
    assert "do not agree" in report["reason"], report
    assert not learner.base.pairs and rated_runtime.status().kl <= KL_CAP


def test_it_stops_and_goes_on(rated_runtime):
    cancel = threading.Event()
    cancel.set()
    report = rated_runtime.learning.consolidate(cancel=cancel)
    assert not report["promoted"] and "stopped" in report["reason"]
    assert rated_runtime.learning.is_due() and rated_runtime.backend.lora is None
    assert rated_runtime.learning.consolidate()["promoted"]


def test_a_step_that_is_stopped_in_each_part_measures_nothing_twice(rated_runtime, monkeypatch):
    """A user who writes again stops the step. Each run goes on where the last one stopped."""
    rated_runtime.learning.consolidate()  # writes the original model's replies, once for all steps
    rated_runtime.rollback(12)
    measured = count_measurements(rated_runtime.learner, monkeypatch)
    parts = []
    assert rated_runtime.learning.consolidate(lambda done, total, _: parts.append((done, total)))["promoted"]
    assert parts[0] == (0, style_loop.PARTS) and parts[-1][0] > style_scale.TRIES and parts == sorted(parts)
    first, once = rated_runtime.learner.base.to_bytes(), measured.copy()
    rated_runtime.rollback(12)
    measured.clear()
    for stop_at, _ in parts:
        cancel = threading.Event()

        def stop(done, total, _, at=stop_at, cancel=cancel):
            if done == at:
                cancel.set()

        assert not rated_runtime.learning.consolidate(stop, cancel)["promoted"]
    assert rated_runtime.learning.consolidate()["promoted"]
    assert rated_runtime.learner.base.to_bytes() == first
    assert measured == once


def test_the_original_model_writes_its_replies_once(rated_runtime, monkeypatch):
    """Other questions, or damaged data, need new replies."""
    model, backend, store = rated_runtime.model, rated_runtime.backend, rated_runtime.store
    assert rated_runtime.learning.consolidate()["promoted"]
    base, counts = backend.lora, count_measurements(rated_runtime.learner, monkeypatch)

    def sample():
        counts.clear()
        return faults.FaultBaseline(store, model.fingerprint).sample(model, backend, lambda: None)

    first = sample()
    assert not counts and first == sample()
    store.checkpoints.put_measurement(model.fingerprint, "replies/untouched", b'{"about": []')
    assert sample() == first and counts == {"replies": 1}
    monkeypatch.setattr(faults, "questions", lambda: ("How?",))
    assert len(sample()) == 1 and counts == {"replies": 1}
    assert backend.lora is base is not None


def record_candidates(monkeypatch) -> list:
    """Return a list that gets each candidate with a style whose replies are written."""
    tried, write = [], style_loop.StyleLoop._replies

    def write_and_record(self, candidate, pause):
        if candidate.scale:
            tried.append(candidate)
        return write(self, candidate, pause)

    monkeypatch.setattr(style_loop.StyleLoop, "_replies", write_and_record)
    return tried


def count_measurements(learner, monkeypatch) -> Counter:
    """Return a counter of the measurements that ended."""
    counts = Counter()

    def with_counter(name, measure):
        def measure_and_count(*arguments):
            result = measure(*arguments)
            counts[name] += 1
            return result

        return measure_and_count

    monkeypatch.setattr(learner.active, "probe_base", with_counter("probe", learner.active.probe_base))
    monkeypatch.setattr(learner.active, "kl_of_base", with_counter("KL", learner.active.kl_of_base))
    monkeypatch.setattr(faults, "sample", with_counter("replies", faults.sample))
    return counts


def test_it_ends_while_ratings_keep_coming(rated_runtime, monkeypatch):
    attempts = []

    def head_moved(*args):
        attempts.append(1)
        raise HeadMoved

    with monkeypatch.context() as moving:
        moving.setattr(style_loop.StyleLoop, "_step", head_moved)
        report = rated_runtime.learning.consolidate()
    assert not report["promoted"] and "stopped" in report["reason"] and len(attempts) == ATTEMPTS
    assert rated_runtime.learning.is_due() and rated_runtime.learning.consolidate()["promoted"]


def promote_trained_base(rated_runtime) -> BaseLoRA:
    rng, config = np.random.default_rng(5), rated_runtime.model.config
    shapes = {(MODULE, 0): (config.intermediate_size, config.hidden_size)}
    shapes |= {("q_proj", 1): (config.hidden_size, config.n_heads * config.head_dim)}
    trained = BaseLoRA(
        {
            place: (
                rng.normal(0, 0.002, (i, 3)).astype(np.float32),
                rng.normal(0, 0.002, (3, o)).astype(np.float32),
            )
            for place, (i, o) in shapes.items()
        },
        2.0,
    )
    history, state = rated_runtime.learner.history, rated_runtime.learner.history.adapter(12)
    history.promote(12, trained, state.state, 0.0, state.norm, {"promoted": True, "reason": "a test"})
    return trained


def test_a_trained_base_stays_under_the_style(rated_runtime):
    trained = promote_trained_base(rated_runtime)
    report = rated_runtime.learning.consolidate()
    assert report["promoted"], report
    under = rated_runtime.learning.loops.style()._trained_base
    assert set(under.pairs) == set(trained.pairs)
    for place, (a, b) in under.pairs.items():
        before = trained.pairs[place]
        assert under.scale * (a @ b) == pytest.approx(trained.scale * (before[0] @ before[1]), abs=1e-9)


def test_the_parts_of_a_combined_base_add_up(basis):
    style = basis.lora(np.ones(M))
    assert sum_of_bases(None, style) is style and trained_part(style) is None
    trained = BaseLoRA({place: (a[:, :1] + 1, b[:1] - 1) for place, (a, b) in style.pairs.items()}, 3.0)
    both = sum_of_bases(trained, style)
    for place, (a, b) in both.pairs.items():
        parts = [lora.scale * (x @ y) for lora in (trained, style) for x, y in [lora.pairs[place]]]
        assert a @ b == pytest.approx(sum(parts), abs=1e-4)


def test_a_missing_basis_is_computed_in_pieces_and_kept(open_tiny, tiny, monkeypatch):
    """Two questions stand for all; a stop keeps what is done in a file, and the next run goes on from it."""
    for name, value in {"REPLIES": 3, "MAX_REPLY_TOKENS": 5}.items():
        monkeypatch.setattr(style_bank, name, value)
    given = {"style_questions": ["What is a pond?", "How?"], "style_prose": ["A plain text."]}
    monkeypatch.setattr(style_source, "texts", given.__getitem__)
    files = StyleFiles(tiny.fingerprint)
    with open_tiny(slow_loop="style") as runtime:
        for i in range(12):
            rate(runtime, i)
        cancel, seen = threading.Event(), []

        def progress(done, total, _):
            seen.append((done, total))
            if len(seen) == 4:
                cancel.set()

        assert "stopped" in runtime.learning.consolidate(progress, cancel)["reason"]
        assert files.bank().replies and files.basis() is None
        source = BasisSource(runtime.learner, runtime.model)
        found = source.basis(lambda *_: None, lambda: None)
        assert files.basis() is not None and not files.bank().replies
        assert found.directions.shape == (M, tiny.config.n_layers, RANK, tiny.config.hidden_size)


def test_a_full_disk_does_not_end_the_computation_of_a_basis(open_tiny, tiny, monkeypatch):
    """The process goes on with the basis in memory."""
    for name, value in {"REPLIES": 3, "MAX_REPLY_TOKENS": 5}.items():
        monkeypatch.setattr(style_bank, name, value)
    given = {"style_questions": ["What is a pond?", "How?"], "style_prose": ["A plain text."]}
    monkeypatch.setattr(style_source, "texts", given.__getitem__)
    monkeypatch.setattr(style_source, "SAVE_EVERY", 0.0)

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(style_file, "replacing", fail)
    with open_tiny(slow_loop="style") as runtime:
        source = BasisSource(runtime.learner, runtime.model)
        found = source.basis(lambda *_: None, lambda: None)
        assert found is source.basis(lambda *_: None, lambda: None)
        assert not StyleFiles(tiny.fingerprint).has_basis


def test_a_bank_that_a_killed_run_left_is_removed(tiny, basis, monkeypatch):
    """A kill after the basis was written left the bank beside it for good."""
    files = StyleFiles(tiny.fingerprint)
    files.put_bank(style_bank.StyleBank([(0, [1, 2], True)]))
    with monkeypatch.context() as killed:
        killed.setattr(style_file, "remove", lambda path: None)
        files.put_basis(basis)
    assert files.bank().replies
    assert files.basis() is not None and not files.bank().replies

"""A model that was never measured answers at once; what ratings need of it is measured afterwards."""

import contextlib

import numpy as np
import pytest

from ruvmlx import progress
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine.types import GenerationRequest
from ruvmlx.models.load import load_model
from ruvmlx.pausing import Stopped
from ruvmlx.progress import QUIET, Watch
from ruvmlx.runtime import Runtime
from ruvmlx.sampling import Sampling
from ruvmlx.settings import Settings
from ruvmlx.sona import calibration, embedding, reference_text
from ruvmlx.sona.active_adapter import is_blank
from ruvmlx.sona.calibration import Measured, Measurement
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model


class ShownLines(Watch):
    def __init__(self):
        self.lines = []

    def progress(self, progress):
        self.lines.append(progress.line)


@pytest.fixture
def new_model(tmp_path):
    """A model whose fingerprint no store knows."""
    return load_model(str(make_safetensors_model(tmp_path / "new", seed=11)))


@pytest.fixture
def open_new(new_model, home):
    """Opens a runtime on the new model; call it again for another process."""

    def open_it(**settings):
        chosen = Settings(kv_disk=None, **settings)
        return Runtime(Store(home / "ruvmlx.db"), new_model, NativeBackend(new_model, threads=1), chosen)

    return open_it


def reply(runtime, question="name a river", untouched=False):
    request = GenerationRequest(
        prompt=question, sampling=Sampling(0.8, seed=3), max_new_tokens=12, untouched=untouched
    )
    return list(runtime.writer.generate(request))[-1].response


@pytest.fixture
def readings(monkeypatch):
    """The texts that models read to be measured, in order."""
    read, seen = reference_text.encode_pair, []
    monkeypatch.setattr(
        reference_text,
        "encode_pair",
        lambda tokenizer, *text: seen.append(text[:2]) or read(tokenizer, *text),
    )
    monkeypatch.setattr(
        embedding.ReadQuestions, "read", _noting_read(embedding.ReadQuestions.read, seen)
    )  # fmt: skip
    return seen


def _noting_read(read, seen):
    def noting(*args):
        seen.append("questions")
        return read(*args)

    return noting


def test_the_first_reply_measures_nothing(open_new, readings):
    """Opening, the first reply, the end of a one-shot command and the second start read no reference text."""
    with open_new() as runtime:
        reply(runtime)
        runtime.learning.settle()
    with open_new() as runtime:
        reply(runtime)
    assert readings == []


def test_the_first_rating_waits_says_so_and_is_taken_back_exactly(open_new):
    """It measures with a line of progress, changes the weights, and undo makes them bit for bit what they
    were: zero, with the directions that were measured."""
    with open_new() as runtime:
        first = reply(runtime)
        shown = ShownLines()
        result = runtime.rate(first.request_id, "up", watch=shown)
        assert result.applied and result.logprob_after > result.logprob_before
        assert any("Getting to know the model, once" in line for line in shown.lines)
        runtime.undo()
        runtime.learner.sync()
        assert runtime.learner.version == 0 and not runtime.learner.micro.lora_b.any()
        assert not is_blank(runtime.learner.micro)


def test_a_rating_moves_the_same_weights_as_if_the_model_had_been_measured_before(open_new, home):
    """Three ways to one rating: measured first, measured at the rating, and rated by another process. The
    reply is recomputed from its hidden states, or read again, so they agree within rounding."""
    with open_new() as runtime:
        runtime.learner.active.measure()
        before = reply(runtime)
        runtime.rate(before.request_id, "up")
        want = runtime.learner.micro.lora_b.copy()
        data = runtime.store.model_data
        (known,) = data._db.rows("SELECT fingerprint FROM neutral")
        runtime.undo()
    for same_process in (True, False):
        with open_new() as runtime, runtime.store.transaction():
            runtime.store.model_data._db.execute(
                "DELETE FROM neutral WHERE fingerprint = ?", known["fingerprint"]
            )
        with open_new() as runtime:
            assert not runtime.learner.active.is_measured
            again = reply(runtime)
            assert again.token_ids == before.token_ids
            if same_process:
                runtime.rate(again.request_id, "up")
                got = runtime.learner.micro.lora_b.copy()
        if not same_process:
            with open_new() as runtime:
                runtime.rate("last", "up")
                got = runtime.learner.micro.lora_b.copy()
        np.testing.assert_allclose(got, want, atol=2e-4 * abs(want).max())
        with open_new() as runtime:
            runtime.undo()


def test_idle_time_measures_and_an_untouched_reply_can_be_rated_then(open_new):
    """`settle` with a watch measures; both kinds of replies from before get their statistics."""
    with open_new() as runtime:
        ids = [reply(runtime, untouched=untouched).request_id for untouched in (False, True)]
        runtime.learning.settle(watch=QUIET)
        assert runtime.learner.active.is_measured
        assert all(runtime.learner.traces.held[id_].stats is not None for id_ in ids)
        assert runtime.rate(ids[1], "down").applied


def test_a_stopped_measurement_goes_on_where_it_was(new_model):
    """Stopped again and again, it still ends, reads each text once, and finds the same to the bit."""
    backend = NativeBackend(new_model, threads=1)
    whole = Measurement(Measured.of(new_model, backend, 2)).run(lambda: None)
    stopping, calls, stops = Measurement(Measured.of(new_model, backend, 2)), 0, 0

    def pause():
        nonlocal calls
        calls += 1
        if calls % 31 == 0:
            raise Stopped

    while True:
        try:
            found = stopping.run(pause)
            break
        except Stopped:
            stops += 1
            assert stops < 1000
    assert stops >= 2
    for name in ("contexts", "directions", "tokens", "precision", "features", "drift"):
        assert np.array_equal(getattr(whole, name), getattr(found, name)), name


@pytest.mark.parametrize("hurried", [False, True])
def test_a_measurement_that_stops_after_every_step_ends(new_model, monkeypatch, hurried):
    """A pause that lets each call do one step loses none: the result is the same to the bit."""
    monkeypatch.setattr(calibration, "HURRY", np.inf)
    backend = NativeBackend(new_model, threads=1)
    whole = Measurement(Measured.of(new_model, backend, 2)).run(lambda: None)
    stopping, found, slices = Measurement(Measured.of(new_model, backend, 2)), None, 0
    while found is None:
        slices += 1
        assert slices < 3000
        calls = iter([None])  # of the slice that begins: the first call returns, the second one stops

        def pause(calls=calls):
            if next(calls, Stopped) is Stopped:
                raise Stopped

        with contextlib.suppress(Stopped):
            found = stopping.run(pause, is_hurried=hurried)
    for name in ("contexts", "directions", "tokens", "precision", "features", "drift"):
        assert np.array_equal(getattr(whole, name), getattr(found, name)), name


def test_a_large_slow_model_reads_fewer_texts_and_says_so(new_model, monkeypatch):
    """Over SMALL parameters the time is bounded: once it is spent, a few texts of each kind are enough, the
    progress says how many, and the probe under a base reads the same ones."""
    monkeypatch.setattr(calibration, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "TICK", 1e9)  # seconds: the machine may be fast
    backend, shown = NativeBackend(new_model, threads=1), ShownLines()
    large = Measured(backend, new_model.tokenizer, 2, new_model.shape.max_context, calibration.SMALL)
    probe = Measurement(large).run(watch=shown)
    total = len(reference_text.texts())
    assert 2 * calibration.MIN_TEXTS_OF_KIND == len(probe.read_texts) < total
    assert {bool(reference_text.texts()[i][0]) for i in probe.read_texts} == {True, False}
    assert any(f"{len(probe.read_texts)} of {total} texts" in line for line in shown.lines)
    assert Measurement(Measured(backend, new_model.tokenizer, 2, 512, 1)).run().read_texts.size == total


@pytest.mark.parametrize("waits", [True, False])
def test_a_small_slow_model_reads_fewer_texts_only_while_a_rating_waits(open_new, monkeypatch, waits):
    """Idle time measures everything; a rating that waits is content with a few texts once HURRY is over."""
    monkeypatch.setattr(calibration, "HURRY", 0.0)
    with open_new() as runtime:
        first = reply(runtime)
        if not waits:
            runtime.learning.settle(watch=QUIET)
        result = runtime.rate(first.request_id, "up")
        assert result.applied and result.logprob_after > result.logprob_before
        count = len(runtime.learner.active.frozen_probe.read_texts)
        assert (count < len(reference_text.texts())) is waits
        runtime.undo()
        runtime.learner.sync()
        assert not runtime.learner.micro.lora_b.any()


def test_a_rating_that_meets_a_long_measurement_ends_it(new_model, monkeypatch):
    """Idle time was stopped in the middle; what it has read is enough when a rating waits."""
    monkeypatch.setattr(calibration, "HURRY", 0.0)
    measurement = Measurement(Measured.of(new_model, NativeBackend(new_model, threads=1), 2))

    def pause():
        if len(measurement._reading.states) > 2 * calibration.MIN_TEXTS_OF_KIND:
            raise Stopped

    with pytest.raises(Stopped):
        measurement.run(pause)
    done = len(measurement._reading.states)
    assert len(measurement.run(is_hurried=True).read_texts) == done < len(reference_text.texts())


def test_directions_of_a_wide_model_resemble_the_exact_ones(monkeypatch):
    """Features from random combinations of the dimensions span what those from all dimensions span."""
    rng = np.random.default_rng(0)
    head = (rng.normal(size=(2048, 24)) @ rng.normal(size=(24, 600)) / 5).astype(np.float32).T  # [600, 2048]
    tokens, frequency = np.arange(2048), rng.random(2048)

    def find_features():
        rows = calibration.HeadRows(600, tokens).run(lambda h: h @ head, lambda: None)
        return calibration.features(rows, frequency)

    exact = find_features()
    monkeypatch.setattr(calibration, "PROBES", 256)
    rough = find_features()
    q_exact, q_rough = (np.linalg.qr(f[:, -24:])[0] for f in (exact, rough))
    assert np.linalg.svd(q_exact.T @ q_rough)[1].min() > 0.9

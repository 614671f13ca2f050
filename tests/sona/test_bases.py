"""Versions with base LoRAs: exact KL, restarts, undo and rollback bit for bit, ratings before and after."""

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.lora.base_lora import MODULES, BaseLoRA
from ruvmlx.sampling import log_softmax
from ruvmlx.sona import instant, reference_text
from ruvmlx.sona.kl_probe import KLProbe
from ruvmlx.sona.reference_text import read
from ruvmlx.store import HeadMoved
from tests.backends.test_lora import random_base

from .feedback import reply, weights


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    """A model small enough to read the reference text again with every base."""
    return NativeBackend(tiny, threads=1)


def promote(runtime, seed=3, size=0.02) -> BaseLoRA:
    """Install a small random base below the micro in use."""
    learner, base = runtime.learner, random_base(runtime.model.config, seed, MODULES[:8], size)
    learner.sync()
    kl = learner.active.probe_base(base).probe.kl(learner.micro)
    learner.active.install()
    state, norm = learner.micro.to_bytes(), learner.micro.norm
    learner.history.promote(learner.version, base, state, kl, norm, {"reason": "a test"})
    learner.sync()
    return base


def learned_state(runtime) -> tuple[bytes, bytes]:
    """Everything that shapes the next reply."""
    runtime.learner.sync()
    lora = runtime.backend.lora
    return weights(runtime), lora.to_bytes() if lora else b""


def slow_kl(runtime, base, micro) -> float:
    """KL(base + micro || frozen) in answers, float64: the KL of the base at every token, and what the
    MicroLoRA adds to it in the probe's contexts."""
    frozen = runtime.learner.active.frozen_probe
    few = frozen.rows[: frozen.answers]
    whole = slow_kl_at(runtime, base, None, slice(0, answer_tokens(runtime)))
    if micro is None:
        return whole
    return whole + slow_kl_at(runtime, base, micro, few) - slow_kl_at(runtime, base, None, few)


def answer_tokens(runtime) -> int:
    """The number of tokens in the answers of the reference text."""
    return read(runtime.backend, runtime.model.tokenizer, runtime.model.config.max_context).answers


def slow_kl_at(runtime, base, micro, at) -> float:
    """The mean of KL(base + micro || frozen) at tokens of the reference text, float64, by reading it twice.
    at: the indices of the tokens"""
    backend, tokenizer, config = runtime.backend, runtime.model.tokenizer, runtime.model.config
    rows = []
    for lora, adapter in ((None, None), (base, micro)):
        backend.set_lora(lora)
        hidden = np.ascontiguousarray(read(backend, tokenizer, config.max_context).states[at])
        logits = backend.head(hidden)
        if adapter is not None:
            adapter.add_to_logits(logits, hidden)
        rows.append(np.stack([log_softmax(row.astype(np.float64)) for row in logits]))
    runtime.learner.active.install()
    return float(np.mean(np.sum(np.exp(rows[1]) * (rows[1] - rows[0]), axis=1)))


def test_kl_is_that_of_base_and_micro_together(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        base = promote(runtime)
        learner = runtime.learner
        assert learner.probe.kl(learner.micro) == pytest.approx(
            slow_kl(runtime, base, learner.micro), rel=1e-3
        )
        assert learner.probe.floor == pytest.approx(slow_kl(runtime, base, None), rel=1e-3)
        result = runtime.rate(reply(runtime, seed=2), "down")
        assert result.kl == pytest.approx(slow_kl(runtime, base, learner.micro), rel=1e-3)
        assert result.kl <= result.kl_cap and learner.probe.floor > 1e-3


def test_the_guard_measures_the_4_bits_that_run(open_tiny):
    """adapter_bits=4: the store keeps the 32 bits of this base, memory has 4, and all KL is that of the 4."""
    with open_tiny(adapter_bits=4) as runtime:
        runtime.rate(reply(runtime), "up")
        base, learner = promote(runtime, size=0.05), runtime.learner
        assert learner.base.nbytes < base.nbytes / 2 and runtime.backend.lora is learner.base
        runs = BaseLoRA(dict(base.to_4_bits().pairs), base.scale)
        found = learner.probe.kl(learner.micro)
        assert found == pytest.approx(slow_kl(runtime, runs, learner.micro), rel=1e-3)
        assert found != pytest.approx(slow_kl(runtime, base, learner.micro), rel=1e-3)
        with learner.active.install_for(None):  # as the promotion test measures a base of 32 bits
            tested = learner.active.probe_base(base)
            assert tested.lora.nbytes < base.nbytes / 2 and runtime.backend.lora is tested.lora
            assert tested.probe.kl(learner.micro) == pytest.approx(found, rel=1e-6)
        result = runtime.rate(reply(runtime, seed=2), "down")
        assert result.kl == pytest.approx(slow_kl(runtime, runs, learner.micro), rel=1e-3)
        assert learner.history.base(learner.state.base).to_bytes() == base.to_bytes()


def test_a_rating_keeps_the_base_and_moves_its_reply(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        base = promote(runtime)
        result = runtime.rate(reply(runtime, seed=2), "up")
        assert result.logprob_after > result.logprob_before
        assert runtime.learner.base.to_bytes() == base.to_bytes()
        rows = runtime.store.db.rows("SELECT version, base FROM adapters")
        assert [tuple(row) for row in rows] == [(1, 0), (2, 1), (3, 1)]
        status = runtime.status()
        assert (status.ratings, status.pending, status.consolidations) == (2, 1, 1)


def test_undo_rollback_and_restart_bring_back_micro_and_base(open_tiny):
    with open_tiny() as runtime:
        states = {0: learned_state(runtime)}

        def note():
            states[runtime.learner.history.version()] = learned_state(runtime)

        for i in range(2):
            runtime.rate(reply(runtime, seed=i), "up")
            note()
        for seed in (3, 4):
            promote(runtime, seed)
            note()
            runtime.rate(reply(runtime, seed=seed), "down")
            note()
        assert len(set(states.values())) == 7
        for version in (3, 6, 0, 5, 2, 4):
            runtime.rollback(version)
            assert learned_state(runtime) == states[version]
            with open_tiny() as again:
                assert learned_state(again) == states[version]
        runtime.rollback(6)
        for version in (5, 3, 1, 0):  # a rating that is taken back takes the consolidation after it along
            runtime.undo()
            assert runtime.learner.history.version() == version and learned_state(runtime) == states[version]


def fail(_probe):
    raise MemoryError


def test_only_the_base_in_use_has_a_whole_kl_probe_in_memory(open_tiny, monkeypatch):
    """After an undo to the base before, the model does not read the reference text again."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        active, sizes, distances = runtime.learner.active, [], []
        for seed in (3, 4):
            base = promote(runtime, seed)
            active.measure()
            sizes.append(active.nbytes)
            distances.append(active.probe.distance(active.state.micro))
        assert sizes[1] - sizes[0] - base.nbytes < 0.3 * active.probe.nbytes
        monkeypatch.setattr(reference_text, "read", None)
        for version, distance in ((2, distances[0]), (3, distances[1])):
            runtime.rollback(version)
            runtime.learner.sync()
            with monkeypatch.context() as no_memory:
                no_memory.setattr(KLProbe, "answered_contexts", property(fail))
                with pytest.raises(MemoryError):
                    active.measure()
            assert not active.is_measured
            active.measure()
            assert active.is_measured and active.probe.distance(active.state.micro) == distance
            assert active.nbytes < 1.1 * sizes[1]


def test_undo_takes_back_a_rating_even_through_a_consolidation(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime, seed=1), "up")
        before = learned_state(runtime)
        runtime.rate(reply(runtime, seed=2), "up")
        promote(runtime)
        assert runtime.undo().ratings == 1
        assert learned_state(runtime) == before


def test_another_process_that_promotes_is_followed(open_tiny):
    with open_tiny() as one, open_tiny() as two:
        one.rate(reply(one), "up")
        promote(two)
        assert learned_state(one) == learned_state(two) and one.backend.lora is not None


def test_a_reply_from_before_the_base_is_read_again_under_it(open_tiny):
    """Its trace's hidden states are the frozen model's: not to be used any more."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        late = reply(runtime, seed=5)
        promote(runtime)
        learner, row = runtime.learner, runtime.store.replies.get(late)
        learner.traces.held.clear()
        for _ in range(2):  # from the store, then from memory
            trace, expected = learner.traces.of(row, learner.state), learner.traces.replay(row, learner.state)
            np.testing.assert_array_equal(trace.grad_b, expected.grad_b)
        assert runtime.rate(late, "up").applied


def test_a_reply_not_settled_before_the_base_came_can_still_be_rated(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        late = reply(runtime, seed=5, settle=False)
        promote(runtime)
        runtime.learning.settle()
        result = runtime.rate(late, "up")
        assert result.applied and result.logprob_after > result.logprob_before


def test_a_promotion_loses_against_a_rating_that_was_quicker(open_tiny):
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        history, base = runtime.learner.history, random_base(runtime.model.config)
        with pytest.raises(HeadMoved):
            history.promote(0, base, b"", 0.0, 0.0, {})
        assert runtime.store.db.rows("SELECT * FROM bases") == [] and history.attempts() == []


def test_the_cap_with_a_base(open_tiny):
    """Micro is scaled down to what the base leaves it: to nothing, if need be, and in few rounds."""
    with open_tiny() as runtime:
        for i in range(6):
            runtime.rate(reply(runtime, seed=i), "up" if i % 2 else "down")
        big = runtime.learner.micro.shrunk(10.0)
        for size in (0.02, 0.5):
            probe, calls = (
                runtime.learner.active.probe_base(random_base(runtime.model.config, size=size)).probe,
                [],
            )
            block = probe.coordinates.columns(big.lora_b)
            update = instant.cap_update(
                instant.UncappedUpdate(big, block, big.evidence, True), Counting(probe, calls)
            )
            assert update.kl <= max(instant.KL_CAP, probe.floor + 1e-5) and len(calls) < 12
        assert probe.floor > instant.KL_CAP and update.adapter.norm < 0.1 * big.norm
        runtime.learner.active.install()


class Counting:
    """A KLProbe that counts the measurements of the distance."""

    def __init__(self, probe, calls):
        self._probe, self._calls = probe, calls

    def __getattr__(self, name):
        return getattr(self._probe, name)

    def distances(self, adapter, block):
        look = self._probe.distances(adapter, block)
        return lambda share: self._calls.append(share) or look(share)


def test_bases_nobody_stands_on_are_forgotten(open_tiny, monkeypatch):
    from ruvmlx.store import weights as weights_module

    monkeypatch.setattr(weights_module, "KEEP_NEAREST", 3)
    monkeypatch.setattr(weights_module, "KEEP_NEWEST", 3)
    with open_tiny() as runtime:
        for i in range(4):
            runtime.rate(reply(runtime, seed=i), "up")
            promote(runtime, seed=i)
        kept = [
            id_ for id_, state in runtime.store.db.rows("SELECT id, state FROM bases") if state is not None
        ]
        assert kept == [3, 4]


def test_the_router_uses_the_base_or_the_model_as_it_was(open_tiny, monkeypatch):
    """A reply of the untouched model is without the base, too; the next one has it again."""
    with open_tiny() as runtime:
        frozen = runtime.store.replies.get(reply(runtime, seed=7)).sampled_ids
        runtime.rate(reply(runtime, seed=1), "up")
    for arm in (1, 0):
        monkeypatch.setattr(
            "ruvmlx.sona.optional.bandit.choose", lambda *_, arm=arm: (arm, np.array([0.5, 0.5]))
        )
        with open_tiny(router=True) as runtime:
            base = promote(runtime, size=0.1) if arm else runtime.learner.base
            made = reply(runtime, seed=7)
            assert (runtime.store.replies.get(made).sampled_ids == frozen) == (arm == 1)
            assert runtime.backend.lora.to_bytes() == base.to_bytes()
            assert (runtime.store.traces.get(made) is None) == (arm == 1)  # its states are not the base's
            result = runtime.rate(made, "up")
            assert result.logprob_after > result.logprob_before


def test_the_kl_of_a_base_is_the_mean_over_all_tokens_of_answers(open_tiny):
    """A base of size 0 has no KL. The KL probe has the same KL, and its few contexts another one."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime), "up")
        active, config = runtime.learner.active, runtime.model.config
        base = random_base(config, size=0.1)
        found = active.kl_of_base(base)
        probe = active.probe_base(base).probe
        assert found == pytest.approx(probe.floor, rel=1e-4)
        still = runtime.learner.micro.shrunk(0.0)
        for distance in (probe.distance(still), probe.distances_dense(still)(1.0)):
            assert distance.kl == pytest.approx(found, rel=1e-4)
        few = slow_kl_at(runtime, base, None, active.frozen_probe.rows[: active.frozen_probe.answers])
        assert found == pytest.approx(slow_kl(runtime, base, None), rel=1e-3) != pytest.approx(few, rel=1e-3)
        assert active.kl_of_base(random_base(config, size=0.0)) == pytest.approx(0, abs=1e-7)
        active.install()

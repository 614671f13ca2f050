"""Pieces of evidence in the instant loop: they add up, and one update follows from all of them."""

import numpy as np
import pytest

from ruvmlx.kernels.micro import NotFinite, evidence_add_ref, evidence_push_ref
from ruvmlx.kernels.rating import EvidenceSolverRef
from ruvmlx.sona import instant
from ruvmlx.sona.evidence import EvidenceAccumulator, protected_sums, theta_of, update_by

from .feedback import reply


@pytest.fixture
def learner_and_pushes(open_tiny):
    """Return (learner, pushes of five rated replies under the fresh adapter)."""
    weights, ratios = (1.0, -0.7, 0.4, -1.0, 0.9), (0.1, 0.05, -0.1, 0.12, -0.2)
    with open_tiny() as runtime:
        ids = [reply(runtime, seed=i) for i in range(len(weights))]
        learner = runtime.learner
        traces = [learner.traces.of(runtime.store.replies.get(id_), learner.state) for id_ in ids]
        stats = [instant.prepare_stats(trace, learner.probe) for trace in traces]
        pushes = [instant.ReplyPush(*facts) for facts in zip(stats, weights, ratios, strict=True)]
        yield learner, pushes


def slow_sums(micro, pushes, probe):
    """The evidence of these pushes and the trend, piece by piece in float64."""
    sums, trend = instant.stored_evidence(micro, probe), micro.trend
    for push in pushes:
        trend = instant.next_trend(trend, push.weight, push.log_ratio)
        gradient = instant.gradient_of(push.stats, push.weight, sums, probe)
        kept = instant.retention_factor(trend)
        sums = evidence_add_ref(sums, gradient, push.stats.information, push.weight, kept)
    return sums, trend


def slow_theta(evidence, probe):
    theta, tokens = np.empty(evidence.shape[1:]), probe.tokens.size
    for push, part in (instant.TOKEN, slice(0, tokens)), (instant.FEATURE, slice(tokens, None)):
        evidence_push_ref(evidence, probe.precision, push.step, push.agree, push.noise, part, theta)
    return theta


def test_one_update_follows_from_all_pieces(learner_and_pushes):
    """Evidence, trend and weights are those of the slow twin; before `apply`, the adapter does not change."""
    learner, pushes = learner_and_pushes
    micro, probe = learner.micro, learner.probe
    evidence = EvidenceAccumulator(micro, probe)
    for i, push in enumerate(pushes):
        assert evidence.pending == i
        evidence.accumulate([push])
    assert evidence.adapter is micro and not micro.lora_b.any() and not micro.evidence.any()
    wanted, trend = slow_sums(micro, pushes, probe)
    np.testing.assert_allclose(evidence.sums, wanted, rtol=1e-4, atol=1e-6)
    update = evidence.apply()
    np.testing.assert_allclose(update.adapter.evidence, wanted, rtol=1e-4, atol=1e-6)
    assert update.adapter.trend == pytest.approx(trend) and trend != 0
    twin = EvidenceSolverRef(probe.precision, probe.features.astype(np.float16), probe.coordinates.ends)
    block = twin.block(wanted, instant.RULE, probe.answer_contexts(micro), micro.scale)
    found = probe.coordinates.columns(update.adapter.lora_b)
    np.testing.assert_allclose(found, update.adapter.gain * block, atol=2e-3 * np.abs(found).max())
    assert found.any() and (evidence.pending, evidence.adapter) == (0, update.adapter)


def test_a_rating_is_one_piece_and_one_update(learner_and_pushes):
    """What the loop's own function does in one call is a piece and an update of the accumulator."""
    learner, pushes = learner_and_pushes
    evidence = EvidenceAccumulator(learner.micro, learner.probe)
    evidence.accumulate(pushes[:1])
    one, other = evidence.apply(), update_by(learner.micro, [pushes[:1]], learner.probe)
    np.testing.assert_array_equal(one.adapter.lora_b, other.adapter.lora_b)
    np.testing.assert_array_equal(one.adapter.evidence, other.adapter.evidence)
    assert one.kl == other.kl > 0


def test_each_piece_has_its_share_of_the_cap(learner_and_pushes, monkeypatch):
    """The KL that one update adds is limited for each piece, and by the whole cap."""
    learner, pushes = learner_and_pushes
    monkeypatch.setattr(instant, "PER_RATING", 0.002)
    one = update_by(learner.micro, [pushes[:1]], learner.probe)
    all_ = update_by(learner.micro, [[push] for push in pushes], learner.probe)
    assert one.kl <= 0.002 and 0.002 < all_.kl <= 0.01


def test_reset_forgets_what_is_pending(learner_and_pushes):
    learner, pushes = learner_and_pushes
    evidence = EvidenceAccumulator(learner.micro, learner.probe)
    evidence.accumulate(pushes[1:2])
    evidence.accumulate(pushes[2:3])
    evidence.reset()
    assert evidence.pending == 0 and evidence.apply() is None and not evidence.sums.any()
    evidence.accumulate(pushes[:1])
    wanted = update_by(learner.micro, [pushes[:1]], learner.probe)
    np.testing.assert_array_equal(evidence.apply().adapter.evidence, wanted.adapter.evidence)


def test_what_is_not_finite_is_refused_and_changes_nothing(learner_and_pushes):
    learner, pushes = learner_and_pushes
    evidence = EvidenceAccumulator(learner.micro, learner.probe)
    evidence.accumulate(pushes[:1])
    before = evidence.sums
    with pytest.raises(NotFinite):
        evidence.accumulate([instant.ReplyPush(pushes[1].stats, np.nan, 0.0)])
    assert evidence.pending == 1 and np.array_equal(evidence.sums, before)
    evidence.accumulate([instant.ReplyPush(pushes[1].stats, 0.0, 0.0)])
    assert evidence.pending == 1


# -- the penalty -------------------------------------------------------------------------------------


def learned_and_turned(learner_and_pushes):
    """(what two replies taught, what the same replies with the opposite ratings teach then)."""
    learner, pushes = learner_and_pushes
    kept = update_by(learner.micro, [[p] for p in pushes[:2]] * 3, learner.probe).adapter
    against = [instant.ReplyPush(p.stats, -p.weight, 0.0) for p in pushes[:2]]
    return kept, [against] * 2


@pytest.mark.parametrize("strength", [0.3, 40.0])
def test_the_penalty_is_that_of_its_formula(learner_and_pushes, strength):
    """The sums change as their slow twin says; S, the noise of ratings, stays."""
    learner, _ = learner_and_pushes
    kept, _ = learned_and_turned(learner_and_pushes)
    now = np.ascontiguousarray(0.3 * kept.evidence)
    zero, tokens = slow_theta(kept.evidence, learner.probe), learner.probe.tokens.size
    np.testing.assert_allclose(theta_of(kept.evidence, learner.probe), zero, atol=1e-4 * np.abs(zero).max())
    zero[:, :tokens] /= instant.TOKEN.step
    zero[:, tokens:] /= instant.FEATURE.step
    found, pull = protected_sums(now, kept.evidence, strength, learner.probe), strength * kept.evidence[2]
    wanted = np.stack([now[0] + pull * zero, now[1], now[2] + pull])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted[0]).max())
    assert np.abs(found[0] - now[0]).max() > 1e-3 * np.abs(now[0]).max()


def test_the_penalty_keeps_more_of_what_was_learned(learner_and_pushes):
    """The stronger, the nearer to the old weights, up to these themselves; at 0, it is a plain update."""
    learner, _ = learner_and_pushes
    kept, against = learned_and_turned(learner_and_pushes)
    target, found = slow_theta(kept.evidence, learner.probe), []
    for strength in (None, 0.0, 10.0, 1e3, 1e8):
        evidence = EvidenceAccumulator(kept, learner.probe)
        for pushes in against:
            evidence.accumulate(pushes)
        update = evidence.apply() if strength is None else evidence.apply_with_ewc(kept, strength)
        found.append(update.adapter.evidence)
        assert evidence.pending == 0
    np.testing.assert_array_equal(found[0], found[1])
    known = kept.evidence[2] > 0.01 * kept.evidence[2].max()
    off = [np.linalg.norm((slow_theta(x, learner.probe) - target)[known]) for x in found]
    assert off[0] > off[2] > off[3] > off[4]
    assert off[0] > 0.3 * np.linalg.norm(target[known]) and off[4] < 0.02 * off[0]


def test_without_a_piece_there_is_no_penalty(learner_and_pushes):
    learner, _ = learner_and_pushes
    kept, _ = learned_and_turned(learner_and_pushes)
    assert EvidenceAccumulator(learner.micro, learner.probe).apply_with_ewc(kept, 1.0) is None

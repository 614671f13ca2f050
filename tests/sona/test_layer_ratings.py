"""Ratings that move the layers below the head: the update, what it does, and the way back."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.errors import RuvmlxError
from ruvmlx.lora.layer_lora import LayerLoRA
from ruvmlx.lora.targets import parse
from ruvmlx.sona import instant
from ruvmlx.sona.optional import layer_update
from ruvmlx.sona.optional.layer_gradients import answer_direction
from ruvmlx.sona.trace import LayerGradient

from .feedback import chat_with_reply, reply
from .layers_below import WIDE, learned_state, random_body, true_logprob
from .training_runs import steady, tiny_backend  # noqa: F401 - fixtures

# -- the update --------------------------------------------------------------------------------------


def slow_theta(layer_lora, targets) -> np.ndarray:
    """pushed, number by number."""
    out, parts, lengths, at = [], [], {}, 0
    for place, (_, width) in zip(layer_lora.places, layer_lora.widths, strict=True):
        parts.append(sum(float(g) ** 2 for g in layer_lora.evidence[0, at : at + width]))
        lengths[place] = lengths.get(place, 0.0) + parts[-1]
        at += width
    best = sorted((p for p in lengths if p in targets.places), key=lambda p: -lengths[p])
    best, at = best[: targets.top or None], 0
    for place, (_, width), length in zip(layer_lora.places, layer_lora.widths, parts, strict=True):
        noise = sum(float(s) for s in layer_lora.evidence[1, at : at + width])
        clear = max(0.0, 1 - layer_update.NOISE * noise / length) if place in best else 0.0
        for i in range(at, at + width):
            g, s, f = (
                float(layer_lora.evidence[0, i]),
                float(layer_lora.evidence[1, i]),
                float(layer_lora.fisher[i]),
            )
            step = layer_update.STEP * g / (f * (layer_update.TOKENS + layer_lora.tokens))
            out.append(step * g * g / (g * g + layer_update.AGREE * s) * clear)
        at += width
    return np.array(out)


@pytest.mark.parametrize("targets", ["all", "attention", "attention,down_proj,top:1", "v_proj:1"])
@pytest.mark.parametrize("rank", [1, 2])
def test_an_update_equals_its_slow_twin(tiny, targets, rank):
    rng, targets = np.random.default_rng(3), parse(targets, tiny.config)
    layer_lora = random_body(tiny.config, rank=rank)
    layer_lora = replace(
        layer_lora, evidence=layer_lora.evidence * np.float32([[4], [1]])
    )  # not all of it is noise
    values = rng.normal(0, 2, layer_lora.lora_b.size).astype(np.float32)
    new = layer_update.update(
        layer_lora, LayerGradient(layer_lora.frame, values, 17), -0.6, 0.9, targets, WIDE
    )
    evidence = 0.9 * layer_lora.evidence + [-0.6 * values, 0.36 * values**2]
    np.testing.assert_allclose(new.evidence, evidence, rtol=2**-11, atol=1e-5)  # it has 11 bits
    assert new.tokens == pytest.approx(0.9 * 90 + 0.6 * 17)
    whole = layer_lora.lora_b / 0.7 + slow_theta(new, targets) - slow_theta(layer_lora, targets)
    kl = 3.0 * sum(0.5 * f * b * b for f, b in zip(layer_lora.fisher, whole, strict=True))
    allowed = min(layer_update.CAREFUL * WIDE.kl, layer_update.estimated_kl(layer_lora) + instant.PER_RATING)
    assert kl > allowed  # so the guard is at work
    assert new.gain == pytest.approx(np.sqrt(allowed / kl), rel=1e-4)
    np.testing.assert_allclose(new.lora_b / new.steps, new.gain * whole / new.steps, rtol=1e-3, atol=0.6)
    beyond = layer_update.residual_b(layer_lora, targets)
    prepared = layer_update.update(
        layer_lora, LayerGradient(layer_lora.frame, values, 17), -0.6, 0.9, targets, WIDE, beyond
    )
    np.testing.assert_array_equal(prepared.lora_b, new.lora_b)


def test_what_is_taken_back_is_gone(tiny):
    """a then b, less a, is b alone, but for what the guard and the rounding left of it."""
    targets, rng = parse("all", tiny.config), np.random.default_rng(1)
    start = LayerLoRA.fresh(
        {p: a[:, 0] for p, (a, _) in random_body(tiny.config).pairs.items()},
        {p: np.ones(b.shape[1], np.float32) for p, (_, b) in random_body(tiny.config).pairs.items()},
    )
    a, b = (
        LayerGradient(start.frame, rng.normal(0, 1, start.lora_b.size).astype(np.float32), 9) for _ in "ab"
    )
    first = layer_update.update(start, a, 1.0, 1.0, targets, WIDE)
    both = layer_update.update(first, b, -0.5, 1.0, targets, WIDE)
    alone = layer_update.update(start, b, -0.5, 1.0, targets, WIDE)
    left = layer_update.without_rating(both, None, first, targets, WIDE)
    np.testing.assert_allclose(left.evidence, alone.evidence, atol=2**-10 * both.evidence.max())
    one, other = left.lora_b / left.gain, alone.lora_b / alone.gain
    close = np.abs(one - other) < 5e-3 * np.abs(other).max()  # less so where a is many times b
    assert close.mean() > 0.95 and np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other)


def test_a_stored_number_has_few_bits_and_no_rest_of_the_rounding_adds_up(tiny):
    """lora_b in steps of its matrix, evidence with 11 bits; after many ratings, lora_b is still theta."""
    rng, targets = np.random.default_rng(2), parse("all", tiny.config)
    known = random_body(tiny.config)
    layers = LayerLoRA.fresh(
        {p: a[:, 0] for p, (a, _) in known.pairs.items()},
        {p: np.ones(b.shape[1], np.float32) for p, (_, b) in known.pairs.items()},
    )
    taste = rng.normal(0, 1, layers.lora_b.size) * np.repeat([1.0, 5.0, 30.0], layers.counts)
    for _ in range(60):
        values = (taste + rng.normal(0, 1, layers.lora_b.size)).astype(np.float32)
        weight = rng.uniform(-1, 1)
        values *= np.float32(np.sign(weight))
        layers = layer_update.update(
            layers, LayerGradient(layers.frame, values, 9), weight, 0.99, targets, WIDE
        )
    assert layers.gain < 1 and layers.lora_b.any()
    np.testing.assert_array_equal(layers.lora_b / layers.steps, np.rint(layers.lora_b / layers.steps))
    assert np.abs(layers.lora_b / layers.steps).max() <= 2**13 and len(set(layers.steps)) > 1
    assert not np.any(layers.evidence.view(np.uint32) & np.uint32(2**13 - 1))
    assert not layer_update.residual_b(layers, targets).any()
    theta = layer_update.evidence_theta(layers, targets)
    np.testing.assert_allclose(layers.lora_b / layers.steps, layers.gain * theta / layers.steps, atol=0.51)


def test_what_is_read_is_1_in_answers_and_0_in_prose():
    rng = np.random.default_rng(0)
    said, other = rng.normal(1, 1, 31), rng.normal(1, 1, 31)
    a = answer_direction(said, other)
    assert a @ said == pytest.approx(1, abs=1e-5) and a @ other == pytest.approx(0, abs=1e-5)
    assert answer_direction(said, 2 * said) @ said == pytest.approx(1, abs=1e-5)  # where they do not differ


# -- ratings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["attention", "ffn", "q_proj,v_proj:1", "top:3", "all", "embedding"])
@pytest.mark.parametrize("rating,way", [("up", 1), ("down", -1)])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rating_moves_the_replys_logprob(open_tiny, targets, rating, way, rank):
    with open_tiny(learn_targets=targets, layer_rank=rank) as runtime:
        reply_id = reply(runtime)
        before, head = true_logprob(runtime, reply_id), runtime.learner.micro
        result = runtime.rate(reply_id, rating)
        after = true_logprob(runtime, reply_id)
        assert result.applied and (after - before) * way > 0
        assert (result.logprob_after - result.logprob_before) * way > 0
        assert result.kl <= result.kl_cap
        layer_lora, moved = runtime.learner.state.layer_lora, runtime.learner.layers.targets
        assert {p for p, (_, b) in layer_lora.pairs.items() if b.any()} <= set(moved.places)
        assert {len(b) for _, b in layer_lora.pairs.values()} == {rank}
        assert sum(b.any() for _, b in layer_lora.pairs.values()) == (moved.top or len(moved.places))
        assert np.array_equal(runtime.learner.micro.lora_b, head.lora_b) == (not moved.head)


@pytest.mark.parametrize("rank", [1, 2])
def test_undo_rollback_and_restart_are_bit_for_bit(open_tiny, rank):
    with open_tiny(learn_targets="all", layer_rank=rank) as runtime:
        states, before = {}, []
        for i in range(4):
            reply_id = reply(runtime, seed=i)  # meanwhile it may be scaled back: a version of its own
            states[runtime.learner.version] = learned_state(runtime)
            before.append(runtime.learner.version)
            version = runtime.rate(reply_id, "up" if i % 2 else "down").adapter_version
            states[version] = learned_state(runtime)
        assert len(set(states.values())) == len(states) >= 5
        for version in (before[2], 0, max(states), 1):
            runtime.rollback(version)
            assert learned_state(runtime) == states[version]
            with open_tiny(learn_targets="all") as again:
                assert learned_state(again) == states[version]
        runtime.rollback(max(states))
        for version in reversed(before):
            runtime.undo()
            assert learned_state(runtime) == states[version] and runtime.learner.version == version


def test_a_changed_rating_replaces_the_old_one(open_tiny):
    with open_tiny(learn_targets="all") as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "down")
        only_down = runtime.learner.state.layer_lora
        runtime.undo()
        runtime.rate(reply_id, "up")
        runtime.rate(reply_id, "down")
        np.testing.assert_array_equal(runtime.learner.state.layer_lora.lora_b, only_down.lora_b)
        other = reply(runtime, seed=2)
        runtime.rate(other, "up")
        before = true_logprob(runtime, reply_id)
        runtime.rate(reply_id, "up")  # an older one
        assert true_logprob(runtime, reply_id) > before


def test_the_recorded_kl_without_an_older_rating_counts_the_layers(open_tiny):
    """The reason takes back what the older rating had taught, and teaches nothing itself."""
    with open_tiny(learn_targets="head,attention") as runtime:
        older, newer = (reply(runtime, seed=seed, settle=False) for seed in (1, 2))
        runtime.rate(older, "down")
        runtime.rate(newer, "up")
        learner = runtime.learner
        found = runtime.choices.give_reason(older, "facts")
        added = learner.layers.added_kl(learner.state.layer_lora)
        assert added > 1e-5
        assert found.kl == pytest.approx(learner.probe.kl(learner.micro) + added, rel=0.01)
        assert learner.history.status().kl == pytest.approx(found.kl)


def test_a_preference_is_one_piece_of_evidence(open_tiny):
    """The parts of the gradients that both replies share cancel, and the older evidence fades once."""
    with open_tiny(learn_targets="attention") as runtime:
        learner = runtime.learner
        runtime.rate(reply(runtime), "up")
        state = learner.state
        better, worse = (reply(runtime, seed=seed) for seed in (3, 4))
        traces = [learner.traces.of(runtime.store.replies.get(id_), state) for id_ in (better, worse)]
        pair = [*zip(traces, (0.5, -0.25), strict=True)]
        found = learner.apply_feedback(state, [pair], "preference")[0].layer_lora
        values = sum(np.float32(weight) * trace.layer_gradient.values for trace, weight in pair)
        trend = state.micro.trend
        for trace, weight in pair:
            trend = instant.next_trend(trend, weight, trace.log_ratio)
        kept = instant.retention_factor(trend)
        wanted = kept * state.layer_lora.evidence + [values, values**2]
        np.testing.assert_allclose(found.evidence, wanted, rtol=2**-11, atol=1e-6)
        tokens = sum(abs(weight) * trace.layer_gradient.tokens for trace, weight in pair)
        assert found.tokens == pytest.approx(kept * state.layer_lora.tokens + tokens)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_a_poisoned_gradient_commits_nothing(open_tiny, poison):
    with open_tiny(learn_targets="all") as runtime:
        runtime.rate(reply(runtime), "up")
        reply_id = reply(runtime, seed=2)
        trace, before, status = (
            runtime.learner.traces.held[reply_id],
            learned_state(runtime),
            runtime.status(),
        )
        values = trace.layer_gradient.values.copy()
        values[values.size // 3] = poison
        good, trace.layer_gradient = trace.layer_gradient, replace(trace.layer_gradient, values=values)
        with pytest.raises(RuvmlxError) as error:
            runtime.rate(reply_id, "up")
        assert "\n" not in str(error.value)
        assert learned_state(runtime) == before and runtime.status() == status
        trace.layer_gradient = good
        assert runtime.rate(reply_id, "up").applied


def test_what_is_too_much_is_taken_back_while_the_user_reads(open_tiny, monkeypatch):
    """A guard that has been fooled by its estimate sees the true distance."""
    with open_tiny(learn_targets="attention") as runtime:
        first = reply(runtime)
        with monkeypatch.context() as m:
            m.setattr(layer_update, "CAREFUL", 1e6)
            m.setattr(layer_update, "PER_RATING", 1e6)
            m.setattr(layer_update, "STEP", 2000.0)
            runtime.rate(first, "down")
        learner, wild = runtime.learner, runtime.learner.state.layer_lora
        runtime.learning.settle()
        assert learner.state.layer_lora.gain < wild.gain and learner.version > 1
        limit = learner.layers.limit(learner.active.probed_base.probe)
        assert learner.layers.measured.probe.floor <= 1.1 * limit.kl
        assert learner.layers.measured.probe.rise <= 1.1 * limit.rise
        assert runtime.status().kl <= instant.KL_CAP
        runtime.undo()
        assert learner.history.version() == 0 and learned_state(runtime)[1] == b""


@pytest.mark.parametrize("rated", [False, True])
def test_a_deleted_reply_does_not_stop_the_preparation_of_others(open_tiny, rated):
    """The reply's trace was still in memory. An unrated reply has no row any more, a rated one no tokens."""
    with open_tiny(learn_targets="all") as runtime:
        runtime.rate(reply(runtime), "up")
        chat, _ = chat_with_reply(runtime)
        gone = runtime.chats.turns(chat)[-1].reply_id
        if rated:
            runtime.rate(gone, "up")
            runtime.learner.traces.held[gone].layer_gradient = None  # as after a change of the matrices
        left = reply(runtime, settle=False)
        runtime.store.chats.delete(chat)
        runtime.learning.settle()
        assert runtime.learner.traces.held[left].layer_gradient is not None
        assert gone not in runtime.learner.traces.held and runtime.store.traces.get(gone) is None


def test_the_head_alone_is_as_it_always_was(open_tiny, monkeypatch):
    """No training graph, no other bytes, no stale cache."""
    from ruvmlx.sona.optional import layer_gradients as reading

    monkeypatch.setattr(reading.LayerGradients, "_graph", None)
    with open_tiny() as runtime:
        lora = runtime.backend.lora
        runtime.rate(reply(runtime), "up")
        learner = runtime.learner
        stored = learner.history.adapter(learner.version).state
        assert learner.state.layer_lora is None and runtime.backend.lora is lora is None
        assert stored == learner.micro.to_bytes()

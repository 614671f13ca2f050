"""Ratings that change layers below the head: their effect, their cost, and undo."""

import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import CorruptFile, RuvmlxError
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.layer_lora import LayerLoRA, consolidated, joined, packed, parted, unpacked_layers
from ruvmlx.lora.targets import Targets, parse
from ruvmlx.sona import instant, objective
from ruvmlx.sona.optional import layer_update
from ruvmlx.sona.optional.layer_gradients import LayerGradients, answer_direction
from ruvmlx.sona.optional.layer_update import LayerLimit
from ruvmlx.sona.trace import LayerGradient
from ruvmlx.training.slices import TrainingText

from ..backends.test_lora import random_base
from .test_background import steady, tiny_backend  # noqa: F401 - fixtures
from .test_learner import reply

WIDE = LayerLimit(10.0, 10.0)


def held(runtime) -> tuple[bytes, bytes]:
    """Everything that shapes the next reply."""
    runtime.learner.sync()
    lora = runtime.backend.lora
    return packed(runtime.learner.micro, runtime.learner.layer_lora), lora.to_bytes() if lora else b""


def true_logprob(runtime, reply_id) -> float:
    """Mean log-probability per token of a reply with the weights in use, computed again."""
    runtime.learner.sync()
    row, learner = runtime.store.replies.get(reply_id), runtime.learner
    return learner.traces.replay(row, learner.state).logprob / len(row.sampled_ids)


def random_layer_lora(config, seed=0, places=(("q_proj", 0), ("v_proj", 1), ("down_proj", 1))) -> LayerLoRA:
    """A layer LoRA that already has ratings."""
    from ruvmlx.lora.base_lora import place_shape

    rng = np.random.default_rng(seed)
    shapes = {p: place_shape(config, *p) for p in places}
    layer_lora = LayerLoRA.fresh(
        {p: rng.normal(0, 0.1, i).astype(np.float32) for p, (i, _) in shapes.items()},
        {p: rng.uniform(0.5, 2, o).astype(np.float32) for p, (_, o) in shapes.items()},
    )
    n = layer_lora.lora_b.size
    return replace(
        layer_lora,
        lora_b=rng.normal(0, 0.1, n).astype(np.float32),
        evidence=np.stack([rng.normal(0, 1, n), rng.uniform(1, 3, n)]).astype(np.float32),
        tokens=90.0,
        gain=0.7,
        curvature=3.0,
    )


# -- the update --------------------------------------------------------------------------------------


def slow_theta(layer_lora, targets) -> np.ndarray:
    """The slow twin of `pushed`, one number at a time."""
    out, lengths, at = [], {}, 0
    for place, (_, width) in zip(layer_lora.places, layer_lora.widths, strict=True):
        lengths[place] = sum(float(g) ** 2 for g in layer_lora.evidence[0, at : at + width])
        at += width
    best = sorted((p for p in lengths if p in targets.places), key=lambda p: -lengths[p])
    best, at = best[: targets.top or None], 0
    for place, (_, width) in zip(layer_lora.places, layer_lora.widths, strict=True):
        noise = sum(float(s) for s in layer_lora.evidence[1, at : at + width])
        clear = max(0.0, 1 - layer_update.NOISE * noise / lengths[place]) if place in best else 0.0
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
def test_an_update_equals_its_slow_twin(tiny, targets):
    rng, targets = np.random.default_rng(3), parse(targets, tiny.config.n_layers)
    layer_lora = random_layer_lora(tiny.config)
    layer_lora = replace(
        layer_lora, evidence=layer_lora.evidence * np.float32([[4], [1]])
    )  # not all of it is noise
    values = rng.normal(0, 2, layer_lora.lora_b.size).astype(np.float32)
    new = layer_update.update(
        layer_lora, LayerGradient(layer_lora.frame, values, 17), -0.6, 0.9, targets, WIDE
    )
    evidence = 0.9 * layer_lora.evidence + [-0.6 * values, 0.36 * values**2]
    np.testing.assert_allclose(new.evidence, evidence, rtol=1e-4, atol=1e-5)
    assert new.tokens == pytest.approx(0.9 * 90 + 0.6 * 17)
    whole = layer_lora.lora_b / 0.7 + slow_theta(new, targets) - slow_theta(layer_lora, targets)
    kl = 3.0 * sum(0.5 * f * b * b for f, b in zip(layer_lora.fisher, whole, strict=True))
    allowed = min(layer_update.CAREFUL * WIDE.kl, layer_update.estimated(layer_lora) + instant.PER_RATING)
    assert kl > allowed  # so the guard is at work
    assert new.gain == pytest.approx(np.sqrt(allowed / kl), rel=1e-4)
    np.testing.assert_allclose(new.lora_b, new.gain * whole, rtol=1e-3, atol=1e-5)
    beyond = layer_update.unasked(layer_lora, targets)
    prepared = layer_update.update(
        layer_lora, LayerGradient(layer_lora.frame, values, 17), -0.6, 0.9, targets, WIDE, beyond
    )
    np.testing.assert_array_equal(prepared.lora_b, new.lora_b)


def test_what_is_taken_back_is_gone(tiny):
    """a then b, less a, is b alone, but for what the guard left of it."""
    targets, rng = parse("all", tiny.config.n_layers), np.random.default_rng(1)
    start = LayerLoRA.fresh(
        {p: a[:, 0] for p, (a, _) in random_layer_lora(tiny.config).pairs.items()},
        {p: np.ones(b.shape[1], np.float32) for p, (_, b) in random_layer_lora(tiny.config).pairs.items()},
    )
    a, b = (
        LayerGradient(start.frame, rng.normal(0, 1, start.lora_b.size).astype(np.float32), 9) for _ in "ab"
    )
    first = layer_update.update(start, a, 1.0, 1.0, targets, WIDE)
    both = layer_update.update(first, b, -0.5, 1.0, targets, WIDE)
    alone = layer_update.update(start, b, -0.5, 1.0, targets, WIDE)
    left = layer_update.without(both, None, first, targets, WIDE)
    np.testing.assert_allclose(left.evidence, alone.evidence, atol=1e-5)
    np.testing.assert_allclose(left.lora_b / left.gain, alone.lora_b / alone.gain, rtol=1e-3, atol=1e-6)


def test_what_is_read_is_1_in_answers_and_0_in_prose():
    rng = np.random.default_rng(0)
    said, other = rng.normal(1, 1, 31), rng.normal(1, 1, 31)
    a = answer_direction(said, other)
    assert a @ said == pytest.approx(1, abs=1e-5) and a @ other == pytest.approx(0, abs=1e-5)
    assert answer_direction(said, 2 * said) @ said == pytest.approx(1, abs=1e-5)  # where they do not differ


# -- gradients ---------------------------------------------------------------------------------------


def test_gradients_are_finite_differences(open_tiny):
    """At the steepest coordinate of each of a few matrices, with a head and a base in force."""
    with open_tiny(learn_targets="all") as runtime:
        learner, row = runtime.learner, runtime.store.replies.get(reply(runtime, settle=False))
        base, micro = random_base(runtime.model.config, size=0.05), learner.micro
        layer_lora = learner._layers.extended(learner.state)
        rng = np.random.default_rng(0)
        layer_lora = replace(
            layer_lora, lora_b=0.02 * rng.normal(size=layer_lora.lora_b.size).astype(np.float32)
        )
        found = learner._layers.gradients.gradient(base, layer_lora, micro, row)
        assert found.tokens == len(row.sampled_ids) and found.values.shape == layer_lora.lora_b.shape
        trainer, text = learner._layers.gradients._graph(), TrainingText.cut(row.prompt_ids, row.sampled_ids)
        trainer.set_head(base, micro)

        def value(lora_b):
            number, _ = trainer.reply(joined(base, replace(layer_lora, lora_b=lora_b)), text, lambda _: 0.0)
            return number * text.said

        for start, (_, width) in list(zip(layer_lora.starts, layer_lora.widths, strict=True))[::3]:
            i = int(start) + int(np.argmax(abs(found.values[start : start + width])))
            h = np.float32(0.02)
            nudge = np.eye(1, layer_lora.lora_b.size, i, dtype=np.float32)[0] * h
            slope = (value(layer_lora.lora_b + nudge) - value(layer_lora.lora_b - nudge)) / (2 * h)
            assert found.values[i] == pytest.approx(slope, rel=0.03, abs=2e-3)


def test_a_gradient_is_kept_with_its_trace(open_tiny, monkeypatch):
    """Rated in another process, without looking at the reply again."""
    with open_tiny(learn_targets="attention") as runtime:
        reply_id = reply(runtime)
        wanted = runtime.learner.traces.held[reply_id].layer_gradient
    with open_tiny(learn_targets="attention") as runtime:
        monkeypatch.setattr(runtime.learner._layers.gradients, "gradient", None)  # would fail
        monkeypatch.setattr(runtime.learner._layers.gradients, "_measured", None)
        assert runtime.rate(reply_id, "up").applied
        sums = runtime.learner.layer_lora.evidence[0]
        np.testing.assert_allclose(sums / sums[0], wanted.values / wanted.values[0], rtol=1e-4)


def test_a_rating_before_there_is_a_gradient_takes_it_first(open_tiny):
    """Settling was interrupted, or never came: nothing is lost of what is acknowledged."""
    with open_tiny(learn_targets="attention") as runtime:
        cancel = threading.Event()
        cancel.set()
        reply_id = reply(runtime, settle=False)
        runtime.settle(cancel)
        assert runtime.learner.traces.held[reply_id].layer_gradient is None
        assert runtime.rate(reply_id, "up").applied
        late = held(runtime)
        runtime.undo()
        runtime.settle()
        assert runtime.learner.traces.held[reply_id].layer_gradient is not None
        runtime.rate(reply_id, "up")
        assert held(runtime) == late


def test_a_measurement_that_is_stopped_goes_on_where_it_was(open_tiny):
    """However often it is stopped, between any two texts."""
    from ruvmlx.pausing import Stopped

    with open_tiny(learn_targets="v_proj") as runtime:
        places, read = runtime.learner.targets.places, []
        whole = LayerGradients(runtime.store, runtime.model, runtime.backend)._measured(places, None)
        reader = runtime.learner._layers.gradients
        graph = reader._graph()
        for name in ("inputs", "reply"):
            plain = getattr(graph, name)

            def stopping(*args, plain=plain, **more):
                read.append(plain)
                if len(read) % 2:
                    raise Stopped
                return plain(*args, **more)

            setattr(graph, name, stopping)
        for _ in range(20):
            with suppress(Stopped):
                layer_lora = reader._measured(places, None)
                break
        assert len(read) > 10 and layer_lora.frame == whole.frame
        np.testing.assert_array_equal(layer_lora.fisher, whole.fisher)
        assert not reader._done


# -- the log-ratio to the frozen model ---------------------------------------------------------------


def true_log_ratio(runtime, reply_id) -> float:
    """Mean log-probability per token minus the original model's, both computed again."""
    with_all, row = true_logprob(runtime, reply_id), runtime.store.replies.get(reply_id)
    with runtime.learner.active.installed(None):
        states = runtime.backend.hidden_states(row.prompt_ids + row.sampled_ids[:-1])
        hidden = states[len(row.prompt_ids) - 1 :]
        logits = runtime.backend.head(hidden).astype(np.float64)
    frozen = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return with_all - float(frozen[np.arange(len(hidden)), row.sampled_ids].mean())


def plain_log_ratio(trace) -> float:
    """The head's part of the log-ratio."""
    return (trace.logprob - trace.frozen_logprob) / len(trace.tokens)


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("rating,way", [("up", 1), ("down", -1)])
def test_the_log_ratio_counts_what_the_layers_do(open_tiny, targets, rating, way):
    """Of the next reply, settled under the change; and what of it is stored."""
    with open_tiny(learn_targets=targets) as runtime:
        rated = reply(runtime)
        runtime.rate(rated, rating)
        reply_id = reply(runtime)
        learner, row = runtime.learner, runtime.store.replies.get(reply_id)
        trace = learner.traces.of(row, learner.state)
        wanted = true_log_ratio(runtime, reply_id)
        assert trace.log_ratio == pytest.approx(wanted, abs=1e-4) and abs(wanted) > 1e-3
        assert true_log_ratio(runtime, rated) * way > 1e-3
        assert abs(plain_log_ratio(trace) - wanted) > 1e-3  # the head alone does not know
        learner.traces.held.clear()
        assert learner.traces.of(row, learner.state).log_ratio == trace.log_ratio


@pytest.mark.parametrize("targets", ["attention", "all"])
def test_a_log_ratio_that_has_moved_is_known_to_first_order(open_tiny, targets):
    """Of a reply that is rated after another one was; both were drawn under a layer LoRA. The slope is the
    one beside the head of then."""
    with open_tiny(learn_targets=targets) as runtime:
        runtime.rate(reply(runtime, seed=3), "up")
        ids = [reply(runtime, seed=i) for i in range(2)]
        learner, micro = runtime.learner, runtime.learner.micro
        was = learner.traces.layer_lora_of(learner.traces.held[ids[0]].version, learner.state)
        runtime.rate(ids[0], "down")
        state, step = learner.state, learner.layer_lora.lora_b - was.lora_b
        for reply_id in ids:
            row, logprobs = runtime.store.replies.get(reply_id), []
            for share in (1, -1):  # both ways, for rounding shows in what a smaller step does
                layer_lora = replace(learner.layer_lora, lora_b=was.lora_b + np.float32(share) * step)
                then = replace(state, micro=micro, layer_lora=layer_lora, version=-1)
                logprobs.append(learner.traces.replay(row, then).logprob)
            slope = (logprobs[0] - logprobs[1]) / (2 * len(row.sampled_ids))
            trace = learner.traces.of(row, state)
            assert trace.moved == pytest.approx(slope, rel=0.1, abs=1e-5) and abs(slope) > 5e-5
            rest = (trace.logprob - trace.base_logprob) / len(row.sampled_ids)
            assert trace.log_ratio == pytest.approx(rest + trace.moved)


def test_pushes_fade_and_tastes_turn_without_the_head(open_tiny):
    """A rating weighs, and the trend follows it, by what the layers have done to the reply."""
    with open_tiny(learn_targets="attention") as runtime:
        for _ in range(2):
            runtime.rate(reply(runtime, seed=1), "up")
        reply_id, learner = reply(runtime, seed=1), runtime.learner
        row, trend, wanted = (
            runtime.store.replies.get(reply_id),
            learner.micro.trend,
            true_log_ratio(runtime, reply_id),
        )
        known = learner.rating_index.weigh(row, "up")
        runtime.rate(reply_id, "up")
        weight = learner.history.ratings()[-1].weight
        faded, plain = (objective.dro_weight("up", *known, ratio) for ratio in (wanted, 0.0))
        assert wanted > 1e-3 and abs(weight - faded) < 0.1 * (plain - faded)
        assert learner.micro.trend == pytest.approx(instant.turned(trend, weight, wanted), abs=1e-4)
        assert abs(learner.micro.trend - instant.turned(trend, weight, 0.0)) > 5e-4


# -- ratings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", ["attention", "ffn", "q_proj,v_proj:1", "top:3", "all"])
@pytest.mark.parametrize("rating,way", [("up", 1), ("down", -1)])
def test_a_rating_moves_the_replys_logprob(open_tiny, targets, rating, way):
    with open_tiny(learn_targets=targets) as runtime:
        reply_id = reply(runtime)
        before, head = true_logprob(runtime, reply_id), runtime.learner.micro
        result = runtime.rate(reply_id, rating)
        after = true_logprob(runtime, reply_id)
        assert result.applied and (after - before) * way > 0
        assert (result.logprob_after - result.logprob_before) * way > 0
        assert result.kl <= result.kl_cap
        layer_lora, moved = runtime.learner.layer_lora, runtime.learner.targets
        assert {p for p, (_, b) in layer_lora.pairs.items() if b.any()} <= set(moved.places)
        assert sum(b.any() for _, b in layer_lora.pairs.values()) == (moved.top or len(moved.places))
        assert np.array_equal(runtime.learner.micro.lora_b, head.lora_b) == (not moved.head)


def test_undo_rollback_and_restart_are_bit_for_bit(open_tiny):
    with open_tiny(learn_targets="all") as runtime:
        states, before = {}, []
        for i in range(4):
            reply_id = reply(runtime, seed=i)  # meanwhile it may be scaled back: a version of its own
            states[runtime.learner.version] = held(runtime)
            before.append(runtime.learner.version)
            version = runtime.rate(reply_id, "up" if i % 2 else "down").adapter_version
            states[version] = held(runtime)
        assert len(set(states.values())) == len(states) >= 5
        for version in (before[2], 0, max(states), 1):
            runtime.rollback(version)
            assert held(runtime) == states[version]
            with open_tiny(learn_targets="all") as again:
                assert held(again) == states[version]
        runtime.rollback(max(states))
        for version in reversed(before):
            runtime.undo()
            assert held(runtime) == states[version] and runtime.learner.version == version


def test_a_changed_rating_replaces_the_old_one(open_tiny):
    with open_tiny(learn_targets="all") as runtime:
        reply_id = reply(runtime)
        runtime.rate(reply_id, "down")
        only_down = runtime.learner.layer_lora
        runtime.undo()
        runtime.rate(reply_id, "up")
        runtime.rate(reply_id, "down")
        np.testing.assert_array_equal(runtime.learner.layer_lora.lora_b, only_down.lora_b)
        other = reply(runtime, seed=2)
        runtime.rate(other, "up")
        before = true_logprob(runtime, reply_id)
        runtime.rate(reply_id, "up")  # an older one
        assert true_logprob(runtime, reply_id) > before


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_a_poisoned_gradient_commits_nothing(open_tiny, poison):
    with open_tiny(learn_targets="all") as runtime:
        runtime.rate(reply(runtime), "up")
        reply_id = reply(runtime, seed=2)
        trace, before, status = runtime.learner.traces.held[reply_id], held(runtime), runtime.status()
        values = trace.layer_gradient.values.copy()
        values[values.size // 3] = poison
        good, trace.layer_gradient = trace.layer_gradient, replace(trace.layer_gradient, values=values)
        with pytest.raises(RuvmlxError) as error:
            runtime.rate(reply_id, "up")
        assert "\n" not in str(error.value)
        assert held(runtime) == before and runtime.status() == status
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
        learner, wild = runtime.learner, runtime.learner.layer_lora
        runtime.settle()
        assert learner.layer_lora.gain < wild.gain and learner.version > 1
        limit = learner._layers.limit(learner.active.probed_base.probe)
        assert learner._layers.measured.probe.floor <= 1.1 * limit.kl
        assert learner._layers.measured.probe.rise <= 1.1 * limit.rise
        assert runtime.status().kl <= instant.KL_CAP
        runtime.undo()
        assert learner.history.version() == 0 and held(runtime)[1] == b""


def test_the_head_alone_is_as_it_always_was(open_tiny, monkeypatch):
    """No training graph, no other bytes, no stale cache."""
    from ruvmlx.sona.optional import layer_gradients as reading

    monkeypatch.setattr(reading.LayerGradients, "_graph", None)
    with open_tiny() as runtime:
        lora = runtime.backend.lora
        runtime.rate(reply(runtime), "up")
        learner = runtime.learner
        stored = learner.history.adapter(learner.version).state
        assert learner.layer_lora is None and runtime.backend.lora is lora is None
        assert stored == learner.micro.to_bytes()


# -- the KV cache ------------------------------------------------------------------------------------


def talk(runtime, session, text, seed=5) -> tuple[list[int], int]:
    """The token ids of a reply, and how many prompt tokens came from the cache."""
    request = GenerationRequest(
        prompt=text, session_id=session, max_new_tokens=12, sampling=Sampling(seed=seed), ignore_eos=True
    )
    for chunk in runtime.generate(request):
        response = chunk.response
    return response.token_ids, response.cached_tokens


@pytest.mark.parametrize("targets,stale", [("attention", True), ("all", True), ("head", False)])
def test_pages_of_the_old_version_are_not_used(open_tiny, targets, stale):
    """After a rating the next turn reads its prompt anew, if the layer LoRA has changed, and says what a run
    without any cache says."""
    with open_tiny(learn_targets=targets) as runtime:
        text = "a prompt that is long enough to be worth keeping"
        talk(runtime, "s", text)
        runtime.settle()
        runtime.rate(runtime.last_reply_id, "down")
        ids, cached = talk(runtime, "s", text + " and on")
        assert (cached == 0) == stale
        assert ids == talk(runtime, None, text + " and on")[0]
        again, cached = talk(runtime, "s", text + " and on")
        assert cached > 0 and again == ids  # and is kept until the next rating


def test_a_reply_in_flight_keeps_its_adapter(open_tiny):
    """Two ratings in the middle of a reply: its words are those of an undisturbed one."""
    request = {"prompt": "hello", "max_new_tokens": 24, "sampling": Sampling(seed=3), "ignore_eos": True}
    with open_tiny(learn_targets="all") as runtime:
        ids = [reply(runtime, seed=i) for i in range(2)]
        for chunk in runtime.generate(GenerationRequest(**request)):
            wanted = chunk.response
        for i, chunk in enumerate(runtime.generate(GenerationRequest(**request))):
            if 2 <= i < 4:
                lora = runtime.backend.lora
                runtime.rate(ids[i - 2], "down")
                assert runtime.backend.lora is lora
            found = chunk.response
        assert found.token_ids == wanted.token_ids
        runtime.learner.sync()
        assert runtime.backend.lora is not lora


# -- one adapter with the rest -----------------------------------------------------------------------


def test_body_and_base_together_are_both(tiny):
    """Their sum, matrix by matrix; the gradients of the base's own factors are found again."""
    layer_lora, base = random_layer_lora(tiny.config), random_base(tiny.config, size=0.1)
    both = joined(base, layer_lora)
    for place in both.pairs:
        whole = base.scale * base.pairs[place][0] @ base.pairs[place][1] if place in base.pairs else 0
        whole = whole + (
            layer_lora.pairs[place][0] @ layer_lora.pairs[place][1] if place in layer_lora.pairs else 0
        )
        a, b = both.pairs[place]
        np.testing.assert_allclose(both.scale * a @ b, whole, atol=1e-5)
    for place, (a, b) in parted(both.pairs, base).items():
        np.testing.assert_array_equal(a, base.pairs[place][0])
        np.testing.assert_array_equal(b, base.pairs[place][1])
    assert joined(base, layer_lora.emptied()) is base and joined(None, None) is None


def test_consolidation_keeps_the_outputs(tiny):
    backend = open_backend("reference", tiny)
    layer_lora, base = random_layer_lora(tiny.config), random_base(tiny.config, size=0.1)
    tokens = list(range(3, 40))
    backend.set_lora(joined(base, layer_lora))
    wanted = backend.hidden_states(tokens)
    asked: list[int] = []
    backend.set_lora(consolidated(base, layer_lora, 64, lambda: asked.append(1)))
    assert len(asked) == len(layer_lora.places)
    np.testing.assert_allclose(backend.hidden_states(tokens), wanted, atol=1e-5 * abs(wanted).max())
    backend.set_lora(base)
    assert abs(backend.hidden_states(tokens) - wanted).max() > 1e-3 * abs(wanted).max()
    left = layer_lora.emptied()
    assert not left.moves and np.array_equal(left.evidence, layer_lora.evidence)


def test_a_promotion_takes_the_body_along(open_tiny, monkeypatch):
    """By the background loop itself: the base holds what ratings had moved; the layer LoRA starts at zero."""
    from ruvmlx.sona.background import Background, TrainingSettings

    with open_tiny(learn_targets="all") as runtime:
        for i in range(4):
            runtime.rate(reply(runtime, seed=i % 2), "up" if i % 2 else "down")
        layer_lora = runtime.learner.layer_lora
        monkeypatch.setattr("ruvmlx.sona.promotion._objection", lambda *a: "")
        quick = TrainingSettings(steps=1, lr=1e-9, warmup=1, rank=3, minimum=3)
        before = true_logprob(runtime, runtime.last_reply_id)
        monkeypatch.setattr("ruvmlx.sona.promotion.ROOM", 1e6)
        report = Background(runtime.learner, runtime.model, quick).run()
        assert report["promoted"], report
        learner = runtime.learner
        assert not learner.layer_lora.moves and np.array_equal(
            learner.layer_lora.evidence, layer_lora.evidence
        )
        assert true_logprob(runtime, runtime.last_reply_id) == pytest.approx(before, abs=1e-3)
        assert runtime.rate(reply(runtime, seed=7), "up").applied and learner.layer_lora.moves


def test_it_is_stored_beside_the_head(tiny):
    micro = MicroLoRA.fresh(np.ones((tiny.config.hidden_size, 2)), tiny.config.vocab_size)
    layer_lora = random_layer_lora(tiny.config)
    data = packed(micro, layer_lora)
    again = unpacked_layers(data, tiny.config)
    assert packed(MicroLoRA.from_bytes(data, tiny.config.hidden_size, tiny.config.vocab_size), again) == data
    assert (again.frame, again.places) == (layer_lora.frame, layer_lora.places)
    assert unpacked_layers(micro.to_bytes(), tiny.config) is None
    for name in ("lora_a", "lora_b", "evidence", "fisher"):
        broken = replace(layer_lora, **{name: np.full_like(getattr(layer_lora, name), np.nan)})
        with pytest.raises(CorruptFile):
            unpacked_layers(packed(micro, broken), tiny.config)


def test_a_top_k_that_changes_gives_up_what_it_leaves(tiny):
    """The place with the largest gradients is moved; one that loses its rank goes back."""
    places = (("q_proj", 0), ("v_proj", 1))
    layer_lora = random_layer_lora(tiny.config, places=places)
    layer_lora = replace(layer_lora.emptied(), evidence=np.zeros_like(layer_lora.evidence), tokens=0.0)
    targets, n = Targets(False, places, 1), layer_lora.lora_b.size
    first, second = np.zeros(n, np.float32), np.zeros(n, np.float32)
    first[: layer_lora.starts[1]], second[layer_lora.starts[1] :] = 1.0, 9.0
    one = layer_update.update(layer_lora, LayerGradient(layer_lora.frame, first, 5), 1.0, 1.0, targets, WIDE)
    assert one.pairs[places[0]][1].any() and not one.pairs[places[1]][1].any()
    two = layer_update.update(one, LayerGradient(layer_lora.frame, second, 5), 1.0, 1.0, targets, WIDE)
    np.testing.assert_allclose(two.pairs[places[0]][1], 0, atol=1e-6)
    assert two.pairs[places[1]][1].any()

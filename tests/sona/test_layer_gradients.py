"""Gradients of the layers below the head, and the log-ratio to the frozen model that counts them."""

import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.lora.layer_lora import combine_loras
from ruvmlx.sona import instant, objective
from ruvmlx.sona.optional.layer_gradients import LayerGradients, _halves
from ruvmlx.training.slices import TrainingText

from ..backends.test_lora import random_base
from .feedback import reply
from .layers_below import learned_state, true_logprob
from .training_runs import steady, tiny_backend  # noqa: F401 - fixtures

# -- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2])
def test_gradients_are_finite_differences(open_tiny, rank):
    """At the steepest coordinate of each of a few matrices, with a head and a base in force."""
    with open_tiny(learn_targets="all", layer_rank=rank) as runtime:
        learner, row = runtime.learner, runtime.store.replies.get(reply(runtime, settle=False))
        base, micro = random_base(runtime.model.config, size=0.05), learner.micro
        layer_lora = learner.layers.extend_layers(learner.state)
        rng = np.random.default_rng(0)
        layer_lora = replace(
            layer_lora, lora_b=0.02 * rng.normal(size=layer_lora.lora_b.size).astype(np.float32)
        )
        found = learner.layers.gradients.gradient(base, layer_lora, micro, row)
        assert all(a.shape[1] == rank for a, _ in layer_lora.pairs.values())
        assert found.tokens == len(row.sampled_ids) and found.values.shape == layer_lora.lora_b.shape
        trainer, text = learner.layers.gradients._graph(), TrainingText.cut(row.prompt_ids, row.sampled_ids)
        trainer.set_head(base, micro)

        def value(lora_b):
            number, _ = trainer.reply(
                combine_loras(base, replace(layer_lora, lora_b=lora_b)), text, lambda _: 0.0
            )
            return number * text.answer_tokens

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
        monkeypatch.setattr(runtime.learner.layers.gradients, "gradient", None)  # would fail
        monkeypatch.setattr(runtime.learner.layers.gradients, "_calibrate", None)
        assert runtime.rate(reply_id, "up").applied
        sums = runtime.learner.state.layer_lora.evidence[0]
        np.testing.assert_allclose(sums / sums[0], wanted.values / wanted.values[0], rtol=1e-3)


def test_a_rating_before_there_is_a_gradient_takes_it_first(open_tiny):
    """Settling was interrupted, or never came: nothing is lost of what is acknowledged."""
    with open_tiny(learn_targets="attention") as runtime:
        cancel = threading.Event()
        cancel.set()
        reply_id = reply(runtime, settle=False)
        runtime.learning.settle(cancel)
        assert runtime.learner.traces.held[reply_id].layer_gradient is None
        assert runtime.rate(reply_id, "up").applied
        late = learned_state(runtime)
        runtime.undo()
        runtime.learning.settle()
        assert runtime.learner.traces.held[reply_id].layer_gradient is not None
        runtime.rate(reply_id, "up")
        assert learned_state(runtime) == late


@pytest.mark.parametrize("rank", [1, 2])
def test_a_measurement_that_is_stopped_goes_on_where_it_was(open_tiny, rank):
    """However often it is stopped, between any two texts."""
    from ruvmlx.pausing import Stopped

    with open_tiny(learn_targets="v_proj", layer_rank=rank) as runtime:
        places, read = runtime.learner.layers.targets.places, []
        whole = LayerGradients(runtime.store, runtime.model, runtime.backend, rank)._calibrate(places, None)
        reader = runtime.learner.layers.gradients
        graph = reader._graph()
        for name in ("inputs", "reply"):
            plain = getattr(graph, name)

            def stopping(*args, plain=plain, **more):
                read.append(plain)
                if len(read) % 2:
                    raise Stopped
                return plain(*args, **more)

            setattr(graph, name, stopping)
        for _ in range(20 * rank**2):
            with suppress(Stopped):
                layer_lora = reader._calibrate(places, None)
                break
        assert len(read) > 10 and layer_lora.frame == whole.frame
        np.testing.assert_array_equal(layer_lora.fisher, whole.fisher)
        assert not reader._done


def test_what_the_two_directions_read(open_tiny):
    """On average, the first reads 1 in answers; the second 1 in their second halves, 0 in their first."""
    with open_tiny(learn_targets="v_proj,down_proj", layer_rank=2) as runtime:
        reader, places = runtime.learner.layers.gradients, runtime.learner.layers.targets.places
        layers, answers = reader.fresh(places), reader._texts()[0]
        said = reader._means(places, answers, None)
        early, late = (reader._means(places, texts, None) for texts in _halves(answers))
        assert list(layers.pairs) == list(places) and len(layers.places) == 2 * len(places)
        for place, (a, b) in layers.pairs.items():
            assert not b.any() and a[:, 0] @ said[place] == pytest.approx(1, abs=1e-3)
            assert a[:, 1] @ late[place] == pytest.approx(1, abs=1e-3)
            assert a[:, 1] @ early[place] == pytest.approx(0, abs=1e-3)
            assert np.linalg.matrix_rank(a) == 2
        assert np.all(layers.fisher > 0)


# -- the log-ratio to the frozen model ---------------------------------------------------------------


def true_log_ratio(runtime, reply_id) -> float:
    """Mean log-probability per token beyond the untouched model's, both read anew."""
    with_all, row = true_logprob(runtime, reply_id), runtime.store.replies.get(reply_id)
    with runtime.learner.active.install_for(None):
        states = runtime.backend.hidden_states(row.prompt_ids + row.sampled_ids[:-1])
        hidden = states[len(row.prompt_ids) - 1 :]
        logits = runtime.backend.head(hidden).astype(np.float64)
    frozen = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return with_all - float(frozen[np.arange(len(hidden)), row.sampled_ids].mean())


def plain_log_ratio(trace) -> float:
    """The head's part of it."""
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
        state, step = learner.state, learner.state.layer_lora.lora_b - was.lora_b
        for reply_id in ids:
            row, logprobs = runtime.store.replies.get(reply_id), []
            for share in (1, -1):  # both ways, for rounding shows in what a smaller step does
                layer_lora = replace(learner.state.layer_lora, lora_b=was.lora_b + np.float32(share) * step)
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
        known = learner.rating_index.reward_and_value(row, "up")
        runtime.rate(reply_id, "up")
        weight = learner.history.ratings()[-1].weight
        faded, plain = (objective.dro_weight("up", *known, ratio) for ratio in (wanted, 0.0))
        assert wanted > 1e-3 and abs(weight - faded) < 0.1 * (plain - faded)
        assert learner.micro.trend == pytest.approx(instant.next_trend(trend, weight, wanted), abs=1e-4)
        assert abs(learner.micro.trend - instant.next_trend(trend, weight, 0.0)) > 5e-4

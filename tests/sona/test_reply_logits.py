"""The log-probability of a reply from stored logits equals the one from the whole output head."""

from threading import Event

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.lora import MicroLoRA
from ruvmlx.pausing import Stopped
from ruvmlx.sona import reply_traces
from ruvmlx.sona.coordinates import Coordinates
from ruvmlx.sona.reply_logits import ReplyLogits
from ruvmlx.sona.trace import Trace, mean_logprobs

WIDTH, VOCABULARY, BASE = 5, 37, 4


def coordinates_of(tokens) -> Coordinates:
    tokens = np.asarray(tokens, np.int32)
    return Coordinates(
        tokens, tokens[:1], np.ones(tokens.size, np.float32), np.zeros((tokens.size, 0), np.float32), 2
    )


def random_trace(rng, length) -> tuple[Trace, np.ndarray]:
    """A reply with random hidden states, and the output head [D, V]."""
    head = rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32)
    blank = MicroLoRA(np.zeros((WIDTH, 2), np.float32), np.zeros((2, VOCABULARY), np.float32))
    trace = Trace(blank, 1, tokens=rng.integers(0, VOCABULARY, length).tolist())
    trace._hidden = list(rng.normal(size=(length, WIDTH)).astype(np.float32))
    return trace, head


def random_adapter(rng, tokens) -> MicroLoRA:
    b = np.zeros((2, VOCABULARY), np.float32)
    b[:, tokens] = rng.normal(size=(2, len(tokens)))
    return MicroLoRA(rng.normal(size=(WIDTH, 2)).astype(np.float32), b)


@pytest.mark.parametrize("movable", [1, 2, 13, VOCABULARY - 1, VOCABULARY])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 70])
def test_stored_logits_give_the_log_probability_of_the_whole_head(length, movable):
    rng = np.random.default_rng([length, movable])
    trace, head = random_trace(rng, length)
    tokens = np.sort(rng.permutation(VOCABULARY)[:movable])
    adapters = [random_adapter(rng, tokens) for _ in range(2)]
    whole = mean_logprobs(trace, adapters, lambda h: h @ head, BASE)
    trace.logits = ReplyLogits.of(
        trace.hidden_states, np.array(trace.tokens), coordinates_of(tokens), lambda h: h @ head, BASE,
        lambda: None,
    )  # fmt: skip
    stored = mean_logprobs(trace, adapters, None, BASE)  # without a head, no logits can be computed
    np.testing.assert_allclose(stored, whole, atol=2e-6)
    assert trace.nbytes > trace.logits.nbytes > 0


@pytest.mark.parametrize("what", ["another base LoRA", "an adapter that changes other tokens"])
def test_the_whole_head_is_used_where_the_stored_logits_do_not_suffice(what):
    rng = np.random.default_rng(0)
    trace, head = random_trace(rng, 9)
    adapter = random_adapter(rng, np.arange(VOCABULARY))
    whole = mean_logprobs(trace, [adapter], lambda h: h @ head, BASE)
    tokens = np.arange(9) if what.startswith("an ") else np.arange(VOCABULARY)
    trace.logits = ReplyLogits.of(
        trace.hidden_states, np.array(trace.tokens), coordinates_of(tokens), lambda h: 2 * h @ head,
        BASE + what.startswith("another"), lambda: None,
    )  # fmt: skip
    assert mean_logprobs(trace, [adapter], lambda h: h @ head, BASE) == whole


def test_a_pause_stops_the_computation():
    def pause():
        raise Stopped

    with pytest.raises(Stopped):
        ReplyLogits.of(np.zeros((3, WIDTH)), np.zeros(3, int), coordinates_of([0]), None, BASE, pause)


def reply_id(runtime) -> str:
    request = GenerationRequest(prompt="Hello", max_new_tokens=20, sampling=Sampling(seed=3), ignore_eos=True)
    for _ in runtime.writer.generate(request):
        pass
    return request.request_id


@pytest.mark.parametrize("rated_before", [False, True])
def test_a_prepared_rating_needs_no_output_head(open_tiny, monkeypatch, rated_before):
    """One reply is prepared in idle time, and the other reply is not. Both ratings return the same
    log-probabilities."""
    results = []
    for most in (0, reply_traces.MAX_TOKENS):
        with open_tiny(adapter=f"own{most}") as runtime, monkeypatch.context() as patch:
            patch.setattr(reply_traces, "MAX_TOKENS", most)
            if rated_before:
                runtime.rate(reply_id(runtime), "down")
            id_ = reply_id(runtime)
            runtime.learner.active.measure()
            runtime.learner.settle(lambda: None)
            if most:
                patch.setattr(type(runtime.backend), "head", None)
            results.append(runtime.rate(id_, "up"))
    without, prepared = results
    assert prepared.logprob_before == pytest.approx(without.logprob_before, abs=1e-5)
    assert prepared.logprob_after == pytest.approx(without.logprob_after, abs=1e-5)
    assert prepared.logprob_after != prepared.logprob_before


def test_no_logits_are_computed_while_a_user_waits(open_tiny):
    """A command or a switch of adapters that settles without `cancel` runs no output head."""
    with open_tiny() as runtime:
        id_ = reply_id(runtime)
        runtime.learner.active.measure()
        runtime.learning.settle()
        assert runtime.learner.traces.held[id_].logits is None
        runtime.learning.settle(Event())
        assert runtime.learner.traces.held[id_].logits is not None

"""The preparation of ratings stops at once, also in its longest parts, and the next preparation continues."""

import threading

import numpy as np
import pytest

from ruvmlx.pausing import Stopped
from ruvmlx.sona import instant, taste_push
from ruvmlx.sona.kl_probe import KLProbe
from ruvmlx.sona.taste_push import TokenEffects, token_effects

from .feedback import reply
from .test_taste_push import TEXTS, Tokens


class PauseAfter:
    """A pause that lets the work go on at the first `calls` calls, and stops the work at the next call."""

    def __init__(self, calls: float):
        self.left = calls

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Stopped


def test_a_stopped_measurement_of_tokens_goes_on_where_it_was():
    tokenizer, tokens, rest = Tokens(), np.arange(len(TEXTS)), PauseAfter(1000)
    with pytest.raises(Stopped):
        token_effects(tokenizer, tokens, PauseAfter(4))
    found = token_effects(tokenizer, tokens, rest)
    assert 1000 - rest.left == len(TEXTS) - 4
    whole = TokenEffects.of(tokenizer, tokens)
    assert np.array_equal(found.measures, whole.measures) and np.array_equal(found.shorter, whole.shorter)
    assert token_effects(tokenizer, tokens, PauseAfter(0)) is found


def test_the_first_push_stops_and_the_rating_computes_it(open_tiny):
    """The rating has the same effect as after a complete preparation."""
    weights = []
    for stops in (True, False):
        taste_push._known.clear()
        with open_tiny(adapter=f"own{stops}") as runtime:
            learner = runtime.learner
            for rating in ("up", "down") * 2:
                runtime.rate(reply(runtime), rating)
            last = reply(runtime, settle=False)
            given = learner.version, learner.micro, learner.probe
            if stops:
                with pytest.raises(Stopped):
                    learner.taste_push.prepare(*given, PauseAfter(2))
            else:
                learner.taste_push.prepare(*given)
            runtime.rate(last, "up")
            weights.append(learner.micro.lora_b.copy())
    assert np.array_equal(*weights)


def test_a_preparation_that_is_stopped_has_stored_the_traces(open_tiny, monkeypatch):
    """It has computed nothing else: no probability of the reference text, no statistics of the reply."""
    with open_tiny() as runtime:
        reply_id, cancel = reply(runtime, settle=False), threading.Event()
        cancel.set()
        with monkeypatch.context() as patched:
            patched.setattr(KLProbe, "_packing", None)
            patched.setattr(instant, "prepare_stats", None)
            runtime.learning.settle(cancel)
        assert runtime.store.traces.get(reply_id) is not None
        runtime.learning.settle(threading.Event())
        assert runtime.learner.traces.held[reply_id].stats is not None


def test_the_probabilities_of_the_reference_text_are_computed_with_pauses(open_tiny):
    with open_tiny() as runtime:
        probe = runtime.learner.probe
        with pytest.raises(Stopped):
            probe.prepare(PauseAfter(0))
        assert "packed_probs" not in vars(probe)
        probe.prepare(PauseAfter(1000))
        assert "packed_probs" in vars(probe)

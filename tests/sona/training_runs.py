"""What tests of training share: a runtime with ratings, and short runs of the background loop."""

from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kernels.rating import Rule
from ruvmlx.sona import instant, replay
from ruvmlx.sona.background import TrainingSettings
from ruvmlx.training import trainer

QUICK = TrainingSettings(steps=4, lr=2e-3, warmup=1, rank=3)


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return NativeBackend(tiny, threads=1)


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """One BLAS thread: the split of a sum decides its last bit."""
    monkeypatch.setattr(trainer.BLAS, "fixed", True)
    trainer.BLAS.set_threads(1)


def answer(runtime, i) -> str:
    """One of two replies to a question. Its id is the same in every run, so the held-out replies are, too."""
    request = GenerationRequest(
        request_id=f"reply-{i}",
        prompt="question",
        max_new_tokens=17,
        sampling=Sampling(seed=i % 2),
        ignore_eos=True,
    )
    for _ in runtime.writer.generate(request):
        pass
    runtime.learning.settle()
    return request.request_id


@pytest.fixture
def rated_runtime(open_tiny, monkeypatch):
    """A runtime with 14 ratings: one reply is always liked, another one never.

    The ratings have hardly moved the weights, so much remains to be learned.
    """
    rule = instant.RULE
    slow = [replace(push, step=0.1 * push.step) for push in (rule.tokens, rule.along)]
    monkeypatch.setattr(instant, "RULE", Rule(*slow, rule.cap))
    with open_tiny() as runtime:
        for i in range(14):
            runtime.rate(answer(runtime, i), "up" if i % 2 else "down")
        yield runtime


def consolidate(runtime, settings=QUICK, cancel=None):
    losses = []
    report = runtime.learning.consolidate(lambda done, total, loss: losses.append(loss), cancel, settings)
    return report, [loss for loss in losses if not np.isnan(loss)]


def buffer_of(runtime):
    learner, model = runtime.learner, runtime.model
    return replay.load(learner.history, learner.rating_index, model.tokenizer, model.config.max_context)

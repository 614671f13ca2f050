"""Penalties and logit_bias: alone, in a batch, in best of n and on MLX; traces see the model's own logits."""

import ctypes as C
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.engine import LLMInferenceEngine, Sampling
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.best_of import BestOf, requests_for
from ruvmlx.engine.scheduler import Scheduler
from ruvmlx.engine.source import StepSource
from ruvmlx.errors import UsageError
from ruvmlx.kernels.library import functions
from ruvmlx.sampling import Sampler

from .test_engine import GREEDY, request

CHANGED = [
    Sampling(0.9, seed=5, presence_penalty=1.5),
    Sampling(0.9, top_p=0.9, seed=6, frequency_penalty=-0.7, presence_penalty=0.3),
    Sampling(0.0, frequency_penalty=2.0),
    Sampling(1.2, seed=7, logit_bias=((70, 60.0), (71, 60.0), (72, -100.0))),
    Sampling(0.9, seed=8, repetition_penalty=1.7),
    Sampling(0.0, repetition_penalty=0.6, repetition_window=3),
    Sampling(0.8, seed=9, repetition_penalty=1.3, repetition_window=5, presence_penalty=0.5,
             logit_bias=((3, 2.0),)),
]  # fmt: skip


def by_definition(logits: np.ndarray, sampling: Sampling, reply: list[int]) -> np.ndarray:
    """OpenAI's formula, token by token, behind the repetition penalty's."""
    changed, counts = logits.astype(np.float64), Counter(reply)
    window = sampling.repetition_window or len(reply)
    for token in set(reply[len(reply) - min(window, len(reply)) :]):
        factor = sampling.repetition_penalty
        changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    for token, count in counts.items():
        changed[token] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
    return changed.astype(np.float32)


@pytest.mark.parametrize("sampling", CHANGED, ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_tokens_are_drawn_from_the_changed_logits(sampling, together):
    """Against a sampler without options that is given the logits changed by hand. together: the draw as work
    for a decoder's threads, where C draws."""
    rng, reply = np.random.default_rng(0), list[int]()
    draw = Sampler(sampling)
    off = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": (), "repetition_penalty": 1}
    plain = Sampler(replace(sampling, **off))
    for _ in range(60):
        logits = rng.normal(size=97).astype(np.float32)
        before, want = logits.copy(), plain(by_definition(logits, sampling, reply))
        work = draw.work(logits, reply.append) if together else None
        if work is None:
            reply.append(draw(logits))
        else:
            run(work)
        assert reply[-1] == want
        assert (logits == before).all()


def run(work) -> None:
    """What a decoder's threads do with a draw."""
    fields, token = work.fields, C.c_int32()
    how = C.addressof(fields.drawing)
    fields.status = functions(None).draw(fields.logits, fields.vocab, how, fields.scratch, C.addressof(token))
    fields.token = token.value
    work.finish()


def test_a_token_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match="names token 97; the model has tokens 0 to 96"):
        Sampler(Sampling(logit_bias=((97, 1.0),)))(np.zeros(97, np.float32))


def changed_requests():
    return [
        request(prompt=f"request {i} " + "and so on " * (i % 3), max_new_tokens=20 + i, sampling=sampling)
        for i, sampling in enumerate([*CHANGED, GREEDY, *CHANGED])
    ]


def test_a_batch_gives_the_replies_of_each_alone(each):
    some = changed_requests()
    want = {r.request_id: each.generate(r).token_ids for r in some}
    got = {r.request_id: r.token_ids for r in generate_many(each, some, width=4)}
    assert got == want


def test_each_reply_of_best_of_n_counts_its_own_tokens(engine):
    """A penalty of 2 for each occurrence spreads a greedy reply; the first reply is the one made alone."""
    asked = request(max_new_tokens=30, sampling=Sampling(0.5, seed=3, frequency_penalty=2.0))
    requests = requests_for(asked, 3)
    best = BestOf(engine, requests, None, [None] * 3)
    *_, last = Scheduler(engine).stream(asked, lambda: best)
    response = last.response
    assert response.token_ids == engine.generate(asked).token_ids
    for run in best.others:
        alone = engine.generate(replace(asked, sampling=run.request.sampling))
        assert run.ids == alone.token_ids


def test_mlx_takes_single_steps(tiny, engine):
    """The stream draws ahead of its reader, so a reply with penalties does not use it."""
    backend = MLXBackend(tiny, device="cpu", chunk=64)
    backend.streams = True
    mlx = LLMInferenceEngine(tiny, backend)
    for sampling in CHANGED:
        asked = request(max_new_tokens=25, sampling=sampling)
        run = mlx.run(asked)
        assert isinstance(run.source, StepSource)
        *_, last = run.chunks()
        assert last.response.token_ids == engine.generate(asked).token_ids


class LogitsRecorder:
    def __init__(self):
        self.logits = []

    def add(self, hidden, logits, token):
        self.logits.append(logits.copy())


def test_traces_and_logprobs_are_of_the_models_own_logits(engine):
    """The same forced tokens with and without penalties: the recorder gets the same logits, up to rounding
    of a prompt whose beginning was read before."""
    forced = ((70, 100.0),)
    plain = request(max_new_tokens=9, logprobs=2, sampling=Sampling(0.0, logit_bias=forced))
    seen = [LogitsRecorder(), LogitsRecorder()]
    one = engine.generate(plain, recorder=seen[0])
    two = engine.generate(
        replace(plain, sampling=Sampling(0.0, logit_bias=forced, presence_penalty=2)), recorder=seen[1]
    )
    assert one.token_ids == two.token_ids == [70] * 9
    np.testing.assert_allclose(seen[0].logits, seen[1].logits, atol=1e-5)
    for a, b in zip(one.logprobs, two.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-5) and a.logprob < -1

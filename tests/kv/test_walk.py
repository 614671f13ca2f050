"""Trim, fork, regenerate and cancel at random points, through the engine: no page is lost, and the next
tokens are those of a run that never had a cache."""

import random
import threading

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.perplexity import kl_divergence
from ruvmlx.kv.policy import F16, TIERED, TierPolicy
from ruvmlx.models.config.model import Model
from ruvmlx.sampling import log_softmax

SMALL = TierPolicy("tiered", (64, 128))


class Chat:
    """One session that is prompted, stopped, cut, and compared."""

    def __init__(self, engine: LLMInferenceEngine, rng: random.Random, longest: int, start: int):
        self.engine, self.rng, self.longest, self.start = engine, rng, longest, start
        self.prompt = self.new_tokens(start)

    def new_tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(3, 250) for _ in range(n)]

    def step(self) -> None:
        """Go on, go back or say something else; then answer, perhaps stopped half way."""
        match self.rng.choice(("more", "more", "edit", "same", "cancel")):
            case "more":
                self.prompt = self.prompt + self.new_tokens(self.rng.randrange(1, 90))
            case "edit":
                self.prompt = self.prompt[: self.rng.randrange(1, len(self.prompt) + 1)] + self.new_tokens(9)
            case "cancel":
                self.answer(cancel_after=self.rng.randrange(1, 6))
                return
        if len(self.prompt) > self.longest:
            self.prompt = self.prompt[: self.start + self.rng.randrange(-20, 50)]
        self.answer()

    def answer(self, cancel_after: int = 0) -> None:
        request = GenerationRequest(
            input_ids=self.prompt,
            session_id="walk",
            max_new_tokens=self.rng.randrange(1, 12),
            sampling=Sampling(temperature=0),
            ignore_eos=True,
            cancel=threading.Event(),
        )
        for chunk in self.engine.stream(request):
            if cancel_after and chunk.generated >= cancel_after:
                request.cancel.set()
            if chunk.response is not None:
                self.prompt = self.prompt + chunk.response.token_ids

    def compare(self, policy: TierPolicy) -> tuple[float, bool]:
        """After one more token, this session's cache against an uncached run: KL, and whether the likeliest
        next token is the same, or as good as tied."""
        session, backend = self.engine.sessions.get_or_create("walk"), self.engine.backend
        assert session.cache.offset == len(session.tokens)
        probe = self.new_tokens(1)
        here = log_softmax(backend.prefill(probe, session.cache.fork()).logits)
        there = log_softmax(backend.prefill(session.tokens + probe, backend.new_cache(policy)).logits)
        tied = there.max() - there[here.argmax()] < TIE[policy.name]
        return kl_divergence(there, here), bool(here.argmax() == there.argmax() or tied)


# Nats. How a prompt was cut into calls decides which tokens saw an older one in fewer bits: a tiered cache
# and an uncached run are not the same to the last bit.
TIE = {"f16": 0.01, "tiered": 0.1}
WORST_KL = {"f16": 1e-4, "tiered": 0.02}


@pytest.mark.parametrize("policy", [F16, SMALL], ids=["f16", "tiered"])
def test_a_thousand_points(tiny, policy, full):
    walk(tiny, NativeBackend(tiny, threads=1), policy, 1000 if full else 150, longest=400)


def test_the_starter_in_all_three_tiers(starter, full):
    """Edits and stops far behind the warm tier's end, with the real policy."""
    walk(starter, NativeBackend(starter), TIERED, 60 if full else 6, longest=2600, start=2300)


def walk(
    model: Model, backend: NativeBackend, policy: TierPolicy, points: int, longest: int, start: int = 40
) -> None:
    engine = LLMInferenceEngine(model, backend, policy)
    chat = Chat(engine, random.Random(points), longest, start)
    found = []
    for _ in range(points):
        chat.step()
        found.append(chat.compare(policy))
    kl = np.array([k for k, _ in found])
    print(
        f"\n{policy.name}: {points} points, KL to an uncached run: mean {kl.mean():.1e}, most {kl.max():.1e}"
    )
    assert all(same for _, same in found)
    assert kl.max() < WORST_KL[policy.name]
    engine.sessions.clear()
    assert backend.pool.pages == [0, 0, 0] and backend.pool.nbytes == 0

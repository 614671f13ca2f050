"""Check the cost model of drafts with a draft model whose guesses are right with a known probability.

    python -m tests.research.planted_drafts [--model M] [--threads N] [--depth 4] [--rounds N]

The guesses are the tokens of the plain reply. Each guess is right with a probability of AGREEMENTS, by
chance. A step of this draft model takes no time. A check of k guesses takes 1 + slope k plain steps, and
gives the guesses before the first wrong one and one token more (Leviathan et al. 2023). No check crosses the
end of a KV page. The expected speed follows from these three rules and from the slope. The script measures
the slope apart from the replies, with calls of k guesses and of none in turns. It prints the measured and the
expected speed, and exits with 1 if they differ by more than LIMIT. Times are processor times with one thread,
else times on the clock.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.draft_length import Acceptance, FixedLength
from ruvmlx.engine.draft_model import CONFIDENCE_PRIOR, CONFIDENCES, DraftModel
from ruvmlx.engine.prompt_lookup import PromptLookup
from ruvmlx.kv.policy import TIERED
from ruvmlx.models.config.model import Message
from ruvmlx.models.load import load_model
from ruvmlx.tiers import PAGE

from .drafts import decode_seconds, prompts

AGREEMENTS = (0.6, 0.8, 0.95)
LIMIT = 0.15
QUESTIONS, TOKENS = 6, 200
CALLS = 40  # calls of each kind for the slope


class PlantedModel(DraftModel):
    """A draft model that knows the reply."""

    def __init__(self, prompt: Sequence[int], reply: Sequence[int], agreement: float):
        self.acceptance = Acceptance(CONFIDENCES, CONFIDENCE_PRIOR)
        self.seconds, self._rest, self._pause = 0.0, 0, 0
        self._reply, self._start = reply, len(prompt)
        self._agreement, self._random = agreement, random.Random(5)

    def _guesses(self, tokens: Sequence[int], longest: int) -> Iterator[tuple[int, float]]:
        for token in self._reply[len(tokens) - self._start :]:
            yield (token if self._random.random() < self._agreement else 0), 1.0


def measured_slope(backend: NativeBackend, depth: int, clock) -> float:
    """Return the added time of each guess of a check, in plain steps."""
    cache = backend.new_cache(TIERED)
    backend.prefill(list(range(100, 356)), cache)
    times: dict[int, list[float]] = {0: [], depth: []}
    for turn in range(2 * CALLS):
        guesses = list(range(500, 500 + (turn % 2) * depth))
        begun = clock()
        if guesses:
            backend.decode_drafted(400 + turn, guesses, cache)
        else:
            backend.decode(400 + turn, cache)
        if cache.offset % 64 < 64 - depth:  # all guesses fit into the newest page
            times[len(guesses)].append(clock() - begun)
    plain, check = (statistics.median(some) for some in times.values())
    return (check / plain - 1) / depth


def expected_speed(agreement: float, slope: float, depth: int, start: int) -> float:
    """Return the speed of replies of TOKENS tokens after a prompt of `start` tokens, as a multiple of plain
    decoding: the mean of many simulated replies."""
    chance, cost, replies = random.Random(11), 0.0, 400
    for _ in range(replies):
        written = 1
        while written < TOKENS:
            room = PAGE - 1 - (start + written - 1) % PAGE
            guesses = min(depth, room, TOKENS - written)
            cost += 1 + slope * guesses
            right = 0
            while right < guesses and chance.random() < agreement:
                right += 1
            written += right + 1
    return (TOKENS - 1) * replies / cost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args()
    model = load_model(flags.model)
    backend = NativeBackend(model, threads=flags.threads)
    clock = time.process_time if flags.threads == 1 else time.perf_counter
    PromptLookup.draft = lambda *_: None  # type: ignore[method-assign] - only the planted guesses count
    engine = LLMInferenceEngine(model, backend, TIERED, speculate="off")
    slope = measured_slope(backend, flags.depth, clock)
    print(f"a guess adds {slope:.2f} steps to a check of {flags.depth} ({backend.kernels})", flush=True)
    asked = [
        GenerationRequest(
            messages=[Message("user", prompt.text)],
            sampling=Sampling(0.0),
            max_new_tokens=TOKENS,
            ignore_eos=True,
        )
        for prompt in prompts(QUESTIONS)
        if prompt.kind == "question"
    ]
    worst = 0.0
    for agreement in AGREEMENTS:
        plain = drafted = 0.0
        for one in asked:
            fastest = [float("inf")] * 2
            for _ in range(flags.rounds):
                engine.draft_length = None
                seconds, want = decode_seconds(engine, one, flags.threads == 1)
                fastest[0] = min(fastest[0], seconds)
                engine.draft_length = FixedLength(flags.depth)
                engine.draft_model = PlantedModel(engine.prompt_ids(one), want.token_ids, agreement)
                seconds, got = decode_seconds(engine, one, flags.threads == 1)
                fastest[1] = min(fastest[1], seconds)
                assert got.token_ids == want.token_ids
            plain, drafted = plain + fastest[0], drafted + fastest[1]
        start = len(engine.prompt_ids(asked[0]))
        expected, measured = expected_speed(agreement, slope, flags.depth, start), plain / drafted
        worst = max(worst, abs(measured / expected - 1))
        print(f"agreement {agreement:.2f}: {measured:.2f}x measured, {expected:.2f}x expected", flush=True)
    print(f"largest difference {worst:.0%} (limit {LIMIT:.0%})")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()

"""This module measures how fast a stored reply is decoded again. The tokens are known, so nothing is drawn,
and each setting of the engine decodes the same tokens. The settings take turns, so that a machine that is
slow for another reason is slow for all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ..backends.base import Backend, KVCache
from ..engine import LLMInferenceEngine
from ..engine.drafts import new_drafts
from ..pausing import Pause

Clock = Callable[[], float]  # seconds

PIECE = 16  # the number of prompt tokens that the model reads between two calls of `pause`
MAX_PROMPT = 512  # the maximum number of prompt tokens that are read, the newest ones
MAX_REPLY, LEAST_REPLY = 96, 16  # the maximum and the minimum number of reply tokens that are decoded
SEGMENT_SECONDS = 1.0  # about the time in which one setting decodes a reply once
ROUNDS = 3  # the number of times that each setting decodes each reply


@dataclass(frozen=True)
class StoredTokens:
    """The tokens of a stored reply, and of the prompt before it."""

    prompt: list[int]
    reply: list[int]


class ReplyReplay:
    """A reply that can be decoded again from the end of its prompt."""

    def __init__(self, engine: LLMInferenceEngine, stored: StoredTokens, pause: Pause, clock: Clock):
        self._engine, self._pause, self._clock = engine, pause, clock
        self._prompt, self._reply = stored.prompt[-MAX_PROMPT:], stored.reply[:MAX_REPLY]
        self._cache = engine.backend.new_cache(engine.sessions.policy)
        for at in range(0, len(self._prompt), PIECE):
            pause()
            engine.backend.prefill(self._prompt[at : at + PIECE], self._cache)

    def shorten(self, tokens_per_second: float) -> None:
        """Decode only so many tokens from now on as take about SEGMENT_SECONDS."""
        most = max(LEAST_REPLY, int(tokens_per_second * SEGMENT_SECONDS))
        self._reply = self._reply[:most]

    def speed(self) -> float:
        """Decode the reply as the engine decodes it now, with drafts if they are on. Return the tokens per
        second."""
        engine, cache = self._engine, self._cache.fork()
        drafts = new_drafts(engine, self._prompt, (), None)
        seconds = 0.0
        for token in self._reply:
            self._pause()
            begun = self._clock()
            if drafts is not None:
                drafts.add(token)
                drafts.step(token, cache, None)
            else:
                engine.backend.decode(token, cache)
            seconds += self._clock() - begun
        return len(self._reply) / seconds if seconds > 0 else 0.0

    def speed_together(self, width: int, steps: int) -> float:
        """Decode `width` copies of the reply in one batch, `steps` tokens of each. Return the tokens per
        second of all copies together."""
        caches: list[KVCache] = [self._cache.fork() for _ in range(width)]
        return _batch_speed(self._engine.backend, self._reply[:steps], caches, self._pause, self._clock)


def _batch_speed(
    backend: Backend, tokens: Sequence[int], caches: list[KVCache], pause: Pause, clock: Clock
) -> float:
    seconds = 0.0
    for token in tokens:
        pause()
        begun = clock()
        backend.decode_batch([token] * len(caches), caches)
        seconds += clock() - begun
    return len(tokens) * len(caches) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True)
class Comparison:
    """The measured speeds of the setting in force (`before`) and of another one (`after`), in tokens per
    second.

    gain: the median of the ratios of the two speeds, each from one round with one reply
    wins: the share of these ratios that are above 1
    """

    value: str
    before: float
    after: float
    gain: float
    wins: float


def compare(
    replays: Sequence[ReplyReplay],
    values: Sequence[str],
    apply: Callable[[str], None],
    count: int = ROUNDS,
) -> list[Comparison]:
    """Decode each reply with each value of a knob, in turns, and return a comparison of each value with the
    first one.

    values: the value in force, then the values to try
    apply: a function that puts a value in force
    count: the number of times that each reply is decoded with each value
    """
    rounds: list[dict[str, float]] = []
    for number in range(count):
        for replay in replays:
            order = values if number % 2 == 0 else list(reversed(values))
            rounds.append({value: _speed_with(replay, value, apply) for value in order})
    return [_comparison(values[0], value, rounds) for value in values[1:]]


def _comparison(first: str, value: str, rounds: Sequence[dict[str, float]]) -> Comparison:
    ratios = [speeds[value] / speeds[first] if speeds[first] else 1.0 for speeds in rounds]
    before, after = (median(speeds[one] for speeds in rounds) for one in (first, value))
    return Comparison(value, before, after, median(ratios), sum(one > 1 for one in ratios) / len(ratios))


def _speed_with(replay: ReplyReplay, value: str, apply: Callable[[str], None]) -> float:
    apply(value)
    return replay.speed()


SYSTEM_CLOCK: Clock = time.perf_counter

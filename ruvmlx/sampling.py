"""Draw the next token from logits.

`FILTERS` and top_k say which ids may be drawn, by the distribution at temperature 1; one of those is drawn at
the given temperature. Not mlx-lm's sampler: the native backend has no MLX, and a seed must give the same
reply whatever else drew random numbers in this process. `backends/mlx/sampler.py` walks the same filters on
the GPU. With the filters of IN_C alone, C draws (neon/src/draw.c); the NumPy code here is its slow twin, and
draws when another filter is in force.

Penalties, logit_bias and a constraint change a copy of the logits before all this. Traces and the logprobs
of a response stay those of the model itself: ratings move what the model says, not what was taken off it.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np

from .errors import UsageError
from .kernels.draw import TokenDrawing
from .kernels.replies import ReplyWork
from .settings import SAMPLING, SPECS
from .settings.setting_spec import SettingSpec

# Log-probabilities down to which ids are sorted at first: all of 49,152 take 0.8 ms to sort, and no more than
# e^7 = 1,096 ids can have over e^-7.
_FLOORS = (-7.0, -10.0, -np.inf)


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    presence_penalty is taken off the logit of each token that the reply has already, frequency_penalty once
    for each time that it has it (OpenAI's definitions); logit_bias: (token id, what its logit gets).
    repetition_penalty, before these: the logit of each token among the reply's last `repetition_window` ones
    (0: all) is divided by it if it is over 0, else multiplied; 1 is off (Keskar et al. 2019, for the reply).
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    repetition_window: int = 0

    @property
    def changes_logits(self) -> bool:
        has_penalty = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(has_penalty or self.logit_bias)


class ReplyOptions(TypedDict, total=False):
    """What one reply may ask for. What is not given comes from the settings, then from the model.

    temperature: 0 is greedy. top_p: nucleus mass, over 0 and at most 1. top_k: 0 is all. min_p: least share
    of the likeliest token's probability. seed: the same seed, the same reply. max_tokens: longest reply.
    presence_penalty, frequency_penalty: from -2 to 2; over 0, tokens that the reply has already become less
    likely. logit_bias: (token id, bias from -100 to 100) pairs. repetition_penalty: from 0.1 to 2; over 1,
    the last repetition_window tokens of the reply (0: all) become less likely by this factor. adapter: name
    of the one that answers, for this reply alone; None or "none": the original model does.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    repetition_penalty: float
    repetition_window: int
    adapter: str | None


NO_SAMPLING = {"max_tokens", "adapter"}  # options of a reply that are no fields of Sampling


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError for a value that means nothing."""
    for name in SAMPLING:
        _check(name.replace("_", "-"), getattr(sampling, name), SPECS[name])
    _check("seed", sampling.seed, _COUNT)
    _check("repetition-window", sampling.repetition_window, _COUNT)
    for token, bias in sampling.logit_bias:
        _check(f"logit-bias of token {token}", bias, _BIAS)


def _check(name: str, value: float | None, rule: SettingSpec) -> None:
    if value is not None and not rule.allows(value):
        raise UsageError(f"{name} is {value}; it must be {rule.allowed}.")


_COUNT = SettingSpec(int, "", least=0)
_BIAS = SettingSpec(float, "", least=-100, most=100)


@dataclass(frozen=True)
class Distribution:
    """What a filter sees of n ids, in NumPy or in MLX.

    logits: [..., n], log-probabilities at temperature 1 plus a constant. xp: numpy or mlx.core; use functions
    that both have. before(p): p [..., n] -> [..., n], the sum of the probabilities before each.
    """

    logits: Any
    xp: Any
    softmax: Callable[[Any], Any]
    before: Callable[[Any], Any]

    @cached_property
    def p(self) -> Any:
        """Probabilities [..., n]."""
        return self.softmax(self.logits)


@dataclass(frozen=True)
class Filter:
    """Ids that an option of `Sampling` excludes. All filters see the same distribution; an id may be drawn if
    none of them excludes it.

    option: the field of Sampling. off: its value that excludes nothing. keep(distribution, value): bool
    [..., n]. sorts: the ids must come most likely first, and `keep` is true up to one of them; it may be
    asked about the most likely alone. Without `sorts`, all ids are there, in any order.
    """

    option: str
    off: float
    keep: Callable[[Distribution, Any], Any]
    sorts: bool = False


def _top_p(d: Distribution, mass: float) -> Any:
    """The fewest most likely ids whose probabilities reach this sum."""
    return d.before(d.p) < mass


def _min_p(d: Distribution, share: float) -> Any:
    """Ids with at least this share of the likeliest id's probability."""
    return d.logits >= d.logits.max(axis=-1, keepdims=True) + d.xp.log(share)


FILTERS = (Filter("top_p", 1, _top_p, sorts=True), Filter("min_p", 0, _min_p))


IN_C = ("top_p", "min_p")  # filters that the C kernel applies


def filters_of(sampling: Sampling, sorts: bool) -> list[tuple[Filter, Any]]:
    """The filters in force that do or do not need sorted ids, each with its value."""
    values = [(f, getattr(sampling, f.option)) for f in FILTERS if f.sorts == sorts]
    return [(f, value) for f, value in values if value != f.off]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[V] -> [V] float32."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)


def top_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest logits, largest first; ties by id."""
    if k >= logits.size:
        return largest_first(logits)
    least = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > least)
    ids = np.r_[above, np.flatnonzero(logits == least)[: k - above.size]]
    return ids[np.lexsort((ids, -logits[ids]))]


def largest_first(values: np.ndarray) -> np.ndarray:
    """np.argsort(-values, kind="stable") of float32 [n] without NaN, five times faster for 49,152: NumPy is
    quick with integers. The upper 32 bits are those of -value, changed to have its order; the lower ones the
    index."""
    bits = (0.0 - values).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | 0x80000000)
    keys = ordered.astype(np.uint64) << 32 | np.arange(values.size, dtype=np.uint64)
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(np.int64)


def _before(p: np.ndarray) -> np.ndarray:
    """[n] float32 -> [n] float64: the sum of those before each."""
    sums = np.zeros(p.size)
    np.cumsum(p[:-1], out=sums[1:])
    return sums


def _most_likely(logits: np.ndarray, logprobs: np.ndarray, filters: list[tuple[Filter, Any]]) -> np.ndarray:
    """Ids that the filters of sorted ids keep, most likely first; ties by id. Sorts as few as it can."""
    for floor in _FLOORS:
        ids = np.flatnonzero(logprobs >= floor)
        ids = ids[largest_first(logits[ids])]
        head = Distribution(logprobs[ids], np, np.exp, _before)
        kept = min(np.count_nonzero(f.keep(head, value)) for f, value in filters)
        if kept < ids.size:
            break
    return ids[:kept]


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn and their log-probabilities at temperature 1."""
    logprobs = log_softmax(logits)
    by_rank, others = (filters_of(sampling, sorts) for sorts in (True, False))
    ids = _most_likely(logits, logprobs, by_rank) if by_rank else np.arange(logits.size)
    if not (by_rank or others or sampling.top_k):
        return ids, logprobs
    everything = Distribution(logprobs, np, np.exp, _before)
    for f, value in others:
        ids = ids[f.keep(everything, value)[ids]]
    if sampling.top_k > 0:  # the most likely first, also where k is more than there are
        ids = ids[top_ids(logits[ids], sampling.top_k)]
    return ids, logprobs[ids]


def drawn(logits: np.ndarray, sampling: Sampling, u: float) -> int:
    """The first candidate at which the sum of probabilities exceeds u times the whole sum; 0 <= u < 1."""
    ids, logprobs = candidates(logits, sampling)
    scaled = logprobs.astype(np.float64) / sampling.temperature
    mass = np.cumsum(np.exp(scaled - scaled.max()))
    at = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return int(ids[min(at, ids.size - 1)])


def is_drawn_in_c(sampling: Sampling) -> bool:
    """Does the C kernel apply every filter in force?"""
    return all(f.option in IN_C for sorts in (True, False) for f, _ in filters_of(sampling, sorts))


class TokenRule(Protocol):
    """Says which tokens of one reply may come next (engine/constraint.py)."""

    def restrict(self, logits: np.ndarray) -> None:
        """Set the logits [V] of tokens that may not come next to -inf, in place. At least one may come."""

    def take(self, token: int) -> None:
        """The reply goes on with this token."""


class LogitChanges:
    """Penalties and logit_bias of one reply: logits [V] -> logits to draw from.

    changed[j] + bias[j] - count[j] * frequency_penalty - (count[j] > 0) * presence_penalty
    count[j]: how often the reply has token j
    changed[j]: for tokens in the window logit[j] / repetition_penalty if it is over 0, else
    logit[j] * repetition_penalty; for all others logit[j]
    """

    def __init__(self, sampling: Sampling):
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition = np.float32(sampling.repetition_penalty)
        self._counts: Counter[int] = Counter()
        self._recent = deque[int](maxlen=sampling.repetition_window) if sampling.repetition_window else None
        self._bias_ids = np.array([i for i, _ in sampling.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)

    def restrict(self, logits: np.ndarray) -> None:
        self._check(logits.size)
        if self._repetition != 1:
            self._restrict_repeated(logits)
        np.add.at(logits, self._bias_ids, self._biases)
        ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        logits[ids] -= counts * np.float32(self._frequency) + np.float32(self._presence)

    def _restrict_repeated(self, logits: np.ndarray) -> None:
        repeated = list(self._counts if self._recent is None else set(self._recent))
        found = logits[repeated]
        logits[repeated] = np.where(found > 0, found / self._repetition, found * self._repetition)

    def take(self, token: int) -> None:
        self._counts[token] += 1
        if self._recent is not None:
            self._recent.append(token)

    def _check(self, vocab: int) -> None:
        bad = self._bias_ids[(self._bias_ids < 0) | (self._bias_ids >= vocab)]
        if bad.size:
            raise UsageError(f"logit-bias names token {bad[0]}; the model has tokens 0 to {vocab - 1}.")


class Sampler:
    """Draws tokens for one reply; the same seed gives the same draws."""

    def __init__(self, sampling: Sampling, rule: TokenRule | None = None):
        """rule: what a constraint allows; it sees every token that was drawn."""
        check_sampling(sampling)
        self.sampling = sampling
        self._rng = np.random.default_rng(sampling.seed)
        changes: list[TokenRule] = [LogitChanges(sampling)] if sampling.changes_logits else []
        self._rules = [*changes, rule] if rule else changes
        s = sampling
        in_c = s.temperature > 0 and is_drawn_in_c(s)
        self._kernel = TokenDrawing(s.temperature, s.top_p, s.min_p, s.top_k) if in_c else None

    def __call__(self, logits: np.ndarray) -> int:
        """logits [V] -> token id."""
        token = self._drawn(self._apply_rules(logits))
        self._took(token)
        return token

    def work(self, logits: np.ndarray, drawn: Callable[[int], None]) -> ReplyWork | None:
        """A draw, to be run together with those of other replies; `drawn` then receives the token. None if
        C does not draw with these options."""

        def done(token: int) -> None:
            self._took(token)
            drawn(token)

        if self._kernel is None:
            return None
        return self._kernel.work(self._apply_rules(logits), self._rng.random(), done)

    def _apply_rules(self, logits: np.ndarray) -> np.ndarray:
        """What the token is drawn from: the logits themselves, or a changed copy."""
        if self._rules:
            logits = logits.copy()
        for rule in self._rules:
            rule.restrict(logits)
        return logits

    def _drawn(self, logits: np.ndarray) -> int:
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        u = self._rng.random()
        return self._kernel(logits, u) if self._kernel else drawn(logits, self.sampling, u)

    def _took(self, token: int) -> None:
        for rule in self._rules:
            rule.take(token)

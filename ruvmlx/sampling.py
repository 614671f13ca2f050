"""This module draws the next token from logits.

`FILTERS` and top_k select the candidate ids by the distribution at temperature 1. The sampler then draws one
candidate at the given temperature. With the temperature before the filters, ratings change replies less
(docs/first-replies.md). ruvmlx does not use mlx-lm's sampler: the native backend has no MLX, and a
seed must give the same reply even if other code of this process draws random numbers.
`backends/mlx/sampler.py` applies the same filters on the GPU. On the CPU, if the temperature is not 0 and the
reply uses only the filters in `IN_C`, the C code in neon/src/draw.c draws the tokens. If a reply uses another
filter, the slower NumPy code of this module draws the tokens.

Penalties, logit_bias and a constraint change a copy of the logits before the draw. The logprobs of a response
and the stored activations for training come from the unchanged logits, because ratings train the model and
not the penalties.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np

from .errors import UsageError
from .kernels.draw import TokenDrawing
from .kernels.replies import ReplyWork
from .settings import SAMPLING, SPECS
from .settings.setting_spec import SettingSpec

# The sampler sorts only the token ids whose log-probability is above the first of these values. If the
# filters need more ids, the sampler tries the next value. To sort all 49,152 ids takes 0.8 ms; at most e^7 =
# 1,096 ids have a probability of more than e^-7.
_FLOORS = (-7.0, -10.0, -np.inf)


@dataclass(frozen=True)
class Sampling:
    """The sampling options of one reply. temperature 0 always takes the most likely token; top_k 0, top_p 1
    and min_p 0 switch these filters off.

    presence_penalty is subtracted once from the logit of each token that is in the reply; frequency_penalty
    is subtracted once for each occurrence (OpenAI's definitions). logit_bias: pairs of a token id and the
    number that is added to its logit. repetition_penalty changes, before the other penalties, the logits of
    the last `repetition_window` tokens of the reply (0: all tokens): a positive logit is divided by the
    penalty, a negative logit is multiplied by the penalty; 1 is off (Keskar et al. 2019, for the reply only).
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
    """The options that a caller can set for one reply. An option that the caller does not set gets its value
    from the settings, else from the model.

    temperature: 0 is greedy.
    top_p: the probability mass of nucleus sampling, over 0 and at most 1.
    top_k: the number of most likely candidates; 0 is all.
    min_p: the minimum probability as a share of the likeliest token's probability.
    seed: with the same seed, prompt, model, adapter, options and backend, the reply is the same, apart from
        rounding errors if other replies run at the same time.
    max_tokens: the maximum length of the reply in tokens.
    presence_penalty, frequency_penalty: from -2 to 2; a value over 0 makes tokens of the reply less likely.
    logit_bias: pairs of a token id and a bias from -100 to 100.
    repetition_penalty: from 0.1 to 2; a value over 1 makes the last repetition_window tokens of the reply (0:
        all) less likely (`Sampling`).
    adapter: the name of the adapter for this reply alone; None or "none": the model without an adapter
        answers.
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


NO_SAMPLING = {"max_tokens", "adapter"}  # options of a reply that are not fields of Sampling


def recommended_options(values: Mapping[str, float]) -> dict[str, Any]:
    """Return the values that are options of `Sampling`. values: the sampling that a model's makers recommend,
    which can have other options, too."""
    found: dict[str, Any] = {k: v for k, v in values.items() if k in Sampling.__dataclass_fields__}
    return found | {"top_k": int(found["top_k"])} if "top_k" in found else found


def check_sampling(sampling: Sampling) -> None:
    """Raise UsageError if a value is outside its allowed range."""
    for name in SAMPLING:
        _check(name.replace("_", "-"), getattr(sampling, name), SPECS[name])
    _check("seed", sampling.seed, _COUNT)
    _check("repetition-window", sampling.repetition_window, _COUNT)
    for token, bias in sampling.logit_bias:
        _check(f"logit-bias of token {token}", bias, _BIAS)


def _check(name: str, value: float | None, rule: SettingSpec) -> None:
    if value is not None and not rule.allows(value):
        raise UsageError(f"{name} is {value}; it must be {rule.allowed_values}.")


_COUNT = SettingSpec(int, "", least=0)
_BIAS = SettingSpec(float, "", least=-100, most=100)


@dataclass(frozen=True)
class Distribution:
    """The distribution over n token ids that a filter receives, as arrays of NumPy or of MLX.

    logits: [..., n], log-probabilities at temperature 1 plus a constant.
    xp: the module numpy or mlx.core; a filter may use only functions that both modules have.
    before(p): for each id, the sum of the probabilities p [..., n] of the ids before this id.
    """

    logits: Any
    xp: Any
    softmax: Callable[[Any], Any]
    before: Callable[[Any], Any]

    @cached_property
    def p(self) -> Any:
        """Return the probabilities [..., n]."""
        return self.softmax(self.logits)


@dataclass(frozen=True)
class Filter:
    """A rule by which an option of `Sampling` excludes token ids. All filters receive the same distribution.
    A token id is a candidate for the draw if no filter excludes it.

    option: the name of the field of Sampling.
    off: the value of the option that excludes no id.
    keep(distribution, value): bool [..., n], True for the ids that stay.
    sorts: True if `keep` needs the ids in order, the most likely id first; `keep` then keeps a number of the
        first ids and excludes all later ids, and the distribution can be cut after the most likely ids. If
        sorts is False, `keep` receives all ids in any order.
    """

    option: str
    off: float
    keep: Callable[[Distribution, Any], Any]
    sorts: bool = False


def _top_p(d: Distribution, mass: float) -> Any:
    """Keep the most likely ids: as many as are needed for a sum of probabilities of at least `mass`."""
    return d.before(d.p) < mass


def _min_p(d: Distribution, share: float) -> Any:
    """Keep the ids whose probability is at least `share` times the probability of the likeliest id."""
    return d.logits >= d.logits.max(axis=-1, keepdims=True) + d.xp.log(share)


FILTERS = (Filter("top_p", 1, _top_p, sorts=True), Filter("min_p", 0, _min_p))


IN_C = ("top_p", "min_p")  # filters that the C kernel applies


def filters_of(sampling: Sampling, sorts: bool) -> list[tuple[Filter, Any]]:
    """Return the filters that exclude ids with these options and whose field `sorts` equals the parameter,
    each with its option's value."""
    values = [(f, getattr(sampling, f.option)) for f in FILTERS if f.sorts == sorts]
    return [(f, value) for f, value in values if value != f.off]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log-probabilities [V] in float32 of logits [V]. V: the size of the vocabulary."""
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)


def top_ids(logits: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the k largest logits, the largest first. Among equal logits the smaller id comes
    first."""
    if k >= logits.size:
        return largest_first(logits)
    least = np.partition(logits, -k)[-k]
    above = np.flatnonzero(logits > least)
    ids = np.r_[above, np.flatnonzero(logits == least)[: k - above.size]]
    return ids[np.lexsort((ids, -logits[ids]))]


def largest_first(values: np.ndarray) -> np.ndarray:
    """Return np.argsort(-values, kind="stable") of float32 [n] without NaN. This function is five times
    faster than np.argsort for n = 49,152, because NumPy sorts integers faster. The upper 32 bits of a sort
    key are the bits of -value, changed so that the keys sort in the order of -value. The lower 32 bits of a
    sort key are the index."""
    bits = (0.0 - values).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | 0x80000000)
    keys = ordered.astype(np.uint64) << 32 | np.arange(values.size, dtype=np.uint64)
    keys.sort()
    return (keys & 0xFFFFFFFF).astype(np.int64)


def _before(p: np.ndarray) -> np.ndarray:
    """Return, for each of the values p [n], the sum of the values before this value, in float64 [n]."""
    sums = np.zeros(p.size)
    np.cumsum(p[:-1], out=sums[1:])
    return sums


def _most_likely(logits: np.ndarray, logprobs: np.ndarray, filters: list[tuple[Filter, Any]]) -> np.ndarray:
    """Return the token ids that the filters with sorts=True keep, the most likely id first. Of ids with equal
    logits, the smaller id comes first. The function first sorts only the ids whose log-probability is above
    the first floor (`_FLOORS`), and sorts more ids if the filters need them."""
    for floor in _FLOORS:
        ids = np.flatnonzero(logprobs >= floor)
        ids = ids[largest_first(logits[ids])]
        head = Distribution(logprobs[ids], np, np.exp, _before)
        kept = min(np.count_nonzero(f.keep(head, value)) for f, value in filters)
        if kept < ids.size:
            break
    return ids[:kept]


def candidates(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidate ids and their log-probabilities at temperature 1."""
    logprobs = log_softmax(logits)
    by_rank, others = (filters_of(sampling, sorts) for sorts in (True, False))
    ids = _most_likely(logits, logprobs, by_rank) if by_rank else np.arange(logits.size)
    if not (by_rank or others or sampling.top_k):
        return ids, logprobs
    everything = Distribution(logprobs, np, np.exp, _before)
    for f, value in others:
        ids = ids[f.keep(everything, value)[ids]]
    if sampling.top_k > 0:  # top_k always sorts the ids, even if top_k is larger than the number of ids
        ids = ids[top_ids(logits[ids], sampling.top_k)]
    return ids, logprobs[ids]


def token_weights(logits: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return the candidate ids, and for each candidate a weight in proportion to its probability at the
    temperature. The largest weight is 1."""
    ids, logprobs = candidates(logits, sampling)
    scaled = logprobs.astype(np.float64) / sampling.temperature
    return ids, np.exp(scaled - scaled.max())


def choose_token(ids: np.ndarray, weights: np.ndarray, u: float) -> int:
    """Return the first id at which the running sum of the weights exceeds u times the sum of all weights. u:
    a uniform random number, 0 <= u < 1."""
    mass = np.cumsum(weights)
    at = int(np.searchsorted(mass, u * mass[-1], side="right"))
    return int(ids[min(at, ids.size - 1)])


def draw_token(logits: np.ndarray, sampling: Sampling, u: float) -> int:
    """Draw a token from logits [V]. u: a uniform random number, 0 <= u < 1."""
    return choose_token(*token_weights(logits, sampling), u)


def is_drawn_in_c(sampling: Sampling) -> bool:
    """Return True if the C kernel can apply every filter that is on."""
    return all(f.option in IN_C for sorts in (True, False) for f, _ in filters_of(sampling, sorts))


class TokenRule(Protocol):
    """A rule that changes the logits of one reply's next token, for example a JSON schema
    (engine/constraint.py)."""

    def restrict(self, logits: np.ndarray) -> None:
        """Set the logits [V] of the tokens that the rule forbids to -inf, in place. At least one token stays
        allowed."""

    def take(self, token: int) -> None:
        """Tell the rule that `token` is the next token of the reply."""


class LogitChanges:
    """The penalties and the logit_bias of one reply. This formula gives the new logit of token j:

    changed[j] + bias[j] - count[j] * frequency_penalty - (count[j] > 0) * presence_penalty
    count[j]: the number of times that token j is in the reply
    changed[j]: for tokens in the repetition window, logit[j] / repetition_penalty if logit[j] is over 0, else
    logit[j] * repetition_penalty; for all other tokens logit[j]
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


def numbers_after(sampling: Sampling, draws: int) -> np.random.Generator:
    """Return the generator of the random numbers for the next tokens of a reply. Each token needs one number.
    With this generator, a sampler that takes over a reply draws the tokens that the earlier sampler would
    have drawn.

    draws: the number of tokens that were drawn already
    """
    rng = np.random.default_rng(sampling.seed)
    rng.random(draws if sampling.temperature > 0 else 0)
    return rng


class Sampler:
    """A sampler that draws the tokens of one reply. The same seed and the same logits give the same draws."""

    def __init__(self, sampling: Sampling, rule: TokenRule | None = None, draws: int = 0):
        """rule: a constraint on the tokens, or None; the sampler tells the rule every token that it draws.
        draws: the number of the reply's tokens that another sampler drew before"""
        check_sampling(sampling)
        self.sampling = sampling
        self._rng = numbers_after(sampling, draws)
        changes: list[TokenRule] = [LogitChanges(sampling)] if sampling.changes_logits else []
        self._rules = [*changes, rule] if rule else changes
        s = sampling
        in_c = s.temperature > 0 and is_drawn_in_c(s)
        self._kernel = TokenDrawing(s.temperature, s.top_p, s.min_p, s.top_k) if in_c else None

    def __call__(self, logits: np.ndarray) -> int:
        """Draw one token id from logits [V]."""
        token = self._draw(self._apply_rules(logits))
        self._took(token)
        return token

    def work(self, logits: np.ndarray, drawn: Callable[[int], None]) -> ReplyWork | None:
        """Return the kernel call that draws the next token in the C library. The caller can run this call
        together with the draws of other replies. After the call, the function `drawn` receives the token.
        Return None if the C library cannot draw with these options."""

        def done(token: int) -> None:
            self._took(token)
            drawn(token)

        if self._kernel is None:
            return None
        return self._kernel.work(self._apply_rules(logits), self._rng.random(), done)

    def _apply_rules(self, logits: np.ndarray) -> np.ndarray:
        """Return the logits from which the sampler draws: the logits themselves, or a copy that the rules
        changed."""
        if self._rules:
            logits = logits.copy()
        for rule in self._rules:
            rule.restrict(logits)
        return logits

    def _draw(self, logits: np.ndarray) -> int:
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        u = self._rng.random()
        return self._kernel(logits, u) if self._kernel else draw_token(logits, self.sampling, u)

    def _took(self, token: int) -> None:
        for rule in self._rules:
            rule.take(token)

"""This module measures the KL divergence of an adapted model from the frozen model (the model without any
adapter) on the reference text. The reference text is a few everyday questions with answers, and some prose
(reference_text.py). Learning must leave the model's predictions on the reference text nearly unchanged.

A model reads the reference text once (calibration.py). The probe stores some of the model's hidden states at
the text's tokens. These hidden states are called contexts. The distance of an adapter from the frozen model
needs only a few matrix products over the contexts. So the learner can check the KL cap at every rating.
"""

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..kernels.rating import KLContexts
from ..lora import MicroLoRA
from ..lora.micro_lora import ALPHA
from ..pausing import Pause
from . import reference_text
from .coordinates import Coordinates, pack_columns

_ELEMENTS = 1 << 20  # (context, token) pairs in the `few` contexts; the KL kernel reads these in 0.25 ms
ROWS = 32  # the number of contexts in one call of the output head
_STORED = (
    "contexts", "rows", "counts", "prose", "following", "directions", "tokens", "precision", "features",
    "drift",
)  # fmt: skip
_LARGE = "contexts", "features"


Head = Callable[[np.ndarray], np.ndarray]  # hidden [T, D] -> logits [T, V]


@dataclass(frozen=True)
class Distance:
    """The distance of an adapter from the frozen model (nats per token).

    kl: the mean KL divergence from the frozen model in answers
    rise: the rise of the mean negative log-likelihood of prose, compared with the frozen model
    slope: the derivative of the rise by the share (the factor of lora_b), at a share of 0; 0 if unknown
    """

    kl: float
    rise: float
    slope: float = 0.0


@dataclass(frozen=True)
class ContextGroups:
    """The sizes of the three groups of contexts: contexts in answers, contexts in prose with the largest
    projections onto lora_a, and other contexts in prose.

    counts: [3], the number of contexts in each group
    prose: [], the number of all hidden states in prose. Each context of the second group represents only
        itself. The contexts of the third group represent all remaining states in prose.
    """

    counts: np.ndarray
    prose: np.ndarray

    @property
    def answers(self) -> int:
        return int(self.counts[0])

    def of(self, rows: np.ndarray) -> list[tuple[int, float]]:
        """Return, for each group, (number of the selected contexts, share of the prose that they represent).
        rows: the indices of the selected contexts, ascending."""
        ends = np.searchsorted(rows, np.cumsum(self.counts))
        sizes = np.diff(ends, prepend=0).tolist()
        own = float(self.counts[1] / max(1, self.prose))
        shares = [share if size else 0.0 for size, share in zip(sizes, (0.0, own, 1 - own), strict=True)]
        whole = sum(shares) or 1.0
        return [(size, share / whole) for size, share in zip(sizes, shares, strict=True)]

    @cached_property
    def in_prose(self) -> list[tuple[slice, float]]:
        """For each of the two groups in prose, (indices of its contexts, share of the prose that they
        represent)."""
        (n, _), (most, own), (rest, other) = self.of(np.arange(int(self.counts.sum())))
        parts = (slice(n, n + most), own), (slice(n + most, n + most + rest), other)
        return [(part, share) for part, share in parts if share]


@dataclass
class KLProbe:
    """A KL probe holds the hidden states and probabilities of the frozen model on which an adapter's KL is
    measured. In a probe under a base LoRA (base_probe.py), contexts, drift and head belong to the model with
    the base, and the fields from `frozen` to `rise` compare this model with the frozen model. Shapes: M
    contexts, D hidden size, r rank of lora_a, A movable tokens (ratings may change their logits), V
    vocabulary.

    contexts: [M, D], the hidden states on which distances are measured
    rows: [M], the indices of the contexts among the hidden states of the reference texts that were read
    counts, prose: the numbers that ContextGroups explains
    following: [M], the token that follows each context in its text
    directions: [D, r], the calibrated lora_a
    tokens, eos, precision, features: the fields of Coordinates (coordinates.py)
    drift: [r, A + 1], the gradient of the prose's mean negative log-likelihood by lora_b (prose_drift.py)
    head: the function from hidden states [T, D] to logits [T, V]
    frozen: the frozen model's log-probabilities [m, V] in the `few` contexts; None without a base LoRA
    packed_ratio: [M, A + 1], log(p_base / p_frozen) of each movable token; the last column has the mean of
        this value over all other tokens, weighted by p_base
    rise: the rise of the prose's mean negative log-likelihood under the base (nats per token)
    floor: KL(base || frozen) in answers (nats per token). This KL comes from the base LoRA alone, so no scale
        of the MicroLoRA can lower it.
        `rise` and `floor` are means over all tokens of the reference text (whole_text.py).
    read_texts: the indices of the reference texts that were read; None if all were read
    """

    contexts: np.ndarray
    rows: np.ndarray
    counts: np.ndarray
    prose: np.ndarray
    following: np.ndarray
    directions: np.ndarray
    tokens: np.ndarray
    eos: np.ndarray
    precision: np.ndarray
    features: np.ndarray
    drift: np.ndarray
    head: Head
    frozen: np.ndarray | None = None
    packed_ratio: np.ndarray | None = None
    rise: float = 0.0
    floor: float = 0.0
    read_texts: np.ndarray | None = None
    # The last lora_a that was equal to `directions`. From one rating to the next, lora_a is usually the same
    # array, so `reads` need not compare its numbers again.
    _same: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    @cached_property
    def groups(self) -> ContextGroups:
        return ContextGroups(self.counts, self.prose)

    @cached_property
    def coordinates(self) -> Coordinates:
        return Coordinates(self.tokens, self.eos, self.precision, self.features, self.directions.shape[1])

    @property
    def answers(self) -> int:
        """The number of contexts in answers. `contexts` has the contexts in answers first, then the contexts
        in prose."""
        return self.groups.answers

    @cached_property
    def few(self) -> np.ndarray:
        """The indices [m] of the few contexts in which probabilities of the whole vocabulary are compared."""
        return spread_rows(np.arange(len(self.contexts)), max(4, _ELEMENTS // self.vocab_size))

    @cached_property
    def vocab_size(self) -> int:
        return self.head(self.contexts[:1]).shape[1]

    @cached_property
    def log_probabilities(self) -> np.ndarray:
        """The log-probabilities in the `few` contexts, without MicroLoRA: [m, V] float32."""
        return log_softmax_rows(self.head(self.contexts[self.few]))

    @cached_property
    def packed_probs(self) -> np.ndarray:
        """The probability of each movable token in every context, and in the last column the sum of all other
        tokens' probabilities: [M, A + 1]."""
        return self._packing(lambda: None)

    def _packing(self, pause: Callable[[], None]) -> np.ndarray:
        parts = []
        for i in range(0, len(self.contexts), ROWS):
            rows = softmax_rows(self.head(self.contexts[i : i + ROWS]))
            parts.append(pack_columns(rows, self.tokens))
            pause()
        return np.ascontiguousarray(np.concatenate(parts))

    def look(self, pause: Callable[[], None] = lambda: None) -> None:
        """Call the output head to compute the probabilities that distances need and that are not cached yet.
        `pause` can raise an exception to stop."""
        if "packed_probs" not in vars(self):
            self.packed_probs = self._packing(pause)
        self.probabilities  # noqa: B018 - kept once computed
        pause()

    @cached_property
    def probabilities(self) -> np.ndarray:
        p = np.exp(self.log_probabilities)
        return np.ascontiguousarray(p / p.sum(axis=1, keepdims=True), np.float32)

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """The values log(p_base / p_frozen) [m, V] in the `few` contexts; None without a base LoRA."""
        return None if self.frozen is None else self.log_probabilities - self.frozen

    def prepare(self, pause: Pause | None = None) -> None:
        """Compute the values that ratings read from a cache, so that the first rating need not wait. pause: a
        function that can raise an exception to stop."""
        if "packed_probs" not in vars(self):
            self.packed_probs = self._packing(pause or (lambda: None))
        self._own, self.answered_contexts, self.coordinates.solver  # noqa: B018 - kept once computed

    @cached_property
    def likely(self) -> np.ndarray:
        """The mean probability [A] of each movable token over the contexts in answers. The sum of the
        probabilities is 1."""
        p = self.packed_probs[: self.answers, :-1].mean(axis=0, dtype=np.float64)
        return p / p.sum()

    @cached_property
    def reading(self) -> float:
        """The mean change of a token's logit in answers if the first row of lora_b is 1 for this token."""
        return float(self._projections[: self.answers, 0].mean() * ALPHA / self.directions.shape[1])

    @cached_property
    def answered_contexts(self) -> tuple[np.ndarray, KLContexts]:
        """The contexts in answers [n, D], and their probabilities. Contexts and probabilities come from the
        frozen model, even if this probe is under a base LoRA."""
        n = self.answers
        text = KLContexts(
            self.packed_probs[:n], None, self._projections[:n], self._following_indices[:n], [(n, 0.0)]
        )
        return self.contexts[:n], text

    def answer_contexts(self, adapter: MicroLoRA) -> KLContexts:
        """Return the frozen model's contexts (hidden states) in the answers of the reference text, projected
        onto the adapter's lora_a, with their probabilities. Even if this probe is under a base LoRA, contexts
        and probabilities come from the frozen model."""
        contexts, text = self.answered_contexts
        if self.reads(adapter):
            return text
        return text.read_as(np.ascontiguousarray(contexts @ adapter.lora_a))

    def reads(self, adapter: MicroLoRA) -> bool:
        """Return True if the adapter has the calibrated lora_a."""
        a = adapter.lora_a
        if a is self._same:
            return True
        own = np.array_equal(a, self.directions)
        if own:
            self._same = a
        return own

    def kl(self, adapter: MicroLoRA) -> float:
        return self.distance(adapter).kl

    def distance(self, adapter: MicroLoRA) -> Distance:
        """Return an adapter's distance from the frozen model. If the adapter changes only movable tokens, all
        contexts are compared, else only the `few` contexts."""
        if not self.coordinates.covers(adapter):
            return self.distances_dense(adapter)(1.0)
        return self.distances(adapter, self.coordinates.columns(adapter.lora_b))(1.0)

    def distances(self, adapter: MicroLoRA, block: np.ndarray) -> Callable[[float], Distance]:
        """Return a function f: f(share) is the adapter's distance from the frozen model if its lora_b is
        multiplied by `share`.

        block: [r, A + 1], lora_b's columns of the movable tokens, then one common column of all other tokens,
            because the adapter does not change the proportions of their probabilities
        """
        own = self.reads(adapter)
        text = self._own if own else self._read(np.ascontiguousarray(self.contexts @ adapter.lora_a))
        return self._by_share(text, block, adapter.scale)

    @cached_property
    def _own(self) -> KLContexts:
        """The contexts and their projections onto the calibrated lora_a."""
        return self._read(self._projections, self._unseen, self.drift)

    def _read(self, u: np.ndarray, *known: np.ndarray) -> KLContexts:
        groups = self.groups.of(np.arange(len(self.contexts)))
        return KLContexts(self.packed_probs, self.packed_ratio, u, self._following_indices, groups, *known)

    @cached_property
    def _projections(self) -> np.ndarray:
        """The projections of the contexts, contexts @ lora_a: [M, r]."""
        return np.ascontiguousarray(self.contexts @ self.directions)

    @cached_property
    def _unseen(self) -> np.ndarray:
        """The derivative of the rise (of the negative log-likelihood of prose) by lora_b over all prose,
        minus the estimate of this derivative from the contexts: [r, A + 1]. With this difference, the linear
        part of the rise is exact, and only the curved part is estimated from the contexts.
        """
        said = self.packed_probs.copy()
        said[np.arange(len(said)), self._following_indices] -= 1
        rest = self.drift.copy()
        for part, share in self.groups.in_prose:
            rest -= share * (self._projections[part].T @ said[part] / len(said[part]))
        return rest

    @cached_property
    def _following_indices(self) -> np.ndarray:
        return self.coordinates.indices(self.following)

    def distances_dense(self, adapter: MicroLoRA) -> Callable[[float], Distance]:
        """Return a function f: f(share) is the distance of the adapter with share * lora_b. The function
        compares the whole vocabulary in the `few` contexts."""
        u = np.ascontiguousarray(self.contexts[self.few] @ adapter.lora_a)
        following = self.following[self.few].astype(np.int32)
        text = KLContexts(self.probabilities, self.log_ratio, u, following, self.groups.of(self.few))
        return self._by_share(text, adapter.lora_b, adapter.scale)

    def _by_share(self, text: KLContexts, lora_b: np.ndarray, scale: float) -> Callable[[float], Distance]:
        """Return a function f: f(share) is the distance of the adapter with share * lora_b. The contexts are
        few, so the KL of the base LoRA alone is `floor`, and the contexts give the change of this KL."""
        error = 0.0 if self.frozen is None else self.floor - text.distance(lora_b, 0.0)[0]

        def distance(share: float) -> Distance:
            kl, rise, slope = text.distance(lora_b, share * scale)
            kl += error
            return Distance(0.0 if kl < 0 else kl, rise + self.rise, scale * slope)

        return distance

    @property
    def nbytes(self) -> int:
        # The array `_same` belongs to the adapter, so the adapter's byte count includes this array.
        known = (a for name, a in vars(self).items() if name != "_same")
        return sum(a.nbytes for a in known if isinstance(a, np.ndarray))

    def to_bytes(self, is_small: bool = False) -> bytes:
        """Return the probe as bytes for `from_bytes`. is_small: True to store the two largest arrays as
        float16 numbers. The probe of a model with a hidden size of about 600 then takes 1.2 MB and not 2.5
        MB."""
        out = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _STORED}
        if is_small:
            arrays |= {name: arrays[name].astype(np.float16) for name in _LARGE}
        if self.read_texts is not None:
            arrays["read_texts"] = self.read_texts
        save = np.savez_compressed if is_small else np.savez
        save(out, **arrays, text=np.array(reference_text.digest()))
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, head, eos: np.ndarray) -> "KLProbe | None":
        """Decode a stored probe. Return None if the data is damaged, has NaN or Inf, or comes from another
        reference text; the caller then measures a new probe. eos: the ids of the tokens that end a reply."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                if str(f["text"]) != reference_text.digest():
                    return None
                arrays = {name: f[name] for name in (*_STORED, "read_texts") if name in f or name in _STORED}
                arrays |= {name: arrays[name].astype(np.float32, copy=False) for name in _LARGE}
            sound = all(np.isfinite(a).all() for a in arrays.values())
            return cls(**arrays, eos=eos, head=head) if sound else None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def softmax_rows(z: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of logits: [T, V] -> [T, V] float32."""
    p = (z - z.max(axis=1, keepdims=True)).astype(np.float32, copy=False)
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True)
    return np.ascontiguousarray(p)


def log_softmax_rows(z: np.ndarray) -> np.ndarray:
    """Return the log-softmax of each row of logits: [T, V] -> [T, V] float32."""
    z = z - z.max(axis=1, keepdims=True)
    return np.ascontiguousarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)), np.float32)


def spread_rows(states: np.ndarray, count: int) -> np.ndarray:
    """Return `count` evenly spread rows of `states`, or all rows if `states` has fewer."""
    rows = np.linspace(0, max(0, len(states) - 1), min(count, len(states))).round().astype(int)
    return np.ascontiguousarray(states[rows])

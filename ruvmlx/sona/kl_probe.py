"""Reference text: where a model that learns must stay what it was.

A few everyday questions with plain answers, and some prose (reference_text.json), read once per model: what that
leaves (measuring.py), and the distance to the frozen model on it.
"""

import io
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ..backends.base import Backend
from ..kernels import matmul
from ..kernels.rating import EvidenceSolver, KLContexts
from ..lora import MicroLoRA
from ..models.model import Tokenizer
from . import reference_text

_ELEMENTS = 1 << 20  # contexts x tokens: what the KL kernel reads in a quarter of a millisecond
ROWS = 32  # contexts that the head is asked for at a time
_STORED = (
    "contexts", "rows", "counts", "prose", "following", "directions", "tokens", "precision", "features",
    "drift",
)  # fmt: skip


@dataclass(frozen=True)
class Distance:
    """kl to the frozen model in the answers; rise of the negative log-likelihood of the prose over it: an
    answer may end sooner than it did, prose goes on. Nats per token. slope: of the rise by the share of
    lora_b, where there is none of it yet, if that is known."""

    kl: float
    rise: float
    slope: float = 0.0


@dataclass
class KLProbe:
    """contexts [M, D]: hidden states to measure distances on, of all that were read the `rows` [M];
    counts [3]: how many are in answers, then in prose where MicroLoRA reads most, each for itself, and
    for the rest of the prose, whose states are `prose` [] in all. following [M]: the tokens after them.
    directions [D, r]: what MicroLoRA reads.

    tokens [A]: those that ratings may move, eos [] those that end a reply; features [A, k]: how tokens move
    together (see `features`).
    precision [A + k]: 1 / sigma^2 of the prior of the weight of each token and feature.
    drift [r, A + 1]: `drifting` of all prose.
    `head` turns hidden [T, D] into logits [T, V]. With a base the contexts and the head are the base's (see
    `under`), and `frozen` is what the model without it says there: log-probabilities [m, V].
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
    head: Callable[[np.ndarray], np.ndarray]
    frozen: np.ndarray | None = None
    packed_ratio: np.ndarray | None = None
    rise: float = 0.0  # of the mean negative log-likelihood by the base alone
    # An adapter's lora_a that was found to be `directions`: rating after rating it is the same array.
    _same: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def answers(self) -> int:
        return int(self.counts[0])

    def _groups(self, rows: np.ndarray) -> list[tuple[int, float]]:
        """Of the contexts `rows` (rising): how many are in answers, in prose where most is read and in the
        rest of it; and what share of the prose each group stands for."""
        ends = np.searchsorted(rows, np.cumsum(self.counts))
        sizes = np.diff(ends, prepend=0).tolist()
        own = float(self.counts[1] / max(1, self.prose))
        shares = [share if size else 0.0 for size, share in zip(sizes, (0.0, own, 1 - own), strict=True)]
        whole = sum(shares) or 1.0
        return [(size, share / whole) for size, share in zip(sizes, shares, strict=True)]

    @cached_property
    def _prose(self) -> list[tuple[slice, float]]:
        """The groups of all contexts in prose, and what share of it each stands for."""
        (n, _), (loud, own), (rest, other) = self._groups(np.arange(len(self.contexts)))
        parts = (slice(n, n + loud), own), (slice(n + loud, n + loud + rest), other)
        return [(part, share) for part, share in parts if share]

    @cached_property
    def few(self) -> np.ndarray:
        """Which contexts are looked at over the whole vocabulary."""
        return chosen(np.arange(len(self.contexts)), max(4, _ELEMENTS // self.vocab_size))

    @cached_property
    def vocab_size(self) -> int:
        return self.head(self.contexts[:1]).shape[1]

    @cached_property
    def log_probabilities(self) -> np.ndarray:
        """What the model says in a few contexts, without MicroLoRA: [m, V] float32."""
        return log_softmax_rows(self.head(self.contexts[self.few]))

    @cached_property
    def packed(self) -> np.ndarray:
        """What it says in each context of the tokens that ratings may move, and of all others together:
        [M, A + 1]."""
        return self._packing(lambda: None)

    def _packing(self, pause: Callable[[], None]) -> np.ndarray:
        parts = []
        for i in range(0, len(self.contexts), ROWS):
            rows = log_softmax_rows(self.head(self.contexts[i : i + ROWS]))
            parts.append(_packed(np.exp(rows), self.tokens))
            pause()
        return np.ascontiguousarray(np.concatenate(parts))

    def look(self, pause: Callable[[], None] = lambda: None) -> None:
        """Ask the head for all that distances need of it, where that is not known; `pause` may raise."""
        if "packed" not in vars(self):
            self.packed = self._packing(pause)
        self.probabilities  # noqa: B018 - kept once computed
        pause()

    @cached_property
    def probabilities(self) -> np.ndarray:
        p = np.exp(self.log_probabilities)
        return np.ascontiguousarray(p / p.sum(axis=1, keepdims=True), np.float32)

    @cached_property
    def log_ratio(self) -> np.ndarray | None:
        """log(p_base / p_frozen) [M, V]; None without a base."""
        return None if self.frozen is None else self.log_probabilities - self.frozen

    @cached_property
    def floor(self) -> float:
        """Mean over answers of KL(base || frozen), nats: what no scaling of MicroLoRA takes away."""
        if self.packed_ratio is None:
            return 0.0
        n = self.answers
        return float(np.mean(np.sum(self.packed[:n].astype(np.float64) * self.packed_ratio[:n], axis=1)))

    @property
    def k(self) -> int:
        return self.features.shape[1]

    @cached_property
    def asking(self) -> EvidenceSolver:
        """What evidence [3, r, A + k] asks for, of each token: [r, A + 1], as `columns`."""
        features = matmul.Matrix(self.features.astype(np.float16))
        return EvidenceSolver(self.precision, features, self.directions.shape[1], self.ends)

    def prepare(self) -> None:
        """Compute what the first rating would have to wait for."""
        self._own, self._answered, self.asking  # noqa: B018 - kept once computed

    @cached_property
    def ends(self) -> np.ndarray:
        """Where among `tokens` those that end a reply are."""
        return np.flatnonzero(np.isin(self.tokens, self.eos)).astype(np.int32)

    @cached_property
    def _answered(self) -> tuple[np.ndarray, KLContexts]:
        """The contexts of answers, and what is said there; with any base, by the model without it."""
        n = self.answers
        text = KLContexts(self.packed[:n], None, self._readings[:n], self._followed[:n], [(n, 0.0)])
        return self.contexts[:n], text

    def answered(self, adapter: MicroLoRA) -> KLContexts:
        """The answers as the adapter reads them; with any base, by the model without it."""
        contexts, text = self._answered
        if self._is_own(adapter):
            return text
        return text.read_as(np.ascontiguousarray(contexts @ adapter.lora_a))

    def columns(self, lora_b: np.ndarray) -> np.ndarray:
        """What lora_b [r, V] says of the tokens that ratings may move, and 0 for all others: [r, A + 1]."""
        found = np.zeros((len(lora_b), self.tokens.size + 1), np.float32)
        found[:, :-1] = lora_b.take(self.tokens, axis=1)
        return found

    def _is_own(self, adapter: MicroLoRA) -> bool:
        """Does it read what was measured here?"""
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
        """From the frozen model: exact over all contexts if ratings alone have moved it, else over a few."""
        if not self.covers(adapter):
            return self.distances_dense(adapter)(1.0)
        return self.distances(adapter, self.columns(adapter.lora_b))(1.0)

    def covers(self, adapter: MicroLoRA) -> bool:
        """Does it move no other tokens than ratings do?"""
        b = adapter.lora_b
        return np.count_nonzero(b) == np.count_nonzero(b.take(self.tokens, axis=1))

    def distances(self, adapter: MicroLoRA, block: np.ndarray) -> Callable[[float], Distance]:
        """share -> the distance of an adapter that moves by share * block [r, A + 1] the tokens that ratings
        may move. All others keep their proportions, and count as one."""
        own = self._is_own(adapter)
        text = self._own if own else self._read(np.ascontiguousarray(self.contexts @ adapter.lora_a))
        return self._by_share(text, block, adapter.scale)

    def _by_share(self, text: KLContexts, moved: np.ndarray, scale: float) -> Callable[[float], Distance]:
        def distance(share: float) -> Distance:
            kl, rise, slope = text.distance(moved, share * scale)
            return Distance(kl, rise + self.rise, scale * slope)

        return distance

    @cached_property
    def _own(self) -> KLContexts:
        """The contexts as what was measured reads them."""
        return self._read(self._readings, self._unseen, self.drift)

    def _read(self, u: np.ndarray, *known: np.ndarray) -> KLContexts:
        groups = self._groups(np.arange(len(self.contexts)))
        return KLContexts(self.packed, self.packed_ratio, u, self._followed, groups, *known)

    @cached_property
    def _readings(self) -> np.ndarray:
        """What MicroLoRA reads of each context, [M, r]."""
        return np.ascontiguousarray(self.contexts @ self.directions)

    @cached_property
    def _unseen(self) -> np.ndarray:
        """What the contexts miss of the rise's linear part: with it, only what is curved is sampled."""
        said = self.packed.copy()
        said[np.arange(len(said)), self._followed] -= 1
        rest = self.drift.copy()
        for part, share in self._prose:
            rest -= share * (self._readings[part].T @ said[part] / len(said[part]))
        return rest

    @cached_property
    def _followed(self) -> np.ndarray:
        """Where among `tokens` the ones that follow are, A for all others: [M]."""
        at = np.minimum(np.searchsorted(self.tokens, self.following), self.tokens.size - 1)
        return np.where(self.tokens[at] == self.following, at, self.tokens.size).astype(np.int32)

    def distances_dense(self, adapter: MicroLoRA) -> Callable[[float], Distance]:
        """The same over the whole vocabulary, in few contexts: share -> the distance with share * lora_b."""
        u = np.ascontiguousarray(self.contexts[self.few] @ adapter.lora_a)
        following = self.following[self.few].astype(np.int32)
        text = KLContexts(self.probabilities, self.log_ratio, u, following, self._groups(self.few))
        return self._by_share(text, adapter.lora_b, adapter.scale)

    def under(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        max_context: int,
        pause: Callable[[], None] | None = None,
    ) -> "KLProbe":
        """The same text under the base that the backend has now. `self` must be the frozen model's, and must
        have been asked to `look` before the base was set: its head is the backend's."""
        answered = self._answered
        base, packed, ratio, lost = backend.lora, list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        pause = pause or (lambda: None)
        states, following, _, answers = reference_text.read(backend, tokenizer, max_context, pause)
        contexts = np.ascontiguousarray(states[self.rows])
        prose = states[answers:], following[answers:]
        drift = drifting(*prose, backend.head, self.directions, self.tokens, pause)
        new = replace(self, contexts=contexts, drift=drift, head=backend.head, frozen=self.log_probabilities)
        try:
            for i in range(0, len(contexts), ROWS):
                backend.set_lora(None)
                frozen = log_softmax_rows(self.head(self.contexts[i : i + ROWS]))
                backend.set_lora(base)
                pause()
                rows = log_softmax_rows(self.head(contexts[i : i + ROWS]))
                y = self.following[i : i + ROWS]
                lost.append((frozen - rows)[np.arange(len(y)), y])
                packed.append(_packed(np.exp(rows), self.tokens))
                mean = _packed(np.exp(rows) * (rows - frozen), self.tokens)
                ratio.append(np.divide(mean, packed[-1], np.zeros_like(mean), where=packed[-1] > 0))
                pause()
        finally:
            backend.set_lora(base)
        pause()
        risen = np.concatenate(lost)
        new.rise = sum(w * float(np.mean(risen[part])) for part, w in self._prose)
        new.packed, new.packed_ratio = (np.ascontiguousarray(np.concatenate(x)) for x in (packed, ratio))
        new._answered = answered
        new.probabilities, new.floor  # noqa: B018 - computed now, while this base is in place
        return new

    @property
    def nbytes(self) -> int:
        known = (a for name, a in vars(self).items() if name != "_same")  # that one is the adapter's
        return sum(a.nbytes for a in known if isinstance(a, np.ndarray))

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _STORED}
        np.savez(out, **arrays, text=np.array(reference_text.digest()))
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, head, eos: np.ndarray) -> "KLProbe | None":
        """eos: token ids that end a reply. None if damaged, or of another text: it can be measured again."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                if str(f["text"]) != reference_text.digest():
                    return None
                arrays = {name: f[name] for name in _STORED}
            sound = all(np.isfinite(a).all() for a in arrays.values())
            return cls(**arrays, eos=eos, head=head) if sound else None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def drifting(
    states: np.ndarray,
    following: np.ndarray,
    head,
    reading: np.ndarray,
    tokens: np.ndarray,
    pause: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """How the mean negative log-likelihood of a text, states [T, D] and following [T], answers to a small
    change of lora_b: mean of u (p - onehot(y))^T, [r, A + 1]; the last column is for all other tokens."""
    total = np.zeros((reading.shape[1], tokens.size + 1), np.float32)
    for i in range(0, len(states), ROWS):
        rows = np.exp(log_softmax_rows(head(states[i : i + ROWS])))
        rows[np.arange(len(rows)), following[i : i + ROWS]] -= 1
        total += (states[i : i + ROWS] @ reading).T @ _packed(rows, tokens)
        pause()
    return total / max(1, len(states))


def log_softmax_rows(z: np.ndarray) -> np.ndarray:
    """[T, V] -> [T, V] float32."""
    z = z - z.max(axis=1, keepdims=True)
    return np.ascontiguousarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)), np.float32)


def _packed(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[T, V] -> [T, A + 1]: the columns of `tokens`, and the sum of all others."""
    others = np.ones(values.shape[1], bool)
    others[tokens] = False
    return np.column_stack(
        [values.take(tokens, axis=1), values[:, others].sum(axis=1, dtype=np.float64)]
    ).astype(np.float32)


def chosen(states: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, or all if they are fewer, evenly spread."""
    rows = np.linspace(0, max(0, len(states) - 1), min(count, len(states))).round().astype(int)
    return np.ascontiguousarray(states[rows])

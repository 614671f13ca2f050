"""Neutral text: where a model that learns must stay what it was.

A few everyday questions with plain answers (neutral.json), read once per model. From the hidden states
over the answers come the directions in which MicroLoRA reads, and the contexts on which the distance to the
frozen model is measured.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import resources

import numpy as np

from ..backends.base import Backend
from ..errors import RuvmlxError
from ..kernels import micro as kernels
from ..lora import MicroLoRA
from ..models.base import Message, Tokenizer

_ELEMENTS = 1 << 20  # contexts x vocabulary: what the KL kernel reads in a quarter of a millisecond
_CONTEXTS = range(4, 257)


@dataclass
class Neutral:
    """contexts [M, D]: hidden states to measure KL on.  mean [D].  directions [D, r].

    `head` turns hidden [T, D] into logits [T, V]. With a base the contexts and the head are the base's (see
    `under`), and `frozen` is what the model without it says there: log-probabilities [M, V].
    """

    contexts: np.ndarray
    mean: np.ndarray
    directions: np.ndarray
    head: Callable[[np.ndarray], np.ndarray]
    frozen: np.ndarray | None = None

    @cached_property
    def log_probabilities(self) -> np.ndarray:
        """What the model says in each context, without MicroLoRA: [M, V] float32."""
        z = self.head(self.contexts)
        z = z - z.max(axis=1, keepdims=True)
        return np.ascontiguousarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)), np.float32)

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
        """Mean over contexts of KL(base || frozen), nats: what no scaling of MicroLoRA takes away."""
        if self.log_ratio is None:
            return 0.0
        return float(np.mean(np.sum(self.probabilities.astype(np.float64) * self.log_ratio, axis=1)))

    def kl(self, adapter: MicroLoRA) -> float:
        """Mean over contexts of KL(adapted || frozen), nats."""
        u = np.ascontiguousarray(self.contexts @ adapter.lora_a)
        return kernels.kl_to_frozen(self.probabilities, u, adapter.lora_b, adapter.scale, self.log_ratio)

    def under(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        max_context: int,
        pause: Callable[[], None] | None = None,
    ) -> "Neutral":
        """The same text under the base that the backend has now. `self` must be the frozen model's, and must
        have been asked for a KL before the base was set: its head is the backend's."""
        contexts = chosen(read(backend, tokenizer, max_context, pause), len(self.contexts))
        new = Neutral(contexts, self.mean, self.directions, backend.head, self.log_probabilities)
        new.probabilities, new.floor  # noqa: B018 - computed now, while this base is in place
        return new

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        np.savez(
            out, contexts=self.contexts, mean=self.mean, directions=self.directions, text=np.array(_digest())
        )
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, head) -> "Neutral | None":
        """None if damaged, or if it is of another text: it can be measured again."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                if str(f["text"]) != _digest():
                    return None
                return cls(f["contexts"], f["mean"], f["directions"], head)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def measure(backend: Backend, tokenizer: Tokenizer, rank: int, vocab_size: int, max_context: int) -> Neutral:
    """Read the neutral text with the frozen model: about 700 tokens of prefill."""
    states = read(backend, tokenizer, max_context)
    if not np.isfinite(states).all():
        raise RuvmlxError(
            "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
        )
    count = min(max(_CONTEXTS[0], _ELEMENTS // vocab_size), _CONTEXTS[-1], len(states))
    return Neutral(chosen(states, count), states.mean(axis=0), directions(states, rank), backend.head)


def chosen(states: np.ndarray, count: int) -> np.ndarray:
    """`count` rows, evenly spread."""
    rows = np.linspace(0, len(states) - 1, count).round().astype(int)
    return np.ascontiguousarray(states[rows])


def texts() -> list[tuple[str, str]]:
    """(question, answer) of the neutral text."""
    return json.loads(resources.files(__package__).joinpath("neutral.json").read_text(encoding="utf-8"))


def _digest() -> str:
    """The text's name."""
    return hashlib.sha256(json.dumps(texts()).encode()).hexdigest()[:16]


def read(
    backend: Backend, tokenizer: Tokenizer, max_context: int, pause: Callable[[], None] | None = None
) -> np.ndarray:
    """Hidden states that predict the answers' tokens, and what follows them: [T, D]."""
    parts = []
    for question, answer in texts():
        if pause is not None:
            pause()
        tokens, first = encoded(tokenizer, question, answer, max_context)
        parts.append(backend.hidden_states(tokens)[first - 1 :])
    return np.concatenate(parts)


def encoded(tokenizer: Tokenizer, question: str, answer: str, limit: int) -> tuple[list[int], int]:
    """Tokens of a question with its answer, and where the answer begins."""
    prompt = tokenizer.encode_chat([Message("user", question)])
    tokens = prompt + tokenizer.encode(answer, add_bos=False)
    return tokens[:limit], min(len(prompt), limit // 2)


def directions(states: np.ndarray, rank: int) -> np.ndarray:
    """[T, D] -> [D, rank]: first the mean state, then the leading principal directions across it.

    Each is scaled so that its reading u = a^T h is 1 on average (the mean) or has variance 1 (whitened).
    """
    states = states.astype(np.float64)
    mean = states.mean(axis=0)
    first = mean / (mean @ mean)
    centred = states - mean
    centred -= np.outer(centred @ first, mean)
    _, sigma, rows = np.linalg.svd(centred, full_matrices=False)
    whitened = rows[: rank - 1] * np.sqrt(len(states)) / np.maximum(sigma[: rank - 1, None], 1e-9)
    return np.concatenate([first[None], whitened]).T.astype(np.float32)

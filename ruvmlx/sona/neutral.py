"""Neutral text: where a model that learns must stay what it was.

A few everyday questions with plain answers (neutral.json), read once per model. From the hidden states
over the answers come the directions in which MicroLoRA reads, and the contexts on which the distance to the
frozen model is measured.
"""

import io
import json
import zipfile
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

    `head` turns hidden [T, D] into frozen logits [T, V].
    """

    contexts: np.ndarray
    mean: np.ndarray
    directions: np.ndarray
    head: object

    @cached_property
    def probabilities(self) -> np.ndarray:
        """What the frozen model says in each context: [M, V] float32."""
        z = self.head(self.contexts)  # type: ignore[operator]
        p = np.exp(z - z.max(axis=1, keepdims=True))
        return np.ascontiguousarray(p / p.sum(axis=1, keepdims=True), np.float32)

    def kl(self, adapter: MicroLoRA) -> float:
        """Mean over contexts of KL(adapted || frozen), nats."""
        u = np.ascontiguousarray(self.contexts @ adapter.lora_a)
        return kernels.kl_to_frozen(self.probabilities, u, adapter.lora_b, adapter.scale)

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        np.savez(out, contexts=self.contexts, mean=self.mean, directions=self.directions)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, head) -> "Neutral | None":
        """None if damaged: it can be measured again."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                return cls(f["contexts"], f["mean"], f["directions"], head)
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def measure(backend: Backend, tokenizer: Tokenizer, rank: int, vocab_size: int, max_context: int) -> Neutral:
    """Read the neutral text with the frozen model: about 700 tokens of prefill."""
    pairs = json.loads(resources.files(__package__).joinpath("neutral.json").read_text(encoding="utf-8"))
    states = np.concatenate([_answer_states(backend, tokenizer, q, a, max_context) for q, a in pairs])
    if not np.isfinite(states).all():
        raise RuvmlxError(
            "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
        )
    count = min(max(_CONTEXTS[0], _ELEMENTS // vocab_size), _CONTEXTS[-1], len(states))
    chosen = np.linspace(0, len(states) - 1, count).round().astype(int)
    return Neutral(
        np.ascontiguousarray(states[chosen]), states.mean(axis=0), directions(states, rank), backend.head
    )


def _answer_states(backend: Backend, tokenizer: Tokenizer, question: str, answer: str, limit: int):
    """Hidden states that predict the answer's tokens: [T, D]."""
    prompt = tokenizer.encode_chat([Message("user", question)])
    tokens = prompt + tokenizer.encode(answer, add_bos=False)
    first = min(len(prompt), limit // 2) - 1
    return backend.hidden_states(tokens[:limit])[first:]


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

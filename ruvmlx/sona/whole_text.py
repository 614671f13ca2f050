"""This module measures a base LoRA at every token of the reference text (reference_text.py): the KL to the
frozen model (the model without any adapter) in answers, and the rise of the negative log-likelihood of prose.

A KL probe (kl_probe.py) compares only a few contexts, because each rating compares all of them. A base LoRA
is measured seldom. With all tokens, the KL and the rise are much more exact (docs/studies.md).
"""

import io
import zipfile
from dataclasses import dataclass

import numpy as np

from ..backends.base import Backend, original_model
from ..models.config.model import Model
from ..pausing import Pause
from ..store import Store
from . import reference_text
from .kl_probe import ROWS, Head, KLProbe, log_softmax_rows, softmax_rows
from .prose_drift import losses
from .reference_text import ReadTexts

_NAME = "reference/whole"  # the name of the stored arrays; no adapter can have this name


@dataclass(frozen=True)
class WholeText:
    """The frozen model's part of the comparison, for the reference texts that the model's KL probe has read.

    texts: [E], the indices of these texts in `reference_text.texts()`, ascending
    states: [T, D], the hidden states that predict the T tokens of answers
    losses: [P], the negative log-likelihood of the P tokens of prose (nats)
    """

    texts: np.ndarray
    states: np.ndarray
    losses: np.ndarray

    @classmethod
    def of(cls, texts: np.ndarray, text: ReadTexts, head: Head, pause: Pause) -> "WholeText":
        """Return the predictions of the frozen model. text: the texts, which the frozen model has read. head:
        the model's output head. `pause` can raise an exception to stop."""
        n, found = text.answers, list[np.ndarray]()
        states, following = text.states[n:], text.following[n:]
        for i in range(0, len(states), ROWS):
            found.append(losses(softmax_rows(head(states[i : i + ROWS])), following[i : i + ROWS]))
            pause()
        # a copy, because a view would keep the states of prose in memory, too
        return cls(texts, text.states[:n].copy(), np.concatenate(found))

    @property
    def answers(self) -> np.ndarray:
        """The indices of the texts that are answers."""
        every = reference_text.texts()
        return np.array([i for i in self.texts.tolist() if every[i][0]], np.int32)

    def kl(self, states: np.ndarray, backend: Backend, pause: Pause) -> float:
        """Return KL(base || frozen) in answers, nats per token.

        states: [T, D], the hidden states at the tokens of the answers with the base LoRA
        backend: the backend, which has the base LoRA before and after the call
        """
        total = 0.0
        for i in range(0, len(states), ROWS):
            with original_model(backend):
                before = log_softmax_rows(backend.head(self.states[i : i + ROWS]))
            after = log_softmax_rows(backend.head(np.ascontiguousarray(states[i : i + ROWS])))
            total += float(np.sum(np.exp(after) * (after - before)))
            pause()
        return total / max(1, len(states))

    def rise(self, found: np.ndarray) -> float:
        """Return the rise of the mean negative log-likelihood of prose. found: [P], the negative
        log-likelihood of each token with the base LoRA (nats)"""
        return float(np.mean(found.astype(np.float64) - self.losses)) if len(found) else 0.0

    @property
    def nbytes(self) -> int:
        return self.texts.nbytes + self.states.nbytes + self.losses.nbytes

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        text, states = np.array(reference_text.digest()), self.states.astype(np.float16)
        np.savez(out, text=text, texts=self.texts, states=states, losses=self.losses)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, texts: np.ndarray) -> "WholeText | None":
        """Decode stored predictions. Return None if the data is damaged, or if it comes from other texts."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                if str(f["text"]) != reference_text.digest() or not np.array_equal(f["texts"], texts):
                    return None
                states, known = f["states"].astype(np.float32), f["losses"]
            sound = np.isfinite(states).all() and np.isfinite(known).all()
            return cls(texts, states, known) if sound else None
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


class WholeTextReader:
    """The reader of one model's WholeText. The model reads the texts once, and the store keeps the result."""

    def __init__(self, store: Store, model: Model, backend: Backend):
        self._store, self._model, self._backend = store, model, backend
        self._known: WholeText | None = None

    def read(self, frozen: KLProbe, pause: Pause | None = None) -> WholeText:
        """Return the frozen model's predictions in the texts that its KL probe `frozen` has read. The backend
        has the same base LoRA before and after the call. `pause` can raise an exception to stop."""
        texts = frozen.read_texts
        if texts is None:
            texts = np.arange(len(reference_text.texts()), dtype=np.int32)
        if self._known is None or not np.array_equal(self._known.texts, texts):
            self._known = self._load(texts) or self._read(texts, pause or (lambda: None))
        return self._known

    @property
    def nbytes(self) -> int:
        return self._known.nbytes if self._known is not None else 0

    def _load(self, texts: np.ndarray) -> WholeText | None:
        stored = self._store.checkpoints.measurement(self._model.fingerprint, _NAME)
        return WholeText.from_bytes(stored, texts) if stored else None

    def _read(self, texts: np.ndarray, pause: Pause) -> WholeText:
        model, backend = self._model, self._backend
        with original_model(backend):
            text = reference_text.read(backend, model.tokenizer, model.shape.max_context, pause, texts)
            found = WholeText.of(texts, text, backend.head, pause)
        self._store.checkpoints.put_measurement(model.fingerprint, _NAME, found.to_bytes())
        return found

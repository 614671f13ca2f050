"""This module measures a property that must hardly change while a model learns from ratings: the model's
predictions on neutral text."""

from importlib import resources

import numpy as np

from ruvmlx.backends.base import Backend, HeadAdapter, original_model
from ruvmlx.sona.kl_probe import log_softmax_rows

_PART = 1024  # the maximum number of tokens that the model reads at once; some models have a short context
_ROWS = 64  # the number of tokens whose logits are computed at a time


class NeutralText:
    """A neutral text, about other topics than the prompts that simulated users rate. On this text, `compare`
    measures the KL divergence of a learned model from the frozen (original) model, and the change of
    perplexity."""

    def __init__(self, backend: Backend, tokenizer):
        text = resources.files(__package__).joinpath("data/neutral.txt").read_text(encoding="utf-8")
        tokens = tokenizer.encode(text)
        self._backend = backend
        self._parts = [tokens[at : at + _PART] for at in range(0, len(tokens) - 1, _PART)]
        with original_model(backend):
            self._frozen = self._hidden_states()

    def _hidden_states(self) -> np.ndarray:
        """Return the hidden states [N, D] of all N tokens that another token follows in their part."""
        return np.concatenate([self._backend.hidden_states(part[:-1]) for part in self._parts])

    def compare(self, adapter: HeadAdapter | None) -> tuple[float, float]:
        """Return (mean KL(new || frozen) in nats per token, relative change of the perplexity). The new model
        has this adapter and the backend's base LoRA; the frozen model has neither."""
        hidden = self._frozen if self._backend.lora is None else self._hidden_states()
        said, kl, change = np.concatenate([part[1:] for part in self._parts]), 0.0, 0.0
        for at in range(0, len(hidden), _ROWS):
            part, index = slice(at, at + _ROWS), said[at : at + _ROWS, None]
            with original_model(self._backend):
                logits = self._backend.head(self._frozen[part])
            old = log_softmax_rows(logits)
            if self._backend.lora is not None:
                logits = self._backend.head(np.ascontiguousarray(hidden[part]))
            if adapter is not None:
                adapter.add_to_logits(logits, np.ascontiguousarray(hidden[part]))
            new = log_softmax_rows(logits)
            kl += float(np.sum(np.exp(new) * (new - old), dtype=np.float64))
            change += float(np.sum(np.take_along_axis(old - new, index, axis=1), dtype=np.float64))
        return kl / len(hidden), float(np.expm1(change / len(hidden)))

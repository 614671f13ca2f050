"""This module measures a property that must hardly change while a model learns from ratings: the model's
predictions on neutral text."""

from importlib import resources

import numpy as np

from ruvmlx.backends.base import Backend, HeadAdapter, original_model
from ruvmlx.sona.kl_probe import log_softmax_rows

_LIMIT = 1024  # the maximum number of tokens of the neutral text
_ROWS = 64  # the number of tokens whose logits are computed at a time


class NeutralText:
    """A neutral text, whose topic does not occur in the prompts that simulated users rate. On this text,
    `compare` measures the KL divergence of a learned model from the frozen (original) model, and the change
    of perplexity."""

    def __init__(self, backend: Backend, tokenizer):
        text = resources.files(__package__).joinpath("data/neutral.txt").read_text(encoding="utf-8")
        self._backend, self._tokens = backend, tokenizer.encode(text)[:_LIMIT]
        with original_model(backend):
            self._frozen = backend.hidden_states(self._tokens[:-1])  # [T - 1, D]: T tokens, D hidden size

    def compare(self, adapter: HeadAdapter | None) -> tuple[float, float]:
        """Return (mean KL(new || frozen) in nats per token, relative change of the perplexity). The new model
        has this adapter and the backend's base LoRA; the frozen model has neither."""
        hidden = (
            self._frozen if self._backend.lora is None else self._backend.hidden_states(self._tokens[:-1])
        )
        said, kl, change = np.asarray(self._tokens[1:]), 0.0, 0.0
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

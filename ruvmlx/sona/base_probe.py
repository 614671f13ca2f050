"""This module measures the KL probe under a base LoRA. The model reads the reference text (reference_text.py)
again with the base LoRA, and its predictions are compared with the predictions of the frozen model (the model
without any adapter). The reading takes seconds for a small model. `kl_in_answers` reads the answers only, for
a search that compares several base LoRAs."""

from dataclasses import replace

import numpy as np

from ..backends.base import Backend
from ..models.config.model import Tokenizer
from ..pausing import Pause
from . import reference_text
from .coordinates import pack_columns
from .kl_probe import ROWS, KLProbe, log_softmax_rows
from .prose_drift import Drift
from .whole_text import WholeText

# What a probe has computed that does not depend on the rank of lora_a
_OF_ANY_RANK = (
    "groups", "few", "vocab_size", "log_probabilities", "packed_probs", "probabilities", "likely",
    "_following_indices",
)  # fmt: skip


def limit_rank(probe: KLProbe, rank: int) -> KLProbe:
    """Return a KL probe of the model without any adapter with only the first `rank` calibrated directions;
    the probe itself if it has no more."""
    if probe.directions.shape[1] <= rank:
        return probe
    found = replace(
        probe,
        directions=np.ascontiguousarray(probe.directions[:, :rank]),
        drift=np.ascontiguousarray(probe.drift[:rank]),
    )
    vars(found).update({name: vars(probe)[name] for name in _OF_ANY_RANK if name in vars(probe)})
    return found


class RankedProbe:
    """The KL probe of the model without any adapter, for MicroLoRAs of one rank.

    rank: the rank; probe: the probe with the directions of this rank; None while the model was not measured
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.probe: KLProbe | None = None
        self._whole: KLProbe | None = None  # with all measured directions

    def keep(self, probe: KLProbe | None) -> None:
        """Use this measured probe from now on."""
        self._whole, self.probe = probe, limit_rank(probe, self.rank) if probe is not None else None

    def change_rank(self, rank: int) -> bool:
        """Use the directions of this rank from now on. Return True if the rank was another one."""
        if rank == self.rank:
            return False
        self.rank = rank
        self.keep(self._whole)
        return True


def kl_in_answers(
    whole: WholeText, backend: Backend, tokenizer: Tokenizer, max_context: int, pause: Pause | None = None
) -> float:
    """Return KL(base || frozen) in answers, nats per token, of the base LoRA that the backend has now. The
    model reads the answers only. The arguments are those of `probe_under`."""
    pause = pause or (lambda: None)
    text = reference_text.read(backend, tokenizer, max_context, pause, whole.answers)
    return whole.kl(text.states, backend, pause)


def probe_under(
    frozen: KLProbe, whole: WholeText, backend: Backend, tokenizer: Tokenizer, max_context: int,
    pause: Pause | None = None,
) -> KLProbe:  # fmt: skip
    """Measure the KL probe under the base LoRA that the backend has now. The base LoRA stays in the backend.

    frozen: the frozen model's KL probe. Before the base LoRA is installed, the caller must call the function
    `look` of `frozen`, which calls the backend's output head.
    pause: a function that can raise an exception to stop the measurement
    """
    pause = pause or (lambda: None)
    text = reference_text.read(backend, tokenizer, max_context, pause, frozen.read_texts)
    contexts = np.ascontiguousarray(text.states[frozen.rows])
    n, known = text.answers, frozen.log_probabilities
    drift = Drift(text.states[n:], text.following[n:], frozen.directions, frozen.tokens)
    slope = drift.run(backend.head, pause)
    new = replace(frozen, contexts=contexts, drift=slope, head=backend.head, frozen=known)
    new.rise, new.floor = whole.rise(drift.losses), whole.kl(text.states[:n], backend, pause)
    complete_probe(frozen, new, backend, pause)
    return new


def complete_probe(frozen: KLProbe, new: KLProbe, backend: Backend, pause: Pause | None = None) -> None:
    """Compute the probabilities of the KL probe `new` under the base LoRA that the backend has now. frozen:
    the frozen model's KL probe. `pause` can raise an exception to stop; then `new` is unchanged."""
    probabilities, ratios = _compare(frozen, new, backend, pause or (lambda: None))
    new.packed_probs, new.answered_contexts = probabilities, frozen.answered_contexts
    new.probabilities  # noqa: B018 - computed now, while this base is installed
    new.packed_ratio = ratios  # the last one, because it marks a complete probe


def _compare(frozen: KLProbe, new: KLProbe, backend: Backend, pause: Pause) -> tuple[np.ndarray, np.ndarray]:
    """Return `packed_probs` and `packed_ratio` of the KL probe `new`."""
    base, probabilities, ratios = backend.lora, [], []
    try:
        for i in range(0, len(new.contexts), ROWS):
            backend.set_lora(None)
            before = log_softmax_rows(frozen.head(frozen.contexts[i : i + ROWS]))
            backend.set_lora(base)
            pause()
            rows = log_softmax_rows(frozen.head(new.contexts[i : i + ROWS]))
            probabilities.append(pack_columns(np.exp(rows), frozen.tokens))
            mean = pack_columns(np.exp(rows) * (rows - before), frozen.tokens)
            p = probabilities[-1]
            ratios.append(np.divide(mean, p, np.zeros_like(mean), where=p > 0))
            pause()
    finally:
        backend.set_lora(base)
    pause()
    return np.ascontiguousarray(np.concatenate(probabilities)), np.ascontiguousarray(np.concatenate(ratios))

"""This module measures the KL probe under a base LoRA. The model reads the reference text (reference_text.py)
again with the base LoRA, and its predictions are compared with the predictions of the frozen model (the model
without any adapter). The reading takes seconds for a small model. `quick_kl` reads a few answers only, for a
search that compares several base LoRAs."""

from dataclasses import replace

import numpy as np

from ..backends.base import Backend
from ..models.config.model import Tokenizer
from ..pausing import Pause
from . import reference_text
from .coordinates import pack_columns
from .kl_probe import ROWS, Drift, KLProbe, log_softmax_rows, spread_rows

QUICK_TEXTS = 4  # the number of answers that `quick_kl` reads

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


def quick_kl(
    frozen: KLProbe, backend: Backend, tokenizer: Tokenizer, max_context: int, pause: Pause | None = None
) -> float:
    """Estimate KL(base || frozen) in answers, nats per token, from QUICK_TEXTS answers of the reference text.
    The arguments are those of `probe_under`."""
    known = range(len(reference_text.texts())) if frozen.read_texts is None else frozen.read_texts.tolist()
    pairs = [reference_text.texts()[i] for i in known]
    sizes = [
        len(ids) - first
        for ids, first in (reference_text.encode_pair(tokenizer, *pair, max_context) for pair in pairs)
    ]
    answers = [at for at, (question, _) in enumerate(pairs) if question]
    chosen = spread_rows(np.array(answers), QUICK_TEXTS)
    states = reference_text.read(backend, tokenizer, max_context, pause, [known[at] for at in chosen]).states
    starts = np.concatenate([[0], np.cumsum(sizes)])
    places = np.concatenate([np.arange(starts[at], starts[at + 1]) for at in chosen])
    # The KL probe has only some of the states of each text.
    _, in_probe, in_states = np.intersect1d(frozen.rows, places, return_indices=True)
    before, base = frozen.contexts[in_probe], backend.lora
    total = 0.0
    try:
        for i in range(0, len(in_probe), ROWS):
            backend.set_lora(None)
            old = log_softmax_rows(frozen.head(before[i : i + ROWS]))
            backend.set_lora(base)
            new = log_softmax_rows(frozen.head(np.ascontiguousarray(states[in_states[i : i + ROWS]])))
            total += float(np.sum(np.exp(new) * (new - old)))
    finally:
        backend.set_lora(base)
    return total / max(1, len(in_probe))


def probe_under(
    frozen: KLProbe, backend: Backend, tokenizer: Tokenizer, max_context: int, pause: Pause | None = None
) -> KLProbe:
    """Measure the KL probe under the base LoRA that the backend has now. The base LoRA stays in the backend.

    frozen: the frozen model's KL probe. Before the base LoRA is installed, the caller must call the function
    `look` of `frozen`, which calls the backend's output head.
    pause: a function that can raise an exception to stop the measurement
    """
    pause = pause or (lambda: None)
    answers = frozen.answered_contexts
    text = reference_text.read(backend, tokenizer, max_context, pause, frozen.read_texts)
    contexts = np.ascontiguousarray(text.states[frozen.rows])
    prose = text.states[text.answers :], text.following[text.answers :]
    drift = Drift(*prose, frozen.directions, frozen.tokens).run(backend.head, pause)
    known = frozen.log_probabilities
    new = replace(frozen, contexts=contexts, drift=drift, head=backend.head, frozen=known)
    lost = _compare(frozen, new, backend, pause)
    new.rise = sum(share * float(np.mean(lost[part])) for part, share in frozen.groups.in_prose)
    new.answered_contexts = answers
    new.probabilities, new.floor  # noqa: B018 - computed now, while this base is installed
    return new


def _compare(frozen: KLProbe, new: KLProbe, backend: Backend, pause: Pause) -> np.ndarray:
    """Set `packed_probs` and `packed_ratio` of the KL probe `new`. Return log(p_frozen / p_base) of the token
    that follows each of the M contexts (positions in the reference text): [M]."""
    base, probabilities, ratios, lost = backend.lora, [], [], []
    try:
        for i in range(0, len(new.contexts), ROWS):
            backend.set_lora(None)
            before = log_softmax_rows(frozen.head(frozen.contexts[i : i + ROWS]))
            backend.set_lora(base)
            pause()
            rows = log_softmax_rows(frozen.head(new.contexts[i : i + ROWS]))
            y = frozen.following[i : i + ROWS]
            lost.append((before - rows)[np.arange(len(y)), y])
            probabilities.append(pack_columns(np.exp(rows), frozen.tokens))
            mean = pack_columns(np.exp(rows) * (rows - before), frozen.tokens)
            p = probabilities[-1]
            ratios.append(np.divide(mean, p, np.zeros_like(mean), where=p > 0))
            pause()
    finally:
        backend.set_lora(base)
    pause()
    new.packed_probs = np.ascontiguousarray(np.concatenate(probabilities))
    new.packed_ratio = np.ascontiguousarray(np.concatenate(ratios))
    return np.concatenate(lost)

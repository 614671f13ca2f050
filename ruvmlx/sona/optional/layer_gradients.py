"""This module computes the gradients of replies' log-probabilities by the weights of a LayerLoRA. The module
also calibrates a LayerLoRA: it measures lora_a and the Fisher information. A LayerLoRA is the part of the
adapter that changes layers below the output head.

Each reply's gradient is computed while the user reads the reply, or else at the rating. The calibration runs
once per model and set of matrices. The gradients and the calibration need the training graph
(training/trainer.py), which is built at the first use.
"""

import io
import json
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...backends.base import Backend, with_lora
from ...errors import RuvmlxError
from ...kernels import micro as kernels
from ...lora import MicroLoRA
from ...lora.base_lora import BaseLoRA, Place, place_shape
from ...lora.layer_lora import LayerLoRA, combine_loras, unpack_layers
from ...models.config.model import Model
from ...pausing import Pause
from ...store import ReplyRow, Store
from .. import reference_text
from ..trace import LayerGradient, adapted_logits

if TYPE_CHECKING:
    from ...training.slices import TrainingText
    from ...training.trainer import Trainer

# Each output's Fisher information is raised by this share of the mean over its matrix.
MIN_FISHER_SHARE = 0.1


class LayerGradients:
    """An object that computes gradients by the weights of a LayerLoRA: of replies for ratings, and of the
    reference text for the calibration. Only the backend's thread can use this object."""

    def __init__(self, store: Store, model: Model, backend: Backend, rank: int = 1):
        """rank: the rank of a new layer LoRA, 1 or 2."""
        self._store, self._model, self._backend, self._rank = store, model, backend, rank
        self._trainer: Trainer | None = None
        self._done: dict[Any, Any] = {}  # the results of an unfinished calibration for each text

    def close(self) -> None:
        """Free the graph that computes gradients."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None

    def _graph(self, pause: Pause | None = None) -> "Trainer":
        from ...training.trainer import Trainer  # this import starts MLX

        if self._trainer is None:
            self._trainer = Trainer(self._model, backend=self._backend, pause=pause or (lambda: None))
        return self._trainer

    def gradient(
        self,
        base: BaseLoRA | None,
        layer_lora: LayerLoRA,
        micro: MicroLoRA,
        reply: ReplyRow,
        pause: Pause | None = None,
    ) -> LayerGradient:
        """Return the gradient of a reply's log-probability by lora_b of the layer LoRA. The base LoRA, the
        layer LoRA and the MicroLoRA are active. A very long reply is cut (TrainingText.cut). The computation
        takes about 10 ms per token."""
        from ...training.slices import TrainingText

        trainer, text = self._graph(pause), TrainingText.cut(reply.context_ids, reply.rated_ids)
        trainer.set_head(base, micro)
        change = combine_loras(base, layer_lora, empty=True)
        assert change is not None
        _, grads = trainer.reply(change, text, pause=pause)
        values = np.float32(text.answer_tokens) * layer_lora.flat(grads, change.scale)
        return LayerGradient(layer_lora.frame, values, text.answer_tokens)

    def logprob(self, base: BaseLoRA | None, reply: ReplyRow, pause: Pause | None = None) -> float:
        """Return the log-probability (nats) of a reply under the base LoRA alone, summed over the reply's
        tokens. The computation needs one prefill."""
        tokens, at, total = np.asarray(reply.rated_ids, np.int32), 0, 0.0
        with with_lora(self._backend, base):
            states = self._backend.hidden_states(reply.context_ids + reply.rated_ids[:-1], pause)
            for part, logits in adapted_logits(
                None, states[len(reply.context_ids) - 1 :], self._backend.head
            ):
                total += float(kernels.logprobs(logits, tokens[at : at + len(part)]).sum())
                at += len(part)
        return total

    def fresh(self, places: Sequence[Place], pause: Pause | None = None) -> LayerLoRA:
        """Return a calibrated layer LoRA for the matrices at these places (module, layer), with lora_b = 0.
        The calibration is measured once per model and set of matrices, then stored."""
        name = zlib.crc32(json.dumps(places).encode())
        key = f"{self._model.fingerprint}/body-{name:08x}" + ("-2" if self._rank == 2 else "")
        stored = self._store.model_data.reference_text(key)
        known = _read_calibration(stored, self._model) if stored else None
        if known is None:
            known = self._calibrate(places, pause)
            out = io.BytesIO()
            np.savez(out, **known.arrays())  # type: ignore[arg-type]
            self._store.model_data.put_reference_text(key, out.getvalue())
        return known

    def _calibrate(self, places: Sequence[Place], pause: Pause | None) -> LayerLoRA:
        """Measure lora_a and the Fisher information of a layer LoRA for these places. If `pause` raises an
        exception, the next call continues the measurement."""
        trainer = self._graph(pause)
        trainer.set_head(None, None)
        answers, prose = self._texts()
        said, other = (self._means(places, texts, pause) for texts in (answers, prose[: len(answers)]))
        reads = {place: answer_direction(said[place], other[place])[:, None] for place in places}
        if self._rank == 2:
            early, late = (self._means(places, texts, pause) for texts in _halves(answers))
            for place, read in reads.items():
                near_end = answer_direction(late[place], early[place])
                reads[place] = np.column_stack([read[:, 0], near_end])
        ones = {p: np.ones((self._rank, _width(self._model, p)), np.float32) for p in places}
        plain = LayerLoRA.fresh(reads, ones)
        zero = combine_loras(None, plain, empty=True)
        assert zero is not None
        squares = np.zeros_like(plain.lora_b)
        for text in answers:
            found = self._done.get((plain.frame, text))
            if found is None:
                _, grads = trainer.reply(zero, text, pause=pause)
                found = self._done[plain.frame, text] = plain.flat(grads, 1.0)
            squares += np.float32(text.answer_tokens) * np.square(found)
        parts = np.split(squares / np.float32(len(answers)), plain.starts[1:])
        raised = [f + np.float32(MIN_FISHER_SHARE * f.mean() + 1e-12) for f in parts]
        fisher = {p: np.stack(raised[i * self._rank : (i + 1) * self._rank]) for i, p in enumerate(places)}
        self._done.clear()
        return LayerLoRA.fresh(reads, fisher)

    def _means(
        self, places: Sequence[Place], texts: Sequence["TrainingText"], pause: Pause | None
    ) -> dict[Place, np.ndarray]:
        """Return the mean input [in] of each matrix at the positions that predict tokens of the texts."""
        sums, tokens = dict[Place, np.ndarray](), sum(text.answer_tokens for text in texts)
        for text in texts:
            found = self._done.get((tuple(places), text))
            if found is None:
                found = self._done[tuple(places), text] = self._graph(pause).inputs(places, text, pause)
            for place, mean in found.items():
                sums[place] = sums.get(place, 0) + mean * (text.answer_tokens / tokens)
        return sums

    def _texts(self) -> tuple[list["TrainingText"], list["TrainingText"]]:
        """Return the answers and the prose of the reference text, each text truncated to the maximum length
        of a training text."""
        from ...training.slices import MAX_TOKENS, TrainingText

        found: tuple[list[TrainingText], list[TrainingText]] = [], []
        for question, answer in reference_text.texts():
            limit = min(MAX_TOKENS, self._model.shape.max_context)
            tokens, first = reference_text.encode_pair(self._model.tokenizer, question, answer, limit)
            found[not question].append(TrainingText(tuple(tokens), first))
        return found


def answer_direction(answers: np.ndarray, prose: np.ndarray) -> np.ndarray:
    """Return lora_a [in] of a matrix, so that x . lora_a is on average 1 for inputs x in answers and, unless
    both means are nearly parallel, 0 for inputs x in prose. answers, prose: [in], the mean inputs of the
    matrix."""
    answers, prose = answers.astype(np.float64), prose.astype(np.float64)
    apart = answers - prose * (answers @ prose) / max(prose @ prose, 1e-12)
    # this matrix's inputs in answers hardly differ from its inputs in prose
    if apart @ apart < 1e-4 * (answers @ answers):
        apart = answers
    return (apart / max(apart @ answers, 1e-12)).astype(np.float32)


def _halves(texts: Sequence["TrainingText"]) -> tuple[list["TrainingText"], list["TrainingText"]]:
    """Return the texts with only the first half of each answer, and with only the second half as the answer.
    Answers of one token are left out."""
    from ...training.slices import TrainingText

    early, late = list[TrainingText](), list[TrainingText]()
    for text in texts:
        middle = text.first + text.answer_tokens // 2
        if middle > text.first:
            early.append(TrainingText(text.tokens[:middle], text.first))
            late.append(TrainingText(text.tokens, middle))
    return early, late


def _width(model: Model, place: Place) -> int:
    shape = place_shape(model.config, *place)
    assert shape is not None
    return shape[1]


def _read_calibration(data: bytes, model: Model) -> LayerLoRA | None:
    """Decode a stored calibration. Return None if the data is damaged; the caller then calibrates again."""
    try:
        return unpack_layers(data, model.config)
    except RuvmlxError:
        return None

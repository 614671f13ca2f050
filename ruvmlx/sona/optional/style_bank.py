"""This module computes a model's style basis: directions in the weights that change the style of replies
(style_basis.py). The model writes a bank of replies, and the module computes the gradient of each reply.

    questions (style_questions.json) -> REPLIES replies to each -> gradients -> StyleBasis

The computation takes minutes for a small model, so it can be stopped at each call of `pause`. A StyleBank
keeps the finished part of the computation, and a later run continues with this part.
"""

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from ...backends.base import Backend, original_model
from ...lora.base_lora import Place
from ...models.config.model import Model
from ...pausing import Pause
from ..sampled_replies import (
    TEMPERATURE,
    BegunReply,
    SampledReply,
    question_prompt,
    sampled_replies,
    sampling_of,
)
from ..unshown import measures_of
from .style_basis import MODULE, RANK, BankGradients, StyleBasis

if TYPE_CHECKING:
    from ...training.slices import TrainingText
    from ...training.trainer import Trainer

REPLIES = 8  # the number of replies to each question
MAX_REPLY_TOKENS = 96  # the maximum number of tokens in a reply
_INPUT_TEXTS, _INPUT_ROWS = 60, 16  # lora_a comes from a layer's inputs in 60 replies, at 16 positions each
_PROSE_RIDGE = 1.0  # the ridge of the second moment of prose inputs, as a share of its mean eigenvalue
_PROSE_TOKENS = 160  # the maximum number of tokens that are used of each text of prose

# (name of the step, number of finished items, number of all items)
Progress = Callable[[str, int, int], None]


def texts(name: str) -> list[str]:
    """Return the texts of a file: "style_questions" for neutral questions, or "style_prose" for prose (texts
    that are no replies) whose probability the basis must not change."""
    text = resources.files(__package__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


@dataclass
class StyleBank:
    """The finished part of a style basis's computation. P is the number of elements of all lora_b.

    replies: (index of the question, token ids, True if the reply ended by itself) of each reply
    lora_a: [L, in, r], for L layers with inputs of size `in`, and rank r; None before its computation
    gradients: a gradient [P] float16 for each reply, in the order of the replies
    prose: a gradient [P] for each text of prose
    """

    replies: list[tuple[int, list[int], bool]] = field(default_factory=list)
    lora_a: np.ndarray | None = None
    gradients: list[np.ndarray] = field(default_factory=list)
    prose: list[np.ndarray] = field(default_factory=list)

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        np.savez(
            out, replies=np.array(json.dumps(self.replies)), gradients=_stack_rows(self.gradients),
            prose=_stack_rows(self.prose), lora_a=np.zeros(0) if self.lora_a is None else self.lora_a,
        )  # fmt: skip
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> "StyleBank":
        """Decode a stored bank. Return an empty bank if there is no data, or if the data is damaged."""
        try:
            with np.load(io.BytesIO(data or b""), allow_pickle=False) as f:
                replies = [(int(q), ids, bool(ended)) for q, ids, ended in json.loads(str(f["replies"]))]
                lora_a = f["lora_a"].astype(np.float32)
                return cls(replies, lora_a if lora_a.size else None, [*f["gradients"]], [*f["prose"]])
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            return cls()


def _stack_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.stack(rows) if rows else np.zeros((0, 0), np.float16)


class BasisBuilder:
    """A builder that completes a bank and computes the style basis. Only the backend's thread can use a
    builder. After the work, the backend has the same LoRA as before."""

    def __init__(
        self, model: Model, backend: Backend, bank: StyleBank, questions: Sequence[str], prose: Sequence[str]
    ):
        """questions: neutral questions for the model; prose: texts whose probability the basis must not
        change."""
        self._model, self._backend, self.bank = model, backend, bank
        self._questions, self._prose = questions, prose
        self._layers = tuple(range(model.config.n_layers))

    def run(self, progress: Progress, pause: Pause) -> StyleBasis:
        """Compute and return the style basis. `pause` can raise an exception to stop; the bank then holds the
        finished part."""
        from ...training.trainer import Trainer  # this import starts MLX

        self._sample(progress, pause)
        trainer = Trainer(self._model, backend=self._backend, pause=pause)
        try:
            if self.bank.lora_a is None:
                self.bank.lora_a = self._directions(trainer, pause)
            self._differentiate(trainer, progress, pause)
        finally:
            trainer.close()
        return self.basis()

    # -- replies -------------------------------------------------------------------------------------

    def _sample(self, progress: Progress, pause: Pause) -> None:
        for i in range(len(self.bank.replies) // REPLIES, len(self._questions)):
            progress("replies to learn your style from", i * REPLIES, len(self._questions) * REPLIES)
            prompt = question_prompt(self._model.tokenizer, self._questions[i])
            with original_model(self._backend):
                found = self._sample_question(prompt, np.random.default_rng([i, 31]), pause)
            self.bank.replies += [(i, ids, ended) for ids, ended in found]

    def _sample_question(
        self, prompt: Sequence[int], rng: np.random.Generator, pause: Pause
    ) -> list[SampledReply]:
        """Sample REPLIES replies to one prompt, and return them. The model reads the prompt only once."""
        first = BegunReply.of(self._backend, prompt, pause)
        begun = [first, *(first.fork() for _ in range(REPLIES - 1))]
        tokenizer, sampling = self._model.tokenizer, sampling_of(self._model)
        generators = [rng] * REPLIES
        return sampled_replies(self._backend, tokenizer, begun, generators, MAX_REPLY_TOKENS, sampling, pause)

    def _text(self, reply: tuple[int, list[int], bool]) -> "TrainingText":
        """Return a reply as a text whose gradient can be computed. The text includes the end token of the
        reply, because a direction can change the length of replies."""
        from ...training.slices import TrainingText

        question, ids, ended = reply
        tokenizer = self._model.tokenizer
        prompt = question_prompt(tokenizer, self._questions[question])
        return TrainingText.cut(prompt, [*ids, *([min(tokenizer.eos_ids)] if ended else [])])

    # -- gradients -----------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [(MODULE, layer) for layer in self._layers]

    def _directions(self, trainer: "Trainer", pause: Pause) -> np.ndarray:
        """Return lora_a [L, in, RANK]: for each layer, directions along which its inputs are large in replies
        and small in prose. So a change along these directions hardly changes the predictions in prose."""
        rng = np.random.default_rng(0)
        chosen = rng.permutation(len(self.bank.replies))[:_INPUT_TEXTS]
        replies = self._inputs(trainer, [self._text(self.bank.replies[at]) for at in chosen], rng, pause)
        prose = self._inputs(trainer, [self._prose_text(text) for text in self._prose], rng, pause)
        return np.stack([leading(replies[place], prose[place], RANK) for place in self._places()])

    def _inputs(
        self, trainer: "Trainer", some: "Sequence[TrainingText]", rng: np.random.Generator, pause: Pause
    ) -> dict[Place, np.ndarray]:
        """Return the inputs [n, in] of each place (module, layer) at _INPUT_ROWS random positions of each
        text."""
        rows = dict[Place, list[np.ndarray]]()
        for text in some:
            picks = np.sort(rng.permutation(text.answer_tokens)[:_INPUT_ROWS])
            for place, x in trainer.input_rows(self._places(), text, picks, pause).items():
                rows.setdefault(place, []).append(x)
        return {place: np.concatenate(found) for place, found in rows.items()}

    def _prose_text(self, prose: str) -> "TrainingText":
        from ...training.slices import TrainingText

        return TrainingText(tuple(self._model.tokenizer.encode(prose)[:_PROSE_TOKENS]), 1)

    def _differentiate(self, trainer: "Trainer", progress: Progress, pause: Pause) -> None:
        assert self.bank.lora_a is not None
        lora_a = dict(zip(self._places(), self.bank.lora_a, strict=True))
        for prose in self._prose[len(self.bank.prose) :]:
            text = self._prose_text(prose)
            self.bank.prose.append(self._gradient(trainer, lora_a, text, 1.0, pause))
        for reply in self.bank.replies[len(self.bank.gradients) :]:
            progress("gradients of them", len(self.bank.gradients), len(self.bank.replies))
            found = self._gradient(trainer, lora_a, self._text(reply), TEMPERATURE, pause)
            self.bank.gradients.append(found)

    def _gradient(
        self,
        trainer: "Trainer",
        lora_a: dict[Place, np.ndarray],
        text: "TrainingText",
        at: float,
        pause: Pause,
    ) -> np.ndarray:
        found = trainer.scores(lora_a, text, at, pause)
        return np.concatenate([found[place].ravel() for place in self._places()]).astype(np.float16)

    # -- the basis -----------------------------------------------------------------------------------

    def gradients(self) -> BankGradients:
        """Return the gradients and measures of the replies whose gradients are computed."""
        bank, decode = self.bank, self._model.tokenizer.decode
        rows, known = np.stack(bank.gradients).astype(np.float32), bank.replies[: len(bank.gradients)]
        return BankGradients(
            rows,
            measures_of([(decode(ids), ended) for _, ids, ended in known]),
            np.array([question for question, *_ in known]),
            np.array([len(ids) for _, ids, _ in known]),
            np.stack(bank.prose).astype(np.float32) if bank.prose else np.zeros((0, rows.shape[1])),
        )

    def basis(self) -> StyleBasis:
        assert self.bank.lora_a is not None
        return StyleBasis.of(self.gradients(), self.bank.lora_a, self._layers)


def leading(rows: np.ndarray, prose: np.ndarray, rank: int) -> np.ndarray:
    """Return the vectors a [in, rank] with the largest ratio of the mean of (a . x)^2 over `rows` to the mean
    of (a . x)^2 over `prose` (generalised eigenvectors). Each vector is scaled so that the mean over `rows`
    is 1.

    rows: [n, in], n inputs x of a layer in replies
    prose: [m, in], m inputs x of the layer in prose
    """
    # The computation is in the span of all inputs, whose dimension can be much smaller than `in`.
    axes = np.linalg.qr(np.concatenate([rows, prose]).T.astype(np.float64))[0]
    inner, outer = rows @ axes, prose @ axes
    moment = outer.T @ outer / len(outer)
    moment += _PROSE_RIDGE * np.trace(moment) / rows.shape[1] * np.eye(len(moment))
    root = np.linalg.cholesky(moment)
    _, _, best = np.linalg.svd(np.linalg.solve(root, inner.T).T, full_matrices=False)
    found = np.linalg.solve(root.T, best[:rank].T)
    scale = np.sqrt(np.maximum(((inner @ found) ** 2).mean(axis=0), 1e-12))
    return (axes @ (found / scale)).astype(np.float32)

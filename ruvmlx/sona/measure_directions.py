"""This module finds which tokens raise each measure of a reply, without any rating.

A measure is a number that describes a reply's text, such as its number of lists (taste_measures.py). The
effect of a token on lists, headings or paragraphs depends on the token's place in the reply. So a list of
tokens that ignores their places says little about these measures. But the replies of a model to one question
differ in their measures. The gradient of a reply's log-probability by lora_b's first row says which tokens
the reply has more often than expected. The log-probability is that of the distribution from which each token
is drawn, after penalties, filters and temperature. With another distribution, a part of the gradient would
only say how long a reply is and how sure the model is, and a change of logits cannot use this part.

The regression of each measure on these gradients gives a direction in lora_b that raises the measure. For N
replies, A tokens and M measures, X [N, A] are the gradients and Y [N, M] the measures, both minus their means
over the replies to the same question:
    directions = Y^T (X X^T + RIDGE I mean(diag(X X^T)))^-1 X

The directions are computed once per model, because they need no ratings. Later, ratings decide how much each
measure is raised or lowered (taste_push.py).
"""

import io
import zipfile
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import Backend, original_model
from ..models.config.model import Model
from ..models.text import thinking
from ..pausing import Pause
from ..store import Store
from . import embedding, faults, reference_text
from .kl_probe import KLProbe
from .sampled_replies import BegunReply, SampledReply, question_prompt, sampled_replies, sampling_of
from .shipped import shipped_bytes
from .taste_measures import MEASURES, measure_text

# The number of replies to each question, and the number of replies in one batch. The batch is small, because
# one step of a batch cannot be interrupted.
REPLIES, TOGETHER = 16, 4
MAX_REPLY_TOKENS = 96
RIDGE = 3.0
MIN_QUESTIONS = 16  # the minimum number of answered questions from which directions are computed
SAVE_AFTER = 8  # the number of answered questions from one save of the DirectionBank to the next
# The names in the store of the directions and of the DirectionBank. No adapter can have these names.
FINISHED, _UNFINISHED = "replies/directions", "replies/direction-bank"


def questions() -> list[str]:
    """Return 98 everyday questions. The directions come from the model's replies to these questions. With
    fewer questions, the directions follow a taste less well (docs/studies.md)."""
    asked = [*reference_text.questions(), *embedding.everyday_questions(), *faults.questions()]
    return list(dict.fromkeys(asked))


@dataclass(frozen=True)
class MeasureDirections:
    """The directions of M measures: the changes of logits that raise each measure.

    tokens: [A], the ids of the A tokens whose logits change, ascending
    directions: [M, A] float32, for each measure its regression coefficients: the changes of the tokens'
        logits, up to a common factor, that raise the measure
    """

    tokens: np.ndarray
    directions: np.ndarray

    def logits(self, weights: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the change [B] of the logits of B tokens. weights: [M], the factor of each measure's
        direction in the sum. The change is 0 for a token that has no direction."""
        at = np.searchsorted(self.tokens, tokens).clip(max=len(self.tokens) - 1)
        return np.where(self.tokens[at] == tokens, (weights @ self.directions)[at], 0)

    def to_bytes(self) -> bytes:
        out, size = io.BytesIO(), np.abs(self.directions).max(axis=1, keepdims=True)
        rows = (self.directions / np.maximum(size, 1e-30)).astype(np.float16)
        np.savez_compressed(out, tokens=self.tokens, rows=rows, size=size.astype(np.float32))
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> "MeasureDirections | None":
        """Decode stored directions. Return None if there is no data, or if the data is damaged or belongs to
        other measures."""
        try:
            with np.load(io.BytesIO(data or b""), allow_pickle=False) as f:
                found = cls(f["tokens"], f["rows"].astype(np.float32) * f["size"])
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            return None
        fits = found.directions.shape == (len(MEASURES), found.tokens.size) and found.tokens.size
        return found if fits and np.isfinite(found.directions).all() else None


@dataclass
class DirectionBank:
    """The gradients and measures of the replies that a model has written so far to find the directions.

    tokens: [A], the ids of the movable tokens (ratings may change their logits), ascending
    gradients: for each question, [REPLIES, A] float16, the gradients of its replies
    measures: for each question, [REPLIES, M] float32, the measures of its replies
    """

    tokens: np.ndarray
    gradients: list[np.ndarray] = field(default_factory=list)
    measures: list[np.ndarray] = field(default_factory=list)

    def add(
        self, model: Model, backend: Backend, question: str, lora_a: np.ndarray, seed: int, pause: Pause
    ) -> None:
        """Let the original model write replies to one question, and add the replies' gradients and measures
        to the bank. lora_a: [D], the first column of the calibrated lora_a (D: hidden size)."""
        tokenizer, rng = model.tokenizer, np.random.default_rng([41, seed])
        sums, found = np.zeros((REPLIES, self.tokens.size), np.float32), list[SampledReply]()

        def note(i: int, token: int, ids: np.ndarray, p: np.ndarray, hidden: np.ndarray) -> None:
            reading, row = np.float32(hidden @ lora_a), sums[len(found) + i]
            at, known = self._places(ids)
            row[at[known]] -= reading * p[known]
            row[self.tokens == token] += reading

        with original_model(backend):
            first = BegunReply.of(backend, question_prompt(tokenizer, question), pause)
            while len(found) < REPLIES:
                begun = [first.fork() for _ in range(min(TOGETHER, REPLIES - len(found)))]
                found += sampled_replies(
                    backend, tokenizer, begun, [rng] * len(begun), MAX_REPLY_TOKENS, sampling_of(model),
                    pause, note=note,
                )  # fmt: skip
        texts = [(thinking.split(tokenizer.decode(ids)).answer, ended) for ids, ended in found]
        self.gradients.append(sums.astype(np.float16))
        self.measures.append(np.stack([measure_text(*text) for text in texts]))

    def _places(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of token ids [C] in `tokens`, and True for each id that is in `tokens`."""
        at = np.searchsorted(self.tokens, ids).clip(max=len(self.tokens) - 1)
        return at, self.tokens[at] == ids

    def directions(self) -> MeasureDirections:
        gradients = [centre(np.asarray(rows, np.float64)) for rows in self.gradients]
        measures = [centre(np.asarray(rows, np.float64)) for rows in self.measures]
        return MeasureDirections(self.tokens, regress(np.concatenate(gradients), np.concatenate(measures)))

    def to_bytes(self) -> bytes:
        out, text = io.BytesIO(), np.array(reference_text.digest())
        np.savez(out, tokens=self.tokens, gradients=self.gradients, measures=self.measures, text=text)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes | None, tokens: np.ndarray) -> "DirectionBank":
        """Decode a stored bank. Return an empty bank if the data is missing or damaged, or if the bank
        belongs to other tokens, measures or reference texts."""
        try:
            with np.load(io.BytesIO(data or b""), allow_pickle=False) as f:
                found = cls(f["tokens"], [*f["gradients"]], [*f["measures"]])
                fits = str(f["text"]) == reference_text.digest() and np.array_equal(found.tokens, tokens)
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile):
            return cls(tokens)
        shapes = {rows.shape for rows in found.measures} | {(REPLIES, len(MEASURES))}
        return found if fits and len(shapes) == 1 else cls(tokens)


def centre(rows: np.ndarray) -> np.ndarray:
    return rows - rows.mean(axis=0)


def regress(gradients: np.ndarray, measures: np.ndarray) -> np.ndarray:
    """Return the coefficients [M, A] of the ridge regression of measures [N, M] on gradients [N, A]. The
    function solves the smaller of the two equal systems, of N or of A equations."""
    ridge = RIDGE * max(float(np.mean(np.sum(gradients**2, axis=1))), 1e-12)
    if len(gradients) > gradients.shape[1]:
        gram = gradients.T @ gradients + ridge * np.eye(gradients.shape[1])
        return np.linalg.solve(gram, gradients.T @ measures).T.astype(np.float32)
    gram = gradients @ gradients.T + ridge * np.eye(len(gradients))
    return (np.linalg.solve(gram, measures).T @ gradients).astype(np.float32)


class StoredDirections:
    """The source of one model's directions: a file in this package, or else the store. Only the backend's
    thread can use this object."""

    def __init__(self, store: Store, fingerprint: str):
        self._store, self._fingerprint = store, fingerprint
        self._bank: DirectionBank | None = None  # the bank of an unfinished computation
        self._found: MeasureDirections | None = None
        self._complete = False

    @property
    def are_shipped(self) -> bool:
        return shipped_bytes("directions", self._fingerprint) is not None

    def of(self, tokens: np.ndarray) -> MeasureDirections | None:
        """Return the directions for the movable tokens. Return None if there are no finished directions and
        the model has answered fewer than MIN_QUESTIONS questions."""
        if self._found is None:
            data = shipped_bytes("directions", self._fingerprint) or self._load(FINISHED)
            self._found = MeasureDirections.from_bytes(data)
            self._complete = self._found is not None
        if self._found is None and len(self._loaded_bank(tokens).gradients) >= MIN_QUESTIONS:
            self._found = self._loaded_bank(tokens).directions()
        return self._found

    def complete(self, model: Model, backend: Backend, probe: KLProbe, pause: Pause) -> None:
        """Let the model write the replies that the bank does not have yet, and store the directions. The work
        is done once for each model. The work takes minutes, so call this function in idle time. `pause` can
        raise an exception to stop; the replies to the finished questions are then stored."""
        self.of(probe.tokens)
        if self._complete:
            return
        bank, asked, unsaved = self._loaded_bank(probe.tokens), questions(), 0
        lora_a = np.ascontiguousarray(probe.directions[:, 0])
        try:
            for i in range(len(bank.gradients), len(asked)):
                bank.add(model, backend, asked[i], lora_a, i, pause)
                unsaved += 1
                if unsaved == SAVE_AFTER:
                    self._put(_UNFINISHED, bank.to_bytes())
                    self._found, unsaved = None, 0
        except BaseException:
            if unsaved:
                self._put(_UNFINISHED, bank.to_bytes())
            raise
        self._found, self._complete, self._bank = bank.directions(), True, None
        self._put(FINISHED, self._found.to_bytes())
        with self._store.transaction():
            self._store.checkpoints.delete_measurement(self._fingerprint, _UNFINISHED)

    def _loaded_bank(self, tokens: np.ndarray) -> DirectionBank:
        if self._bank is None:
            self._bank = DirectionBank.from_bytes(self._load(_UNFINISHED), tokens)
        return self._bank

    def _load(self, name: str) -> bytes | None:
        return self._store.checkpoints.measurement(self._fingerprint, name)

    def _put(self, name: str, data: bytes) -> None:
        self._store.checkpoints.put_measurement(self._fingerprint, name, data)

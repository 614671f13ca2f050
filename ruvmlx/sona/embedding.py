"""This module computes embeddings: it turns a text into a vector, so that similar texts can be found. It has
two methods.

`read_question` embeds a question for the memory. Stored vectors are compared with new vectors, so this method
must not change.

The user's message is read alone, without template or conversation. So the same question has the same vector
in every chat. The final hidden states of the message are averaged. Later states weigh more, because only they
have seen the rest of the message (position weights as in SGPT, Muennighoff 2022). The means of all questions
share a few large directions that say nothing about the topic. Whitening with everyday questions scales these
directions down. On 120 questions in 60 pairs with the same meaning (starter model), the paraphrase was the
nearest for 42% with the plain centred mean, for 63% with position weights, and for 92% with whitening as
well.

`vectors` embeds any text. The model reads the whole text in windows of equal length, at most WINDOW tokens,
each window in its own context. Each window is pooled like a question. The vector of the text is the mean of
its windows, weighted by their tokens. An embedding model reads the whole text in one context instead, and the
vector is the hidden state of the last token (models/config/embedding_model.py).
"""

import io
import json
import time
import zipfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise

import numpy as np

from ..backends.base import Backend, original_model
from ..errors import RuvmlxError, UsageError
from ..models.config.embedding_model import END
from ..models.config.model import Model, Tokenizer
from ..pausing import Pause
from ..store import Store

MAX_TOKENS = 128  # tokens that are read of a message; of a longer one, the first and last half of this number
MAX_TEXT_TOKENS = 8192  # the maximum number of tokens in a text to embed
WINDOW = 512  # the maximum number of tokens of a text that are read in one context
SLICE = 0.05  # after this many seconds of reading, other work can run
MIN_SLICE_TOKENS = 32  # the minimum number of tokens in a slice
WHITENED = 32  # the number of leading directions that are scaled down to the next direction
DIMENSIONS = 576  # the size of a vector; wider states are projected, so 10,000 questions need < 24 MB


def mean_pool(hidden: np.ndarray) -> np.ndarray:
    """Return the position-weighted mean of hidden states: [T, D] -> [D] float32, sum_t t h_t / sum_t t with t
    from 1."""
    weight = np.arange(1, len(hidden) + 1, dtype=np.float32)
    return (weight @ hidden / weight.sum()).astype(np.float32)


def read_question(backend: Backend, tokenizer: Tokenizer, text: str) -> np.ndarray | None:
    """Return the pooled hidden state [D] of one message; None if the message is empty. This is one prefill of
    at most MAX_TOKENS tokens."""
    states = _states(backend, tokenizer, text)
    return mean_pool(states) if len(states) else None


def _states(backend: Backend, tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the hidden states [T, D] of a message's own tokens. The model reads a beginning-of-text token
    first, but its state is left out."""
    # at most this many characters of each end are tokenized, because a pasted text can be long
    most = 16 * MAX_TOKENS
    ids = tokenizer.encode(text[:most] + text[most:][-most:], add_bos=False)
    if len(ids) > MAX_TOKENS:
        ids = ids[: MAX_TOKENS // 2] + ids[-MAX_TOKENS // 2 :]
    if not ids:
        return np.zeros((0, 0), np.float32)
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return backend.hidden_states(bos + ids)[len(bos) :]


@dataclass(frozen=True)
class Whitening:
    """A map from pooled hidden states to unit vectors. The dot product of two vectors is the similarity of
    two questions.

    mean: [D], the mean state of everyday questions
    basis: [D, k], the leading directions of everyday questions
    gain: [k], the factor of each direction, which gives the direction the variance of direction k + 1

    With the starter model, the similarity is about 0.57 for two questions with one meaning, 0.27 for one
    topic, and 0 for other questions.
    """

    mean: np.ndarray
    basis: np.ndarray
    gain: np.ndarray

    @property
    def dimensions(self) -> int:
        return min(len(self.mean), DIMENSIONS)

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the vectors of pooled states: [..., D] -> [..., dimensions] float32. Each vector has length
        1, or length 0 if the state equals the mean."""
        x = np.asarray(states, np.float32) - self.mean
        x = x - ((x @ self.basis) * (1 - self.gain)) @ self.basis.T
        if x.shape[-1] > DIMENSIONS:
            x = x @ _projection(x.shape[-1])
        return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9)

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        np.savez(out, mean=self.mean, basis=self.basis, gain=self.gain)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, hidden_size: int) -> "Whitening | None":
        """Read a stored whitening. Return None if the data is damaged or has another shape; the caller then
        measures again."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                mean, basis, gain = f["mean"], f["basis"], f["gain"]
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        shapes = mean.shape == (hidden_size,) and basis.shape == (hidden_size, len(gain))
        return (
            cls(mean, basis, gain)
            if shapes and all(np.isfinite(a).all() for a in (mean, basis, gain))
            else None
        )


class ReadQuestions:
    """The hidden states of the everyday questions (questions.json, about 330 tokens) that the model has read
    so far."""

    def __init__(self) -> None:
        self._states: list[np.ndarray] = []

    def read(self, backend: Backend, tokenizer: Tokenizer, pause: Pause | None = None) -> np.ndarray:
        """Read the remaining everyday questions and return the hidden states [T, D] of all. `pause` may raise
        an exception to stop; the next call continues."""
        text = resources.files(__package__).joinpath("questions.json").read_text(encoding="utf-8")
        for question in json.loads(text)[len(self._states) :]:
            if pause is not None:
                pause()
            self._states.append(_states(backend, tokenizer, question))
        return np.concatenate(self._states)


def whitening_of(
    store: Store, model: Model, backend: Backend,
    read: ReadQuestions | None = None, pause: Pause | None = None,
) -> Whitening:  # fmt: skip
    """Return the model's whitening from the store. If the store has none, measure it, which takes seconds,
    and store it.

    read: the questions that were read before
    pause: a function that may raise an exception to stop
    """
    stored = store.model_data.whitening(model.fingerprint)
    known = Whitening.from_bytes(stored, model.shape.hidden_size) if stored else None
    if known is None:
        with original_model(backend):
            known = whitening((read or ReadQuestions()).read(backend, model.tokenizer, pause))
        store.model_data.put_whitening(model.fingerprint, known.to_bytes())
    return known


def text_ids(model: Model, text: str) -> list[int]:
    """Return the token ids of a text to embed. Raises UsageError if the text is empty, or longer than
    MAX_TEXT_TOKENS or than the context of an embedding model."""
    end = [id for token, id in model.tokenizer.special_tokens.items() if model.embeds and token == END]
    most = min(MAX_TEXT_TOKENS, model.context - len(end)) if model.embeds else MAX_TEXT_TOKENS
    ids = model.tokenizer.encode(text, add_bos=False, most=most)
    if not ids:
        raise UsageError("a text to embed is empty; give some words.")
    if len(ids) > most:
        raise UsageError(f"a text to embed has more than {most} tokens; give it in parts.")
    return ids + end


def method_of(model: Model) -> str:
    """Return the name of the method by which this model embeds texts."""
    if model.embeds:
        return f"last token's state, by {model.name}, which is trained for it"
    return f"mean of the states, whitened, by {model.name}, which is a chat model"


def vectors(
    store: Store, model: Model, backend: Backend, texts: Sequence[Sequence[int]]
) -> Generator[None, None, list[np.ndarray]]:
    """Return one unit vector [dimensions] per text, from the original model. texts: the token ids that
    `text_ids` returns.

    This generator yields about every SLICE seconds, so that other work can run.
    """
    reader, found = TextReader(backend, model.tokenizer.bos_id), []
    whitened = None if model.embeds else whitening_of(store, model, backend)
    for ids in texts:
        if whitened is None:
            state = (yield from reader.states(ids))[-1]
            found.append(state / np.maximum(np.linalg.norm(state), 1e-9))
        else:
            found.append(whitened((yield from reader.mean_pool_windows(ids))))
    return found


class TextReader:
    """A reader of whole texts. It uses the model without any adapter, and it reads in slices."""

    def __init__(self, backend: Backend, bos: int | None):
        self._backend, self._bos = backend, [] if bos is None else [bos]
        self._spent, self._pace = 0.0, 0.0  # seconds of this slice so far; tokens per second

    def mean_pool_windows(self, ids: Sequence[int]) -> Generator[None, None, np.ndarray]:
        """Return the mean of the windows' pooled states, weighted by their numbers of tokens: ids [T] ->
        [D]."""
        count = -(-len(ids) // WINDOW)
        ends = [len(ids) * i // count for i in range(count + 1)]
        total = np.zeros(1, np.float32)
        for start, end in pairwise(ends):
            states = yield from self.states(ids[start:end])
            total = total + (end - start) * mean_pool(states)
        return total / np.float32(len(ids))

    def states(self, ids: Sequence[int]) -> Generator[None, None, np.ndarray]:
        """Return the hidden states [T, D] of tokens that are read in one context."""
        window, states = [*self._bos, *ids], []
        cache, done = self._backend.new_cache(), 0
        while done < len(window):
            if self._spent >= SLICE:
                self._spent = 0.0
                yield
            part = window[done : done + self._size(len(window) - done)]
            begun = time.perf_counter()
            with original_model(self._backend):
                states.append(self._backend.hidden_states(part, cache=cache))
            self._count(len(part), time.perf_counter() - begun)
            done += len(part)
        return np.concatenate(states)[len(self._bos) :]

    def _size(self, left: int) -> int:
        """Return the number of tokens to read in the next call: enough to fill the slice, at least
        MIN_SLICE_TOKENS. If fewer than MIN_SLICE_TOKENS tokens would be left for another call, this call
        reads them, too."""
        size = max(
            MIN_SLICE_TOKENS, int(self._pace * (SLICE - self._spent)) // MIN_SLICE_TOKENS * MIN_SLICE_TOKENS
        )
        return left if left < size + MIN_SLICE_TOKENS else size

    def _count(self, tokens: int, seconds: float) -> None:
        self._spent += seconds
        self._pace = tokens / seconds if seconds > 0 else self._pace


def embed(store: Store, model: Model, backend: Backend, texts: Sequence[str]) -> list[np.ndarray]:
    """Return one unit vector [dimensions] per text, from the original model. Raises UsageError as in
    `text_ids`."""
    slices = vectors(store, model, backend, [text_ids(model, text) for text in texts])
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def measure(backend: Backend, tokenizer: Tokenizer) -> Whitening:
    """Read the everyday questions with the model (about 330 tokens of prefill) and return the whitening."""
    return whitening(ReadQuestions().read(backend, tokenizer))


def whitening(states: np.ndarray) -> Whitening:
    """Return the whitening from the hidden states [T, D] of everyday questions."""
    if not np.isfinite(states).all():
        raise RuvmlxError(
            "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
        )
    states = states.astype(np.float64)
    mean = states.mean(axis=0)
    _, sigma, rows = np.linalg.svd(states - mean, full_matrices=False)
    k = min(WHITENED, len(sigma) - 1)
    gain = sigma[k] / np.maximum(sigma[:k], 1e-12)
    return Whitening(*(np.ascontiguousarray(a, np.float32) for a in (mean, rows[:k].T, gain)))


@cache
def _projection(width: int) -> np.ndarray:
    """Return a random projection [width, DIMENSIONS], the same on every machine. The projection changes the
    cosine of two vectors by about 0.042."""
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (width, DIMENSIONS), dtype=np.int8)
    return (2 * signs.astype(np.float32) - 1) / np.float32(np.sqrt(DIMENSIONS))

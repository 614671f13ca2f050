"""This module computes embeddings: it turns a text into a vector, so that similar texts can be found. The
module has two methods.

`read_question` embeds a user's question, so that similar rated questions can be found. The store keeps the
results of `read_question`, with which new questions are compared, so the method of `read_question` must not
change.

The model reads the user's message alone, without the chat template and the conversation. So the same question
has the same vector in every chat. The vector is a mean of the message's final hidden states. Later states
have larger weights in the mean, because a later state depends on more of the message (position weights as in
SGPT, Muennighoff 2022). The vectors of different questions differ mostly along a few directions that say
little about the topic. Whitening scales a vector down along such directions, which are computed from the
hidden states of everyday questions (questions.json). A test used 120 questions in 60 pairs with the same
meaning (starter model). The paraphrase was the nearest question for 42% of the questions with an unweighted
mean (minus the mean of all questions), for 63% with position weights, and for 92% with position weights and
whitening.

`vectors` embeds any text. A chat model reads the whole text in windows of about equal length, at most WINDOW
tokens, each window in its own context. The hidden states of a window are averaged in the same way as the
hidden states of a question. The vector of the text is the whitened mean of the windows' averages, weighted by
the windows' numbers of tokens. An embedding model reads the whole text in one context instead, and the vector
is the hidden state of the last token (models/config/embedding_model.py). An encoder, a model of BERT's kind,
pools the states as its files say (models/config/encoder.py).
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
from typing import TypeVar, cast

import numpy as np

from ..backends.base import QUESTIONS, Backend, Embedding, original_model, worker
from ..errors import RuvmlxError, SideFailed, TextTooLong, UsageError
from ..models.config.embedding_model import END
from ..models.config.encoder import EncoderConfig
from ..models.config.model import Model, Tokenizer
from ..pausing import Pause
from ..store import Store
from .shipped import shipped_bytes

T = TypeVar("T")
# The maximum number of tokens that the model reads of a message. Of a longer message, the model reads the
# first 64 and the last 64 tokens.
MAX_TOKENS = 128
MAX_TEXT_TOKENS = 8192  # the maximum number of tokens in a text to embed
WINDOW = 512  # the maximum number of tokens of a text that are read in one context
SLICE = 0.05  # seconds; after a slice of this length, the reader lets other work run
MIN_SLICE_TOKENS = 32  # the minimum number of tokens that the model reads in one slice
WHITENED = 32  # at most this number of leading directions get the variance of the next direction
DIMENSIONS = 576  # the maximum size of a vector; larger states are projected to it (10,000 vectors: < 24 MB)


def mean_pool(hidden: np.ndarray) -> np.ndarray:
    """Return the position-weighted mean of hidden states, sum_t t h_t / sum_t t with t from 1: [T, D] -> [D]
    float32 (T tokens, D hidden size)."""
    weight = np.arange(1, len(hidden) + 1, dtype=np.float32)
    return (weight @ hidden / weight.sum()).astype(np.float32)


def read_question(backend: Backend, tokenizer: Tokenizer, text: str) -> np.ndarray | None:
    """Return the pooled hidden state [D] of one message; None if the message is empty. The model reads at
    most MAX_TOKENS tokens in one prefill."""
    states = _states(backend, tokenizer, text)
    return mean_pool(states) if len(states) else None


def _states(backend: Backend, tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the hidden states [T, D] of a message's own tokens. The model reads a beginning-of-text token
    first, but the state of this token is left out."""
    # Tokenize at most this many characters of each end of the message, because a pasted text can be long.
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
    """A map from pooled hidden states of questions to unit vectors. The dot product of two vectors is the
    similarity of two questions.

    mean: [D], the mean hidden state of everyday questions (D: hidden size)
    basis: [D, k], the leading directions of everyday questions
    gain: [k], the factor of each direction, which gives the direction the variance of direction k + 1

    With the starter model, the similarity is about 0.57 for two questions with the same meaning, 0.27 for two
    questions about one topic, and 0 for other questions.
    """

    mean: np.ndarray
    basis: np.ndarray
    gain: np.ndarray

    @property
    def dimensions(self) -> int:
        return min(len(self.mean), DIMENSIONS)

    def __call__(self, states: np.ndarray) -> np.ndarray:
        """Return the vectors of pooled hidden states: [..., D] -> [..., dimensions] float32. Each vector has
        length 1, or length 0 if its state equals the mean."""
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
        """Decode a stored whitening. Return None if the data is damaged or has another shape; the caller then
        measures the whitening again."""
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


def everyday_questions() -> list[str]:
    return json.loads(resources.files(__package__).joinpath("questions.json").read_text(encoding="utf-8"))


class ReadQuestions:
    """The hidden states of the everyday questions (questions.json, about 330 tokens) that the model has read
    so far."""

    def __init__(self) -> None:
        self._states: list[np.ndarray] = []

    def read(self, backend: Backend, tokenizer: Tokenizer, pause: Pause | None = None) -> np.ndarray:
        """Let the model read the everyday questions that it has not read yet. Return the hidden states [T, D]
        of the T tokens of all everyday questions together, in the questions' order. `pause` can raise an
        exception to stop; the next call continues."""
        for question in everyday_questions()[len(self._states) :]:
            if pause is not None:
                pause()
            self._states.append(_states(backend, tokenizer, question))
        return np.concatenate(self._states)


def whitening_of(
    store: Store, model: Model, backend: Backend,
    read: ReadQuestions | None = None, pause: Pause | None = None,
) -> Whitening:  # fmt: skip
    """Return the model's whitening from the store. If the store has no whitening, take the whitening from
    this package, or else measure the whitening, which takes seconds. Then store it.

    read: the everyday questions that the model has already read
    pause: a function that can raise an exception to stop the measurement
    """
    fingerprint, size = model.fingerprint, model.shape.hidden_size
    stored = store.model_data.whitening(fingerprint)
    if stored and (known := Whitening.from_bytes(stored, size)):
        return known
    shipped = shipped_bytes("whitenings", fingerprint)
    known = Whitening.from_bytes(shipped, size) if shipped else None
    if known is None:
        backend = worker(backend, QUESTIONS)
        with original_model(backend):
            known = whitening((read or ReadQuestions()).read(backend, model.tokenizer, pause))
    store.model_data.put_whitening(fingerprint, known.to_bytes())
    return known


def text_ids(model: Model, text: str, is_cut: bool = False) -> list[int]:
    """Return the token ids of a text to embed. Raises UsageError if the text is empty. If the text is longer
    than MAX_TEXT_TOKENS or than the context of an embedding model, raises TextTooLong, or leaves the end of
    the text out if `is_cut`."""
    begin, end = _frame(model)
    room = model.context - len(begin) - len(end)
    most = min(MAX_TEXT_TOKENS, room) if model.embeds else MAX_TEXT_TOKENS
    ids = model.tokenizer.encode(text, add_bos=False, most=most)
    if not ids:
        raise UsageError("a text to embed is empty; give some words.")
    if len(ids) > most and not is_cut:
        raise TextTooLong(f"a text to embed has more than {most} tokens; give it in parts.")
    return begin + ids[:most] + end


def _frame(model: Model) -> tuple[list[int], list[int]]:
    """Return the special tokens that an embedding model reads before and behind a text."""
    tokenizer = model.tokenizer
    if isinstance(model.shape, EncoderConfig):
        first, last = ([id] if id is not None else [] for id in (tokenizer.bos_id, tokenizer.eos_id))
        return first, last
    return [], [id for token, id in tokenizer.special_tokens.items() if model.embeds and token == END]


def method_of(model: Model) -> str:
    """Return words for the method by which this model embeds texts."""
    if isinstance(model.shape, EncoderConfig):
        named = {
            "mean": "mean of the states",
            "cls": "first token's state",
            "lasttoken": "last token's state",
        }
        return f"{named[model.shape.pooling]}, by {model.name}, an encoder"
    if model.embeds:
        return f"last token's state, by {model.name}, which is trained for it"
    return f"mean of the states, whitened, by {model.name}, which is a chat model"


def vectors(
    store: Store, model: Model, backend: Backend, texts: Sequence[Sequence[int]]
) -> Generator[None, None, list[np.ndarray]]:
    """Return one unit vector [dimensions] per text, computed without any adapter. This generator yields about
    every SLICE seconds, so that other work can run; it does not yield while a new chat model's whitening is
    measured.

    texts: the token ids of each text, from `text_ids`
    """
    if isinstance(backend, Embedding):
        return (yield from slices(backend.text_vectors(texts)))
    reader, found = TextReader(worker(backend, QUESTIONS), model.tokenizer.bos_id), []
    whitened = None if model.embeds else whitening_of(store, model, backend)
    for ids in texts:
        if whitened is None:
            state = (yield from reader.states(ids))[-1]
            found.append(state / np.maximum(np.linalg.norm(state), 1e-9))
        else:
            found.append(whitened((yield from reader.mean_pool_windows(ids))))
    return found


def slices(steps: Generator[None, None, T]) -> Generator[None, None, T]:
    """Run a generator that yields every few milliseconds. Yield only when SLICE seconds have passed."""
    begun = time.perf_counter()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(T, end.value)
        if time.perf_counter() - begun >= SLICE:
            yield
            begun = time.perf_counter()


class TextReader:
    """A reader that computes hidden states of whole texts. The reader uses the model without any adapter.
    After each slice (SLICE seconds), the reader lets other work run."""

    def __init__(self, backend: Backend, bos: int | None):
        self._backend, self._bos = backend, [] if bos is None else [bos]
        self._spent, self._pace = 0.0, 0.0  # seconds of this slice so far; the reader's tokens per second

    def mean_pool_windows(self, ids: Sequence[int]) -> Generator[None, None, np.ndarray]:
        """Return the mean of the windows' pooled states, weighted by the windows' numbers of tokens: ids [T]
        -> [D]."""
        count = -(-len(ids) // WINDOW)
        ends = [len(ids) * i // count for i in range(count + 1)]
        total = np.zeros(1, np.float32)
        for start, end in pairwise(ends):
            states = yield from self.states(ids[start:end])
            total = total + (end - start) * mean_pool(states)
        return total / np.float32(len(ids))

    def states(self, ids: Sequence[int]) -> Generator[None, None, np.ndarray]:
        """Let the model read tokens in one context, and return their hidden states [T, D]. If a side of the
        backend fails, the other side reads them."""
        try:
            return (yield from self._states(ids))
        except SideFailed:
            return (yield from self._states(ids))

    def _states(self, ids: Sequence[int]) -> Generator[None, None, np.ndarray]:
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
        """Return the number of tokens to read in the next call of the backend: enough to fill the slice, but
        at least MIN_SLICE_TOKENS. If fewer than MIN_SLICE_TOKENS tokens would then be left over, the call
        reads all `left` tokens."""
        size = max(
            MIN_SLICE_TOKENS, int(self._pace * (SLICE - self._spent)) // MIN_SLICE_TOKENS * MIN_SLICE_TOKENS
        )
        return left if left < size + MIN_SLICE_TOKENS else size

    def _count(self, tokens: int, seconds: float) -> None:
        self._spent += seconds
        self._pace = tokens / seconds if seconds > 0 else self._pace


def embed(store: Store, model: Model, backend: Backend, texts: Sequence[str]) -> list[np.ndarray]:
    """Return one unit vector [dimensions] per text, computed without any adapter. Raises UsageError for the
    texts that `text_ids` refuses."""
    slices = vectors(store, model, backend, [text_ids(model, text) for text in texts])
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value


def measure(backend: Backend, tokenizer: Tokenizer) -> Whitening:
    """Let the model read the everyday questions (a prefill of about 330 tokens) and return the whitening."""
    return whitening(ReadQuestions().read(backend, tokenizer))


def whitening(states: np.ndarray) -> Whitening:
    """Compute the whitening from the hidden states [T, D] of everyday questions."""
    if not np.isfinite(states).all():
        raise RuvmlxError(
            "the model computes NaN or Inf on plain text: its weights are damaged. Fetch it again."
        )
    states = states.astype(np.float64)
    mean = states.mean(axis=0)
    k = min(WHITENED, min(states.shape) - 1)
    sigma, basis = _largest_directions(states - mean, k + 1)
    gain = sigma[k] / np.maximum(sigma[:k], 1e-12)
    return Whitening(*(np.ascontiguousarray(a, np.float32) for a in (mean, basis[:, :k], gain)))


def _largest_directions(states: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the `count` largest singular values of states [T, D], and their directions [D, count]. If T is
    at most D, the eigenvectors of the products of the rows give both in a fifth of the time of an SVD."""
    if len(states) > states.shape[1]:
        _, sigma, rows = np.linalg.svd(states, full_matrices=False)
        return sigma[:count], rows[:count].T
    variance, axes = np.linalg.eigh(states @ states.T)
    sigma = np.sqrt(np.maximum(variance[::-1][:count], 0))
    return sigma, states.T @ axes[:, ::-1][:, :count] / np.maximum(sigma, 1e-12)


@cache
def _projection(width: int) -> np.ndarray:
    """Return a random projection matrix [width, DIMENSIONS], which is the same on every machine. The
    projection changes the cosine between two vectors with a standard deviation of about 0.042."""
    signs = np.random.Generator(np.random.PCG64(0)).integers(0, 2, (width, DIMENSIONS), dtype=np.int8)
    return (2 * signs.astype(np.float32) - 1) / np.float32(np.sqrt(DIMENSIONS))

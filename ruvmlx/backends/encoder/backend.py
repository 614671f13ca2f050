"""This module makes an encoder (forward.py) a backend, so that a runtime, a host and a server can hold it. It
has no KV cache and no output head: the methods that write text raise UsageError."""

from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, cast

import numpy as np

from ...errors import AdapterMismatch, UsageError
from ...lora.base_lora import BaseLoRA
from ...models.config.encoder import WORDS, EncoderConfig
from ...models.config.model import Model, writes_nothing
from ...models.weights.encoder_files import EncoderWeights
from ...platform.numpy_blas import NumpyThreads
from ..base import KVCache, check_tokens
from .forward import Encoder

BATCH_TOKENS = 2048  # the number of tokens of the texts that are computed together; one text can have more


class EncoderBackend:
    """This class implements base.Backend and base.Embedding for an encoder."""

    name = "encoder"
    kernels = "numpy"
    caveat = ""
    pool = None
    lora: BaseLoRA | None = None
    chunk = BATCH_TOKENS

    def __init__(self, model: Model, threads: int | None = None):
        """threads: as in `open_backend`"""
        config, weights = model.shape, model.load_weights()
        assert isinstance(config, EncoderConfig) and isinstance(weights, EncoderWeights)
        self._name, self._config = model.name, config
        self._encoder, self._threads = Encoder(config, weights), NumpyThreads(threads)
        self.nbytes = 4 * (model.parameters - config.vocab_size * config.hidden_size)
        self.nbytes += weights.stored_bytes(WORDS)

    def text_vectors(self, texts: Sequence[Sequence[int]]) -> Generator[None, None, list[np.ndarray]]:
        """Return one vector [D] of length 1 for each text, in the order of `texts`. The encoder computes the
        texts in batches of about BATCH_TOKENS tokens. The generator yields every few milliseconds."""
        found: list[np.ndarray] = []
        for batch in _batches(texts):
            self._threads.adapt()
            found += list((yield from self._encoder.vectors(batch)))
        return found

    def hidden_states(
        self,
        tokens: Sequence[int],
        pause: Callable[[], None] | None = None,
        cache: KVCache | None = None,
    ) -> np.ndarray:
        """Return the final state of each token of one text: [T, D] float32. cache: must be None."""
        self._check(tokens)
        return finish(self._encoder.states([tokens]), pause)

    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the vector of one text, of length 1 [D]."""
        self._check(tokens)
        return finish(self._encoder.vectors([tokens]))[0]

    def _check(self, tokens: Sequence[int]) -> None:
        check_tokens(tokens, self._config.vocab_size)
        if len(tokens) > self._config.max_context:
            raise UsageError(f"{len(tokens)} tokens; {self._name} reads at most {self._config.max_context}.")

    def set_lora(self, base: BaseLoRA | None) -> None:
        if base is not None:
            raise AdapterMismatch(f"{writes_nothing(self._name)} It has no adapters: --adapter none.")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(writes_nothing(self._name))

    new_cache = prefill = decode = decode_batch = verify = head = _refuse


def _batches(texts: Sequence[Sequence[int]]) -> list[list[Sequence[int]]]:
    """Return the texts in batches of at most BATCH_TOKENS tokens. A longer text is a batch of its own."""
    batches: list[list[Sequence[int]]] = []
    room = 0
    for text in texts:
        if len(text) > room:
            batches.append([])
            room = BATCH_TOKENS
        batches[-1].append(text)
        room -= len(text)
    return batches


def finish(steps: Generator[None, None, np.ndarray], pause: Callable[[], None] | None = None) -> np.ndarray:
    """Run a generator to its end and return its result. pause: called at each yield."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return cast(np.ndarray, end.value)
        if pause is not None:
            pause()

"""The runtimes that are measured: ours and llama.cpp, behind three calls.

Each runs in a process of its own (worker.py), so that no one's idle threads slow another down; the parent
lets them take turns.
"""

import time
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np


class Decoding(Protocol):
    """Times in seconds, measured around the compute calls alone."""

    def fill(self, tokens: list[int]) -> float:
        """Set the context for `decode`."""

    def decode(self, tokens: list[int]) -> list[float]:
        """Feed tokens one by one after the context, then cut back to it; a time for each."""

    def go_on(self, tokens: list[int]) -> list[float]:
        """The same without cutting back."""


class Player(Decoding, Protocol):
    """What reads prompts, too."""

    def prefill(self, tokens: list[int]) -> float:
        """Read a prompt into an empty cache."""


class Ruvmlx:
    """One of our backends. settings: model, backend, threads, kv ("tiered", "f16")."""

    def __init__(self, model: str | None, backend: str, threads: int, kv: str | None = None):
        from ruvmlx.backends.select import cache_policy, open_backend
        from ruvmlx.models.load import load_model

        started = time.perf_counter()
        self._model = load_model(model)
        self._backend = open_backend(backend, self._model, threads)
        self._policy = cache_policy(kv, self._backend)
        self.facts = {
            "name": f"ruvmlx {self._backend.name}",
            "kernels": self._backend.kernels,
            "load_s": time.perf_counter() - started,
            "weights_bytes": self._model.bytes,
        }

    def prefill(self, tokens: list[int]) -> float:
        cache = self._backend.new_cache(self._policy)
        started = time.perf_counter()
        self._backend.prefill(tokens, cache)
        return time.perf_counter() - started

    def fill(self, tokens: list[int]) -> float:
        self._cache = self._backend.new_cache(self._policy)
        started = time.perf_counter()
        self._backend.prefill(tokens, self._cache)
        return time.perf_counter() - started

    def decode(self, tokens: list[int]) -> list[float]:
        times = self.go_on(tokens)
        self._cache.trim(len(tokens))
        return times

    def go_on(self, tokens: list[int]) -> list[float]:
        times = []
        for token in tokens:
            started = time.perf_counter()
            self._backend.decode(token, self._cache)
            times.append(time.perf_counter() - started)
        return times

    def kv(self) -> dict[str, Any]:
        return asdict(self._cache.stats())


class LlamaCpp:
    """llama.cpp through its C API: llama_decode alone, no sampling, no Python loop over the vocabulary."""

    def __init__(self, model: str, threads: int, context: int, flash: bool | None = None, kv: str = "f16"):
        import llama_cpp as lib

        self._lib = lib
        self._log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._log, None)
        started = time.perf_counter()
        self._model = lib.llama_model_load_from_file(model.encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.n_threads = params.n_threads_batch = threads
        if flash is not None:
            params.flash_attn_type = (
                lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
        if kv == "q8_0":
            params.type_k = params.type_v = lib.GGML_TYPE_Q8_0
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp refused this combination of cache and attention")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(512, 0, 1)
        self._length = 0
        self.facts = {
            "name": "llama.cpp",
            "kernels": lib.llama_print_system_info().decode(),
            "load_s": time.perf_counter() - started,
        }

    def prefill(self, tokens: list[int]) -> float:
        self._lib.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        for at in range(0, len(tokens), 512):
            self._run(tokens[at : at + 512], at)
        return time.perf_counter() - started

    def fill(self, tokens: list[int]) -> float:
        seconds = self.prefill(tokens)
        self._length = len(tokens)
        return seconds

    def decode(self, tokens: list[int]) -> list[float]:
        start = self._length
        times = self.go_on(tokens)
        self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)
        self._length = start
        return times

    def go_on(self, tokens: list[int]) -> list[float]:
        times = []
        for token in tokens:
            started = time.perf_counter()
            self._run([token], self._length)
            times.append(time.perf_counter() - started)
            self._length += 1
        return times

    def _run(self, tokens: list[int], position: int) -> None:
        """Decode one batch; logits of its last token only, as ours."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i == len(tokens) - 1
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._lib.llama_synchronize(self._context)


class MemoryReader:
    """The machine's limit: `threads` threads read a buffer as large as the weights, once per "token"."""

    def __init__(self, nbytes: int, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        self._parts = [np.ones(nbytes // threads // 4, np.float32) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self.facts = {"name": "memory", "bytes": sum(p.nbytes for p in self._parts)}
        self._read()

    def _read(self) -> None:
        from ruvmlx.kernels.micro import all_finite  # releases the GIL; bound by memory, not arithmetic

        if not all(self._pool.map(all_finite, self._parts)):
            raise RuntimeError("the buffer was changed")

    def fill(self, tokens: list[int]) -> float:
        return 0.0

    def decode(self, tokens: list[int]) -> list[float]:
        return self.go_on(tokens)

    def go_on(self, tokens: list[int]) -> list[float]:
        times = []
        for _ in tokens:
            started = time.perf_counter()
            self._read()
            times.append(time.perf_counter() - started)
        return times


KINDS: dict[str, Any] = {"ruvmlx": Ruvmlx, "llama.cpp": LlamaCpp, "memory": MemoryReader}

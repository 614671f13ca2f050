"""This module runs other runtimes, llama.cpp and mlx-lm, as players. A player is a runtime that a benchmark
measures (players.py)."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .clocked import steps


@cache
def _silence() -> Any:
    """Return a log function that prints nothing. Python never frees the function, because llama.cpp continues
    to call it."""
    import llama_cpp as lib

    return lib.llama_log_callback(lambda *_: None)


class LlamaCpp:
    """A player that runs llama.cpp through its C API. The player calls llama_decode without sampling and
    without a Python loop over the vocabulary, so Python hardly slows llama.cpp."""

    def __init__(
        self,
        model: str,
        threads: int,
        context: int,
        flash: bool | None = None,
        kv: str = "f16",
        repack: bool = True,
        sequences: int = 1,
        unified: bool = False,
    ):
        """Load the model.

        context: the maximum number of tokens of all sequences together
        flash: True or False to use flash attention or not; None for llama.cpp's default
        kv: the type of the KV cache, "f16" or "q8_0"
        repack: True to let llama.cpp arrange the weights for its fastest instructions, which is its default
        sequences: the number of sequences (replies in parallel)
        unified: True for one buffer with the KV caches of all sequences
        """
        import llama_cpp as lib

        self._lib = lib
        lib.llama_log_set(_silence(), None)
        started = time.perf_counter()
        loading = lib.llama_model_default_params()
        loading.use_extra_bufts = repack
        self._model = lib.llama_model_load_from_file(model.encode(), loading)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = sequences, unified
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
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
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

    def first(self, tokens: list[int], known: int) -> float:
        self._lib.llama_memory_clear(self._memory, True)
        seconds = 0.0
        for at in [*range(0, known, 512), *range(known, len(tokens), 512)]:
            started = time.perf_counter()
            self._run(tokens[at : min(at + 512, known if at < known else len(tokens))], at)
            seconds += (time.perf_counter() - started) * (at >= known)
        started = time.perf_counter()
        int(np.argmax(self.logits(-1)))
        return seconds + time.perf_counter() - started

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

    def logits(self, i: int) -> np.ndarray:
        """Return the logits [V] of token i of the last batch (V: vocabulary size). A negative i is an index
        from the end of the batch. The array is valid until the next batch."""
        logits = self._lib.llama_get_logits_ith(self._context, i)
        return np.ctypeslib.as_array(logits, (self._vocab_size,))

    def in_parallel(self, prompts: list[list[int]], n: int) -> dict[str, float]:
        """Read a prompt for each sequence. Then decode n tokens of each sequence in batches of one token of
        each sequence.

        Return {"rate": tokens per second of all sequences after the prompts, from the median time of a
        batch}.
        """
        self._lib.llama_memory_clear(self._memory, True)
        for sequence, tokens in enumerate(prompts):
            self._run(tokens, 0, sequence)
        times = []
        for i in range(n):
            entries = [
                (tokens[i % len(tokens)], len(tokens) + i, k, True) for k, tokens in enumerate(prompts)
            ]
            started = time.perf_counter()
            self._decode(entries)
            times.append(time.perf_counter() - started)
        return {"rate": len(prompts) / float(np.median(times))}

    def _run(self, tokens: list[int], position: int, sequence: int = 0) -> None:
        """Decode the next tokens of a sequence. Compute logits only for the last token, as ruvmlx does."""
        last = len(tokens) - 1
        self._decode([(token, position + i, sequence, i == last) for i, token in enumerate(tokens)])

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Decode one batch. entries: (token, position, sequence, True if the token's logits are needed)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._lib.llama_synchronize(self._context)


class MlxLm:
    """A player that runs mlx-lm's own model and KV cache. The player calls the model and the cache as
    mlx-lm's generator does. MLX chooses the number of threads."""

    PATIENCE = 20.0  # the maximum number of seconds for 256 prompt tokens; a slower mlx-lm is left out

    def __init__(self, model: str, patience: float | None = PATIENCE):
        import mlx.core as mx
        from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
        from mlx_lm.utils import load_model

        self._mx, self._new, self._trim = mx, make_prompt_cache, trim_prompt_cache
        started = time.perf_counter()
        self._model = load_model(Path(model))[0]
        self.facts = {"name": "mlx-lm", "kernels": str(mx.default_device()), "load_s": 0.0}
        self.prefill([1, 2])
        self.facts["load_s"] = time.perf_counter() - started
        each = self.prefill(list(range(8))) / 8
        if patience is not None and 256 * each > patience:
            raise RuntimeError(f"it reads {1 / each:.0f} tokens a second here")

    def prefill(self, tokens: list[int]) -> float:
        self._cache = self._new(self._model)
        return self._run(tokens)

    def first(self, tokens: list[int], known: int) -> float:
        self._cache = self._new(self._model)
        if known:
            self._run(tokens[:known])
        return self._run(tokens[known:])

    def fill(self, tokens: list[int]) -> float:
        return self.prefill(tokens)

    def decode(self, tokens: list[int]) -> list[float]:
        times = self.go_on(tokens)
        self._trim(self._cache, len(tokens))
        return times

    def go_on(self, tokens: list[int]) -> list[float]:
        return [self._run([token]) for token in tokens]

    def generate(self, tokens: list[int], n: int, kv: str = "") -> tuple[float, list[float]]:
        """Write n tokens greedily with mlx-lm's own loop, which submits a step before it reads the result of
        the last step. Return, as `Ruvmlx.generate` does, the seconds to the first token and the seconds of
        each later token."""
        from mlx_lm.generate import generate_step, wired_limit

        with wired_limit(self._model):
            times = [time.perf_counter()]
            for _ in generate_step(self._mx.array(tokens), self._model, max_tokens=n):
                times.append(time.perf_counter())
        return steps(times)

    def _run(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        logits = self._model(self._mx.array([tokens]), cache=self._cache)[:, -1]
        self._mx.eval(self._mx.argmax(logits))
        return time.perf_counter() - started

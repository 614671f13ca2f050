"""The runtimes that are measured, behind one interface: ours, llama.cpp and mlx-lm.

Each runs in its own process (worker.py), so that idle threads of one do not slow another. The parent lets
them take turns.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.perplexity import perplexity
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona.trace import Trace

from .clocked import Clocked


class Decoding(Protocol):
    """Times in seconds, measured around the compute calls alone."""

    def fill(self, tokens: list[int]) -> float:
        """Set the context for `decode`."""

    def decode(self, tokens: list[int]) -> list[float]:
        """Feed tokens one by one after the context, then trim the cache to it. One time for each token."""

    def go_on(self, tokens: list[int]) -> list[float]:
        """The same without the trim."""


class Player(Decoding, Protocol):
    """A player that also reads prompts."""

    def prefill(self, tokens: list[int]) -> float:
        """Read a prompt into an empty cache."""

    def first(self, tokens: list[int], known: int) -> float:
        """Time to the first token of a reply, with the prompt's first `known` tokens already in the cache."""


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
            "parameters": self._model.parameters,
            "max_context": self._model.shape.max_context,
        }

    def prefill(self, tokens: list[int]) -> float:
        cache = self._backend.new_cache(self._policy)
        started = time.perf_counter()
        self._backend.prefill(tokens, cache)
        return time.perf_counter() - started

    def first(self, tokens: list[int], known: int) -> float:
        cache = self._backend.new_cache(self._policy)
        if known:
            self._backend.prefill(tokens[:known], cache)
        started = time.perf_counter()
        step = self._backend.prefill(tokens[known:], cache)
        int(np.argmax(step.logits))
        return time.perf_counter() - started

    def fill(self, tokens: list[int]) -> float:
        self._cache = self._backend.new_cache(self._policy)
        started = time.perf_counter()
        self._backend.prefill(tokens, self._cache)
        return time.perf_counter() - started

    def keep(self, folder: str, tokens: list[int]) -> float:
        """Write the cache that `fill` made of these tokens to disk, as the end of a chat does."""
        started = time.perf_counter()
        CacheFolder(Path(folder), 1 << 40).save("chat", {}, tokens, self._cache.dump(), math.inf)
        return time.perf_counter() - started

    def resume(self, folder: str, tokens: list[int], known: int) -> float:
        """`first`, with the known tokens' cache loaded from disk."""
        started, cache = time.perf_counter(), self._backend.new_cache(self._policy)
        CacheFolder(Path(folder), 1 << 40).load("chat", {}, tokens, cache)
        assert cache.offset == known
        step = self._backend.prefill(tokens[known:], cache)
        int(np.argmax(step.logits))
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
        return self._cache.stats().facts()

    def generate(self, tokens: list[int], n: int, kv: str) -> tuple[float, list[float]]:
        """Write n tokens greedily: seconds to the first one, then the seconds of each further one."""
        cache = self._backend.new_cache(self._policy_of(kv))
        times, step, token = [time.perf_counter()], self._backend.prefill(tokens, cache), 0
        for _ in range(n - 1):
            token = int(np.argmax(step.logits))
            times.append(time.perf_counter())
            step = self._backend.decode(token, cache)
        np.argmax(step.logits)
        return _steps([*times, time.perf_counter()])

    def best_of(self, tokens: list[int], count: int, n: int) -> dict[str, float]:
        """Read a prompt and write `count` replies of n tokens each, as one batch: sampled, under an adapter,
        with their traces, as in a chat. Seconds of all, and of it of the prompt and of the decode steps."""
        from ruvmlx.engine.best_of import BestOf, requests_for

        clocked = Clocked(self._backend)
        engine, shape = LLMInferenceEngine(self._model, cast(Any, clocked), self._policy), self._model.shape
        noise = np.random.default_rng(0).standard_normal
        a, b = noise((shape.hidden_size, 2), np.float32), 1e-4 * noise((2, shape.vocab_size), np.float32)
        adapter, sampling = MicroLoRA(a, b), Sampling(0.2, top_p=0.9, seed=1)
        request = GenerationRequest(input_ids=tokens, max_new_tokens=n, sampling=sampling, ignore_eos=True)
        traces = [Trace(adapter, 0) for _ in range(count)]
        replies = BestOf(engine, requests_for(request, count), adapter, traces)
        started = read = time.perf_counter()
        for chunk in replies.chunks():
            read = read if chunk.generated else time.perf_counter()
        return {
            "seconds": time.perf_counter() - started,
            "prompt": read - started,
            "decode": clocked.seconds,
        }

    def _policy_of(self, kv: str) -> TierPolicy | None:
        from ruvmlx.backends.select import cache_policy

        return cache_policy(kv, self._backend)

    def quality(self, text: str, tokens: int, *lengths: int) -> dict[str, float]:
        """Cost of a policy on a text's first tokens, against an f16 cache: perplexity change, KL, share of
        bytes."""
        ids = self._model.tokenizer.encode(text[: 8 * tokens])[:tokens]
        found = perplexity(self._backend, ids, tokens, TierPolicy("tiered", tuple(lengths)))
        assert found.ppl_f16 is not None and found.kl_vs_f16 is not None
        share = found.kv.bytes / found.kv.f16_bytes
        return {"change": found.ppl / found.ppl_f16 - 1, "kl": found.kl_vs_f16, "share": share}


def _steps(times: Sequence[float]) -> tuple[float, list[float]]:
    """Points in time -> the first step, and the others."""
    first, *others = (after - before for before, after in itertools.pairwise(times))
    return first, others


class LlamaCpp:
    """llama.cpp through its C API: llama_decode alone, no sampling, no Python loop over the vocabulary."""

    def __init__(
        self,
        model: str,
        threads: int,
        context: int,
        flash: bool | None = None,
        kv: str = "f16",
        repack: bool = True,
    ):
        """repack: it may arrange the weights for its fastest instructions, as it does by default."""
        import llama_cpp as lib

        self._lib = lib
        self._log = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._log, None)
        started = time.perf_counter()
        loading = lib.llama_model_default_params()
        loading.use_extra_bufts = repack
        self._model = lib.llama_model_load_from_file(model.encode(), loading)
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
        logits = self._lib.llama_get_logits_ith(self._context, -1)
        int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab_size,))))
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


class MlxLm:
    """mlx-lm's own model and cache, called as its generator calls them, on as many threads as MLX uses."""

    PATIENCE = 20.0  # seconds for 256 tokens of prompt; a slower runtime is left out

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
        """As `Ruvmlx.generate`, by mlx-lm's own loop, which submits a step before it reads the last one."""
        from mlx_lm.generate import generate_step, wired_limit

        with wired_limit(self._model):
            times = [time.perf_counter()]
            for _ in generate_step(self._mx.array(tokens), self._model, max_tokens=n):
                times.append(time.perf_counter())
        return _steps(times)

    def _run(self, tokens: list[int]) -> float:
        started = time.perf_counter()
        logits = self._model(self._mx.array([tokens]), cache=self._cache)[:, -1]
        self._mx.eval(self._mx.argmax(logits))
        return time.perf_counter() - started


class MemoryReader:
    """The machine's limit: `threads` threads read a buffer as large as the weights, once per "token"."""

    def __init__(self, nbytes: int, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        from .machine import fastest, filled

        self._parts = [filled(nbytes // threads) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self._fastest = fastest(self._parts, self._pool)
        self.facts = {"name": "memory", "bytes": sum(p.nbytes for p in self._parts)}
        self._read()

    def _read(self) -> None:
        list(self._pool.map(self._fastest, self._parts))

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


class Products:
    """The machine's arithmetic: each call forms the same number of products, on all threads."""

    ROUNDS = 50_000

    def __init__(self, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        self._pool, self._threads = ThreadPoolExecutor(threads), threads
        self.facts = {"name": "products"}
        self.prefill([])

    def prefill(self, tokens: list[int]) -> float:
        from ruvmlx.kernels.matmul import peak

        started = time.perf_counter()
        list(self._pool.map(peak, [self.ROUNDS] * self._threads))
        return time.perf_counter() - started

    def first(self, tokens: list[int], known: int) -> float:
        return self.prefill(tokens)


class Verdicts:
    """Checks each GPU kernel against its twin, in its own process, which a bad kernel may crash."""

    def __init__(self) -> None:
        self.facts = {"name": "kernels", "verdicts": kernel_verdicts()}


def kernel_verdicts() -> list[dict[str, Any]]:
    """[{"name", "ok", "why", "ratio"}] of the kernels' self-check, made afresh; none without a GPU."""
    from ruvmlx.backends.mlx.check_results import STARTER
    from ruvmlx.backends.mlx.gpu_check import check
    from ruvmlx.platform.gpu import gpu

    return [asdict(result) for result in check(STARTER, fresh=True).results] if gpu.kind else []


KINDS: dict[str, Any] = {
    "kernels": Verdicts,
    "ruvmlx": Ruvmlx,
    "llama.cpp": LlamaCpp,
    "mlx-lm": MlxLm,
    "memory": MemoryReader,
    "products": Products,
}

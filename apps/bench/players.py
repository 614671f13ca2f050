"""This module defines the players of a benchmark. A player is something that is measured: ruvmlx, another
runtime (other_runtimes.py), or the machine's limits. All players have the same methods.

Each player runs in its own process (worker.py), so that idle threads of one player do not slow another. The
parent process lets the players take turns.
"""

import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.engine.perplexity import perplexity
from ruvmlx.kv.chain import Chain, extend, root
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora import MicroLoRA
from ruvmlx.sona.trace import Trace

from .clocked import Clocked, steps
from .other_runtimes import LlamaCpp, MlxLm
from .serving_player import ServingPlayer


class Decoding(Protocol):
    """A player that decodes. The times are in seconds and include only the calls that compute."""

    def fill(self, tokens: list[int]) -> float:
        """Prefill the context for `decode`."""

    def decode(self, tokens: list[int]) -> list[float]:
        """Feed tokens one by one after the context, then trim the cache to the context. Return one time for
        each token."""

    def go_on(self, tokens: list[int]) -> list[float]:
        """Like `decode`, but without the trim."""


class Player(Decoding, Protocol):
    """A player that also reads prompts."""

    def prefill(self, tokens: list[int]) -> float:
        """Prefill a prompt into an empty cache."""

    def first(self, tokens: list[int], known: int) -> float:
        """Return the time to the first token of a reply. The prompt's first `known` tokens are already in the
        cache."""


class Ruvmlx:
    """One of ruvmlx's backends. settings: model, backend, threads, kv ("tiered", "f16")."""

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
        disk = CacheFolder(Path(folder), 1 << 40)
        disk.remove("chat")
        started = time.perf_counter()
        disk.save("chat", _names(tokens), tokens, self._cache, math.inf)
        return time.perf_counter() - started

    def resume(self, folder: str, tokens: list[int], known: int) -> float:
        """Like `first`, but load the cache of the known tokens from disk."""
        started, make = time.perf_counter(), partial(self._backend.new_cache, self._policy)
        found = CacheFolder(Path(folder), 1 << 40).load(_names(tokens), tokens, make)
        assert found is not None and found[0].offset == known
        cache = found[0]
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
        """Write n tokens greedily. Return the seconds to the first token, then the seconds of each further
        token."""
        cache = self._backend.new_cache(self._policy_of(kv))
        times, step, token = [time.perf_counter()], self._backend.prefill(tokens, cache), 0
        for _ in range(n - 1):
            token = int(np.argmax(step.logits))
            times.append(time.perf_counter())
            step = self._backend.decode(token, cache)
        np.argmax(step.logits)
        return steps([*times, time.perf_counter()])

    def best_of(self, tokens: list[int], count: int, n: int) -> dict[str, float]:
        """Read a prompt and write `count` replies of n tokens each, as one batch: with sampling, an adapter
        and traces, as in a chat. Return the seconds of the whole, of the prompt, and of the decode steps."""
        from ruvmlx.engine.best_of import BestOf, requests_for
        from ruvmlx.engine.scheduler import Scheduler

        clocked = Clocked(self._backend)
        engine, shape = LLMInferenceEngine(self._model, cast(Any, clocked), self._policy), self._model.shape
        noise = np.random.default_rng(0).standard_normal
        a, b = noise((shape.hidden_size, 2), np.float32), 1e-4 * noise((2, shape.vocab_size), np.float32)
        adapter, sampling = MicroLoRA(a, b), Sampling(0.2, top_p=0.9, seed=1)
        request = GenerationRequest(input_ids=tokens, max_new_tokens=n, sampling=sampling, ignore_eos=True)
        traces = [Trace(adapter, 0) for _ in range(count)]
        replies = BestOf(engine, requests_for(request, count), adapter, traces)
        started = read = time.perf_counter()
        for chunk in Scheduler(engine).stream(request, lambda: replies):
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
        """Return the cost of a cache policy on the first tokens of a text, compared with an f16 cache: the
        change of perplexity, the KL, and the share of bytes."""
        ids = self._model.tokenizer.encode(text[: 8 * tokens])[:tokens]
        found = perplexity(self._backend, ids, tokens, TierPolicy("tiered", tuple(lengths)))
        assert found.ppl_f16 is not None and found.kl_vs_f16 is not None
        share = found.kv.bytes / found.kv.f16_bytes
        return {"change": found.ppl / found.ppl_f16 - 1, "kl": found.kl_vs_f16, "share": share}


def _names(tokens: list[int]) -> Chain:
    """Return the names of the KV pages. The names need no key, because the cache folder is for one model."""
    return extend([root({})], tokens)


class MemoryReader:
    """The machine's memory limit: `threads` threads read a buffer as large as the weights, once for each
    "token"."""

    def __init__(self, nbytes: int, threads: int):
        from concurrent.futures import ThreadPoolExecutor

        from .machine import fastest, filled_block

        self._parts = [filled_block(nbytes // threads) for _ in range(threads)]
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
    """The machine's limit of arithmetic: each call computes the same number of products, on all threads."""

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
    """This player checks each GPU kernel against its twin. The player has a process of its own, because a bad
    kernel may crash the process."""

    def __init__(self) -> None:
        self.facts = {"name": "kernels"}

    def verdicts(self, head_dim: int, n_heads: int, n_kv_heads: int, dtype: str) -> list[dict[str, Any]]:
        """Run the kernels' self-check for such heads, and return its results. Without a GPU there are no
        results.

        Each result has the fields of `CheckResult`; "message" is a list of lines, so that each line is
        cleaned alone.
        """
        from ruvmlx.backends.mlx.check_results import Shapes
        from ruvmlx.backends.mlx.gpu_check import ask
        from ruvmlx.platform.gpu import gpu

        results = ask(Shapes(head_dim, n_heads, n_kv_heads, dtype)).results if gpu.kind else ()
        return [asdict(result) | {"message": result.message.splitlines()} for result in results]


KINDS: dict[str, Any] = {
    "kernels": Verdicts,
    "ruvmlx": Ruvmlx,
    "serving": ServingPlayer,
    "llama.cpp": LlamaCpp,
    "mlx-lm": MlxLm,
    "memory": MemoryReader,
    "products": Products,
}

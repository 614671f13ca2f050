"""This module defines the players of a benchmark. A player is an object that a benchmark measures: ruvmlx,
another runtime (other_runtimes.py), or a limit of the machine. Players that are compared have the same
methods.

Each player runs in a separate process (worker.py), so that the waiting threads of one player do not slow
another player. The parent process lets the players take turns (stage.py).
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
from ruvmlx.kernels.decoder import MODULES
from ruvmlx.kv.chain import Chain, extend, root
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import TierPolicy, limit_to
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import place_shape
from ruvmlx.models.config.model import Model, ModelConfig
from ruvmlx.sona.trace import Trace
from ruvmlx.tiers import TIERS

from .clocked import Clocked, steps
from .other_runtimes import LlamaCpp, MlxLm
from .serving_player import ServingPlayer


def _prompt_weights(model: Model) -> int:
    """Return the number of weights by which the model multiplies a token of a prompt. The last token alone
    goes through the output head, and through the last layer beyond its queries, keys and values."""
    config, last = model.shape, model.shape.n_layers - 1
    if not isinstance(config, ModelConfig):
        return model.parameters
    keys = {"q_proj", "k_proj", "v_proj"}
    places = [(module, i) for i in range(last + 1) for module in MODULES if i < last or module in keys]
    return sum(math.prod(place_shape(config, *place) or (0,)) for place in places)


class Decoding(Protocol):
    """A player that decodes tokens. Its methods return times in seconds; a time includes only the calls that
    compute."""

    def fill(self, tokens: list[int]) -> float:
        """Make a new KV cache, and prefill it with the context for `decode`. Return the time."""

    def decode(self, tokens: list[int]) -> list[float]:
        """Decode the given tokens one by one after the context. Then trim the KV cache to the context. Return
        one time for each token."""

    def go_on(self, tokens: list[int]) -> list[float]:
        """Decode the given tokens one by one after the context, and keep them in the KV cache. Return one
        time for each token."""


class Ruvmlx:
    """A player that runs ruvmlx with one of its backends. kv: the kind of the KV cache, "tiered" or "f16";
    None for the default."""

    def __init__(self, model: str | None, backend: str, threads: int, kv: str | None = None):
        from ruvmlx.backends.select import cache_policy, open_backend
        from ruvmlx.models.load import load_model

        started = time.perf_counter()
        self._model = load_model(model)
        self._backend = open_backend(backend, self._model, threads)
        self._policy = cache_policy(kv, self._backend, self._model.shape)
        self.facts = {
            "name": f"ruvmlx {self._backend.name}",
            "kernels": self._backend.kernels,
            "load_s": time.perf_counter() - started,
            "weights_bytes": self._model.bytes,
            "prompt_weights": _prompt_weights(self._model),
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
        """Write the KV cache that `fill` made of these tokens to disk, as at the end of a chat. Return the
        time."""
        disk = CacheFolder(Path(folder), 1 << 40)
        disk.remove("chat")
        started = time.perf_counter()
        disk.save("chat", _names(tokens), tokens, self._cache, math.inf)
        return time.perf_counter() - started

    def resume(self, folder: str, tokens: list[int], known: int) -> float:
        """Return the time to the first token of a reply, as `first` does. Here, the KV cache of the first
        `known` tokens is loaded from disk, and the time includes this load."""
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
        """Write n tokens greedily. Return the seconds to the first token, and the seconds of each later
        token. kv: the kind of the KV cache."""
        cache = self._backend.new_cache(self._policy_of(kv))
        times, step, token = [time.perf_counter()], self._backend.prefill(tokens, cache), 0
        for _ in range(n - 1):
            token = int(np.argmax(step.logits))
            times.append(time.perf_counter())
            step = self._backend.decode(token, cache)
        np.argmax(step.logits)
        return steps([*times, time.perf_counter()])

    def best_of(self, tokens: list[int], count: int, n: int) -> dict[str, float]:
        """Read a prompt, and write `count` replies of n tokens each as one batch. The replies are sampled
        with an adapter, and their traces are recorded, as in a chat. The engine guesses no tokens,
        because the replies to this prompt repeat themselves more than the replies of a chat. Return the
        seconds of all work ("seconds"), of the prompt ("prompt"), and of the decode steps ("decode")."""
        from ruvmlx.engine.best_of import BestOf, requests_for
        from ruvmlx.engine.scheduler import Scheduler

        clocked, shape = Clocked(self._backend), self._model.shape
        engine = LLMInferenceEngine(self._model, cast(Any, clocked), self._policy, speculate="off")
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

        return cache_policy(kv, self._backend, self._model.shape)

    def quality(self, text: str, tokens: int, *lengths: int) -> dict[str, float]:
        """Compare a policy of the KV cache with an f16 cache on the first `tokens` tokens of a text. Return
        the relative change of perplexity, the KL, the policy's share of f16's bytes, and the fewest bits.

        lengths: the ages in tokens at which KV pages leave each tier for the next lower tier. The policy does
            not use a tier below the lowest tier of the model's default policy.
        """
        from ruvmlx.backends.select import default_policy

        lowest = default_policy(self._model.shape).lowest
        policy = limit_to(TierPolicy("tiered", tuple(lengths)), lowest)
        ids = self._model.tokenizer.encode(text[: 8 * tokens])[:tokens]
        found = perplexity(self._backend, ids, tokens, policy)
        assert found.ppl_f16 is not None and found.kl_vs_f16 is not None
        share = found.kv.bytes / found.kv.f16_bytes
        change = found.ppl / found.ppl_f16 - 1
        return {"change": change, "kl": found.kl_vs_f16, "share": share, "bits": TIERS[lowest].bits}


def _names(tokens: list[int]) -> Chain:
    """Return the chain of names under which the cache folder stores the KV pages of these tokens. The names
    need no key of the model, because the cache folder is for one model only."""
    return extend([root({})], tokens)


class MemoryReader:
    """A player that shows the limit of the machine's memory. In place of each token, `threads` threads read a
    buffer as large as the weights once."""

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
    """A player that shows the limit of the machine's arithmetic. Each call of a method computes the same
    number of products of small integers, on all threads."""

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
    """A player that checks GPU kernels against their twins (slow implementations of the same functions). The
    player runs in a separate process, because a bad kernel can crash the process."""

    def __init__(self) -> None:
        self.facts = {"name": "kernels"}

    def verdicts(self, head_dim: int, n_heads: int, n_kv_heads: int, dtype: str) -> list[dict[str, Any]]:
        """Check the GPU kernels for attention heads of this shape, and return the results. Without a GPU, the
        list is empty.

        Each result has the fields of `CheckResult`. "message" is a list of lines, so that private data can be
        removed from each line separately.
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

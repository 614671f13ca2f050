"""The learning suite: what a rating costs, from the key to the disk, on real replies of the real model."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.kernels import micro
from ruvmlx.models.base import Message

from .rows import Row, at_most

REPLY_TOKENS = 8
QUESTIONS = ["Name a river.", "What is a fjord?", "Say hello.", "Why does ice float?", "Name three birds."]


def run(model: str | None, backend: str, threads: int, ratings: int, log: Callable[[str], None]) -> list[Row]:
    """Rates `ratings` fresh replies in a scratch store; the user's adapter is never touched."""
    from ruvmlx.runtime import Runtime

    before = os.environ.get("RUVMLX_HOME")
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as scratch:
        os.environ["RUVMLX_HOME"] = scratch
        try:
            with Runtime.open(model, backend, threads=threads) as runtime:
                log(f"{runtime.backend.name}: {runtime.backend.kernels}")
                return [*_ratings(runtime, ratings), _trace(runtime), _square_update()]
        finally:
            _restore_home(before)


def _restore_home(before: str | None) -> None:
    if before is None:
        del os.environ["RUVMLX_HOME"]
    else:
        os.environ["RUVMLX_HOME"] = before


def _ratings(runtime: Any, ratings: int) -> list[Row]:
    """Likes and dislikes in turn; undone every fifth time, so that the adapter does not only grow."""
    results = []
    for i in range(ratings):
        _reply(runtime, i)
        results.append(runtime.rate("last", "up" if i % 2 else "down"))
        if i % 5 == 4:
            runtime.undo()
    apply = [r.apply_us for r in results]
    total = [r.total_us / 1e3 for r in results]
    note = f"{ratings} ratings, {sum(r.applied for r in results)} changed weights"
    return [
        at_most("rating: weights updated, median", statistics.median(apply), "us", 1000, note),
        at_most("rating: weights updated, p99", float(np.percentile(apply, 99)), "us", 1000, note),
        at_most("rating: applied and on disk, median", statistics.median(total), "ms", 20, note),
        Row("rating: applied and on disk, p99", round(float(np.percentile(total, 99)), 3), "ms"),
    ]


def _reply(runtime: Any, i: int) -> None:
    request = GenerationRequest(
        messages=[Message("user", QUESTIONS[i % len(QUESTIONS)])],
        max_new_tokens=REPLY_TOKENS,
        sampling=Sampling(0.8, seed=i),
        session_id="bench",
    )
    for _ in runtime.generate(request):
        pass
    runtime.settle()


def _trace(runtime: Any) -> Row:
    """The trace's share of a decoded token: with it and without it, token by token in turn."""
    backend, learner = runtime.backend, runtime.learner
    cache, trace = backend.new_cache(), learner.trace()
    step = backend.prefill(list(range(100, 164)), cache)
    decode, add = [], []
    for i in range(64):
        started = time.perf_counter()
        step = backend.decode(100 + i, cache, learner.micro)
        between = time.perf_counter()
        trace.add(step.hidden, step.logits, 100 + i)
        decode.append(between - started)
        add.append(time.perf_counter() - between)
    share = statistics.median(a / d for a, d in zip(add, decode, strict=True))
    note = f"{1e6 * statistics.median(add):.0f} us of {1e3 * statistics.median(decode):.1f} ms a token"
    return at_most("trace: share of a decoded token", 100 * share, "%", 5, note)


def _square_update() -> Row:
    """The design's own figure: a rank-2 update of a 768 x 768 matrix, momentum and checks included."""
    rng = np.random.default_rng(0)
    pair = [
        tuple(rng.normal(size=shape).astype(np.float32) for _ in range(3)) for shape in ((768, 2), (2, 768))
    ]
    times = []
    for _ in range(2000):
        started = time.perf_counter()
        micro.micro_step(pair, 1e-6, 0.9)
        times.append(1e6 * (time.perf_counter() - started))
    return at_most("MicroLoRA update 768x768 r2", statistics.median(times), "us", 50, "called from Python")

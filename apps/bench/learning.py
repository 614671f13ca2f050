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
from ruvmlx.sona import embedding, signal
from ruvmlx.sona.bank import CAPACITY, ReasoningBank

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
                return [
                    *_ratings(runtime, ratings),
                    _trace(runtime),
                    _square_update(),
                    _extraction(),
                    *_bank(runtime.model.config.hidden_size),
                    _question(runtime),
                ]
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


def _extraction() -> Row:
    """A rating's signal: its worth in this user's history, and the reward."""
    counts = np.arange(len(signal.LABELS))
    query = np.ones(576, np.float32)
    times = _timed(
        lambda i: signal.extract("reply", signal.RATINGS[i % 7], counts, query, 1.1, 1, 200).reward
    )
    return at_most("signal extraction, median", statistics.median(times), "us", 10)


def _bank(hidden_size: int) -> list[Row]:
    """A full bank of made-up questions: 200 topics, some frequent, a few intents in each, and noise."""
    width = min(hidden_size, embedding.DIMENSIONS)
    rng = np.random.default_rng(0)
    topic, intent = (_unit(rng.normal(size=(count, width))) for count in (200, 3000))
    at = np.minimum(rng.geometric(0.02, CAPACITY + 300), 200) - 1
    noise = _unit(rng.normal(size=(len(at), width)))
    vectors = _unit(0.5 * topic[at] + 0.5 * intent[15 * at + rng.integers(0, 15, len(at))] + 0.7 * noise)
    bank, queries = ReasoningBank(width), vectors[CAPACITY:]
    for i, vector in enumerate(vectors[:CAPACITY]):
        bank.put(str(i), signal.RATINGS[i % 7], vector)
    started = time.perf_counter()
    bank.tend()
    clustered = time.perf_counter() - started
    lookup = _timed(lambda i: bank.lookup(queries[i % 300]))
    value = _timed(lambda i: bank.value(queries[i % 300]))
    note = (
        f"{CAPACITY} entries of {width}, {len(bank.patterns())} patterns; recall {_recall(bank, vectors):.0%}"
    )
    return [
        at_most("bank: lookup of the 32 nearest, median", statistics.median(lookup), "us", 100, note),
        Row("bank: lookup of the 32 nearest, p99", round(float(np.percentile(lookup, 99)), 1), "us"),
        at_most("bank: value of a question, median", statistics.median(value), "us", 100),
        Row("bank: clustering of all entries", round(1e3 * clustered, 1), "ms", note="while the user reads"),
    ]


def _recall(bank: ReasoningBank, vectors: np.ndarray) -> float:
    """Of the 8 truly nearest entries, how many a lookup finds."""
    shares = []
    for query in vectors[CAPACITY : CAPACITY + 100]:
        true = np.sort(vectors[:CAPACITY] @ query)[-8]
        shares.append(np.mean(bank.lookup(query, 8).similarity >= true - 1e-6))
    return float(np.mean(shares))


def _question(runtime: Any) -> Row:
    """Reading a question for the bank: before a reply with --examples, else while the user reads."""
    read = embedding.read_question
    times = [
        t / 1e3
        for t in _timed(lambda i: read(runtime.backend, runtime.model.tokenizer, QUESTIONS[i % 5]), 30)
    ]
    return Row("bank: reading a short question, median", round(statistics.median(times), 2), "ms")


def _timed(work: Callable[[int], Any], times: int = 2000) -> list[float]:
    """Microseconds of each call."""
    found = []
    for i in range(times):
        started = time.perf_counter()
        work(i)
        found.append(1e6 * (time.perf_counter() - started))
    return found


def _unit(x: np.ndarray) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)

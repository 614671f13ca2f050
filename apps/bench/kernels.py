"""The kernel suite: the design's own table, at the sizes of Mistral-7B, one thread, called from Python.

The limit of a row is the time that one thread needs to read the row's bytes from memory, measured in the same
run; small rows live in the caches and may be quicker than that.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np

from ruvmlx.kernels import layers, micro
from ruvmlx.lora import MicroLoRA

from .rows import Row

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 4096
CONTEXT = 256


def run(log: Callable[[str], None]) -> list[Row]:
    log("kernels, one thread")
    rng = np.random.default_rng(0)

    def make(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    per_byte = _seconds_per_byte()
    rows = [
        _row(name, call, nbytes, target, per_byte)
        for name, call, nbytes, target in (
            _attention(make),
            _rope(make),
            ("RMSNorm, 4,096", _norm(make), 3 * 4 * HIDDEN, 50),
            ("LoRA forward 768, rank 8", _lora(make), 4 * (2 * 768 * 8 + 3 * 768), 30),
            ("MicroLoRA update 768x768, rank 2", _update(make), 5 * 4 * 4 * 768, 50),
            ("signal: trace of one token, V = 49,152", _signal(make), 4 * 49152 * 7, None),
        )
    ]
    return rows


def _row(name: str, call: Callable[[], object], nbytes: int, target: float | None, per_byte: float) -> Row:
    """Median microseconds of 300 calls."""
    times = []
    for _ in range(330):
        started = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - started))
    value = statistics.median(times[30:])
    met = None if target is None else value <= target
    return Row(name, round(value, 2), "us", target, round(1e6 * nbytes * per_byte, 2), met, "limit: memory")


def _seconds_per_byte() -> float:
    """One thread reading 256 MB."""
    block = np.ones(64 << 20, np.float32)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        micro.all_finite(block)
        times.append(time.perf_counter() - started)
    return min(times) / block.nbytes


def _attention(make) -> tuple[str, Callable[[], object], int, float]:
    """One new token looks at 256: all heads of a layer."""
    turn = layers.turns(np.arange(CONTEXT + 1), 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM / 2)))
    caches = [layers.PagedKV(HEAD_DIM) for _ in range(KV_HEADS)]
    for cache in caches:
        cache.append(make(CONTEXT, HEAD_DIM), make(CONTEXT, HEAD_DIM), turn[:CONTEXT])
    q, here = make(1, HEADS // KV_HEADS, HEAD_DIM), turn[CONTEXT - 1 : CONTEXT]
    nbytes = 2 * 2 * KV_HEADS * CONTEXT * HEAD_DIM
    return "attention, 256 tokens", lambda: [c.attend(q, here, CONTEXT - 1) for c in caches], nbytes, 2000


def _rope(make) -> tuple[str, Callable[[], object], int, float]:
    turn = layers.turns(np.arange(1), 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM / 2)))
    x = make(1, HEADS + KV_HEADS, HEAD_DIM)
    return "RoPE, 40 heads x 128", lambda: layers.rope(x, turn), 2 * x.nbytes, 100


def _norm(make) -> Callable[[], object]:
    x, w = make(1, HIDDEN), make(HIDDEN)
    return lambda: layers.rms_norm(x, w, 1e-5)


def _lora(make) -> Callable[[], object]:
    y, x, a, b = make(1, 768), make(1, 768), make(768, 8), make(8, 768)
    return lambda: layers.lora_add(y, x, a, b, 1e-3)


def _update(make) -> Callable[[], object]:
    pair = [(make(*s), make(*s), make(*s)) for s in ((768, 2), (2, 768))]
    return lambda: micro.micro_step(pair, 1e-6, 0.9)


def _signal(make) -> Callable[[], object]:
    adapter = MicroLoRA.fresh(make(576, 2), 49152)
    h, z, e_a, e_b = make(576), make(49152), make(576, 2), make(2, 49152)
    a, b, s = adapter.lora_a, adapter.lora_b, adapter.scale
    return lambda: micro.trace_accumulate(h, z, 7, a, b, s, e_a, e_b)

"""`python -m ruvmlx.kernels.bench`: what each kernel costs in each implementation, on this machine.

One row: median time of a call from Python, the bytes that the call must at least read and write
once per second, and that rate as a fraction of the rate at which one thread reads memory,
measured in the same run. Over 100% means that the arrays came from cache. Rows of `matmul` cycle through
more weights than caches hold; with 256 tokens they count multiplications instead (GMAC/s). What both
threads reach, and the limits of arithmetic: neon/tools/matmul_bench.c.
"""

import argparse
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels import matmul, micro
from ruvmlx.kernels.library import available

READ_LIMIT_BYTES = 256 << 20  # larger than any last-level cache we expect


class Case(NamedTuple):
    kernel: str
    shapes: str
    nbytes: int
    call: Callable[[str], object]


def cases(dim: int, vocab: int, rank: int, tokens: int = 64, contexts: int = 32) -> list[Case]:
    """The calls of one rating and one generated token, at a model's sizes."""
    rng = np.random.default_rng(0)

    def make(*shape: int, spread: float = 1.0) -> micro.Array:
        return rng.normal(0, spread, shape).astype(np.float32)

    a, b, g_a, g_b = make(dim, rank), make(rank, vocab), make(dim, rank), make(rank, vocab)
    e_a, e_b, v_a, v_b = make(dim, rank), make(rank, vocab), make(dim, rank), make(rank, vocab)
    h, z = make(tokens, dim, spread=0.1), make(tokens, vocab, spread=3)
    p0 = np.exp(make(contexts, vocab, spread=3))
    p0 /= p0.sum(axis=1, keepdims=True)
    u, ids = make(contexts, rank), np.zeros(tokens, np.int32)
    square = [(make(*shape), make(*shape), make(*shape)) for shape in ((768, 2), (2, 768))]
    pair = [(e_a, v_a, g_a), (e_b, v_b, g_b)]
    row, lora = 4 * vocab, 4 * rank * (dim + vocab)
    one, many = f"V={vocab} r={rank}", f"T={tokens} V={vocab} r={rank}"
    return [
        Case(
            "micro_update", "768x768 r=2", 5 * 4 * 4 * 768, lambda i: micro.micro_step(square, 1e-6, 0.9, i)
        ),
        Case("micro_update", one, 5 * lora, lambda i: micro.micro_step(pair, 1e-6, 0.9, i)),
        Case("head_add", one, 2 * row + lora, lambda i: micro.head_add(z[0], h[0], a, b, 1e-6, i)),
        Case("head_add", many, 2 * tokens * row + lora, lambda i: micro.head_add(z, h, a, b, 1e-6, i)),
        Case(
            "trace_accumulate",
            one,
            row + 3 * lora,
            lambda i: micro.trace_accumulate(h[0], z[0], 7, a, b, 1e-3, e_a, e_b, i),
        ),
        Case(
            "kl_to_frozen",
            f"M={contexts} {one}",
            contexts * row + lora,
            lambda i: micro.kl_to_frozen(p0, u, b, 1e-2, impl=i),
        ),
        Case("logprobs", many, tokens * row, lambda i: micro.logprobs(z, ids, i)),
        Case("exp", f"n={vocab}", 2 * row, lambda i: micro.exp(z[0], i)),
        Case("dot", f"n={vocab}", 2 * row, lambda i: micro.dot(z[0], z[1], i)),
        Case("scale", f"n={rank * vocab}", 3 * rank * row, lambda i: micro.scale(e_b, 1.0, i)),
        Case("all_finite", f"n={rank * vocab}", rank * row, lambda i: micro.all_finite(e_b, i)),
    ]


def matrices(rows: int, cols: int, bits: int) -> list[matmul.Matrix]:
    """Random symmetric matrices in groups of 32, as many as fill READ_LIMIT_BYTES / 2."""
    rng = np.random.default_rng(0)
    weight = rng.integers(0, 2**32, (rows, cols * bits // 32), dtype=np.uint32)
    scales = rng.normal(0, 0.1, (rows, cols // 32)).astype(np.float16)
    first = matmul.Matrix(weight, scales, -scales * np.float16(2 ** (bits - 1)), cols)
    copies = [copy.copy(first) for _ in range(READ_LIMIT_BYTES // 2 // first.memory.nbytes)]
    for w in copies:
        w.memory = matmul.aligned(first.memory.nbytes)
        w.memory[:] = first.memory
    return [first, *copies]


def print_matmul(rows: int, cols: int, bits: int, limit: float, seconds: float) -> None:
    """One and 256 tokens through every implementation."""
    many = matrices(rows, cols, bits)
    for impl, tokens in itertools.product(matmul.implementations(), (1, 256)):
        if impl == "scalar" and rows * cols * tokens > 1 << 27:
            continue
        acts = matmul.activations(many[0], np.ones((tokens, cols), np.float32), impl)
        y, turn = np.empty((tokens, rows), np.float32), itertools.cycle(many)
        us = median_us(functools.partial(next_product, turn, acts, y, impl), seconds)
        rate = 1e6 * many[0].memory.nbytes / us
        what = f"{rate / 1e9:>9.1f}{rate / limit:>10.0%}"
        if tokens > 1:
            what = f"{rows * cols * tokens / us / 1e3:>9.1f}    GMAC/s"
        print(f"{'matmul':<20}{f'{rows}x{cols} {bits} bits T={tokens}':<26}{impl:<13}{us:>6.0f}{what}")


def next_product(turn: Iterator[matmul.Matrix], acts: NDArray[np.uint8], y: micro.Array, impl: str) -> None:
    matmul.product(next(turn), acts, y, impl)


def median_us(call: Callable[[], object], seconds: float) -> float:
    """Median duration of a call, over at least 5 calls and about `seconds`."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def read_limit(seconds: float) -> float:
    """Bytes a second that one thread reads from memory."""
    x = np.ones(READ_LIMIT_BYTES // 4, np.float32)
    return 1e6 * x.nbytes / median_us(lambda: micro.all_finite(x), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m ruvmlx.kernels.bench", description=__doc__)
    parser.add_argument("--dim", type=int, default=576, help="hidden size")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.2, help="per row")
    args = parser.parse_args()
    limit = read_limit(args.seconds)
    print(f"one thread reads memory at {limit / 1e9:.1f} GB/s\n")
    print(f"{'kernel':<20}{'shapes':<26}{'impl':<9}{'us':>10}{'GB/s':>9}{'of limit':>10}")
    for case in cases(args.dim, args.vocab, args.rank):
        for impl in available(case.kernel):
            us = median_us(functools.partial(case.call, impl), args.seconds)
            rate = 1e6 * case.nbytes / us
            row = f"{case.kernel:<20}{case.shapes:<26}{impl:<9}{us:>10.1f}"
            print(f"{row}{rate / 1e9:>9.1f}{rate / limit:>10.0%}")
    for bits in (4, 8):
        print_matmul(args.vocab, args.dim, bits, limit, args.seconds)


if __name__ == "__main__":
    main()

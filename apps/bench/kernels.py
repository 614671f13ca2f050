"""This module is the kernel suite of `ruvmlx bench`. The suite measures the C kernels in each implementation
that this machine can run, except the scalar one, on one thread, called from Python. A quick run measures only
the best implementation, and only kernels with a target.

Each row also has the kernel's error relative to its twin (a slow implementation, mostly in NumPy), and the
machine's limit, the longer of the times in which one thread reads a call's bytes or computes its products.
"""

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ruvmlx.kernels import layers, matmul, micro
from ruvmlx.kernels.library import available, implementations
from ruvmlx.kernels.paged_attention import head_page_bytes
from ruvmlx.kernels.rating import EvidenceSolver, EvidenceSolverRef, KLContexts, Push, Rule
from ruvmlx.tiers import HOT, WARM

from .machine import BLOCK, Limits, reading
from .rows import Row, median_row

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 4096  # Mistral-7B's sizes
CONTEXT = 256  # the number of tokens to which a new token attends
VOCAB, WIDTH, RANK = 49152, 576, 2  # the starter model's vocabulary and hidden size, and MicroLoRA's rank
TOGETHER = 8  # the number of tokens in a batch
GROUPS = 8  # the number of groups of calls; the mean time of a group's calls is a sample
SLOW = "scalar"  # the implementation in scalar C code, which is not measured, because it takes too long

Array = np.ndarray


@dataclass(frozen=True)
class BenchKernel:
    """A kernel to measure. read(native(implementation)) and twin() must return nearly the same numbers.

    reset: a function that undoes the changes that `native` or `twin` made to arrays
    nbytes, streamed: the bytes that a call reads and writes; if `streamed`, they always come from main memory
    products: the number of multiplications of two small integers; target: the project's target in
        microseconds"""

    name: str
    native: Callable[[str], Any]
    twin: Callable[[], Array]
    nbytes: int
    target: float | None = None
    products: int = 0
    streamed: bool = False
    implementations: tuple[str, ...] = ()
    reset: Callable[[], None] = lambda: None
    read: Callable[[Any], Array] = np.array

    def limit(self, limits: Limits) -> float:
        """Return the shortest possible time of a call on this machine, in seconds."""
        bytes_ = reading(BLOCK) * self.nbytes / BLOCK if self.streamed else reading(self.nbytes)
        return max(bytes_, self.products / limits.products_1)


def run(limits: Limits, quick: bool, log: Callable[[str], None]) -> list[Row]:
    rows = []
    for kernel in kernels():
        limit = kernel.limit(limits)
        for i, impl in enumerate(kernel.implementations):
            if not (quick and (i or kernel.target is None)) and impl != SLOW:
                rows.append(_row(kernel, impl, limit, first=i == 0))
        log(f"{kernel.name}: measured")
    return rows


def _row(kernel: BenchKernel, impl: str, limit: float, first: bool) -> Row:
    error = distance(kernel, impl)
    turns = _groups(lambda: kernel.native(impl))
    kernel.reset()
    return median_row(
        f"{kernel.name} [{impl}]",
        [1e6 * seconds for seconds, _ in turns],
        "us",
        kernel.target if first else None,
        limit=1e6 * limit,
        better="lower",
        note=f"twin: {error:.0e} away",
        condition="one thread, called from Python",
        reference=tuple(1e6 * beside for _, beside in turns),
    )


def distance(kernel: BenchKernel, impl: str) -> float:
    """Return the largest error of the numbers that a call computes, divided by the twin's largest number."""
    kernel.reset()
    found = kernel.read(kernel.native(impl)).astype(np.float64)
    kernel.reset()
    wanted = np.array(kernel.twin(), np.float64)
    kernel.reset()
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))


def _groups(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Return (mean seconds of a call, mean seconds of `_arithmetic`) for each group of calls. All groups
    together take about a fifth of a second, or longer if one call takes longer."""
    call()
    started = time.perf_counter()
    call()
    many = max(1, min(2000, round(0.2 / GROUPS / max(time.perf_counter() - started, 1e-7))))
    return [(_mean(call, many), _mean(_arithmetic, 5)) for _ in range(GROUPS)]


def _arithmetic() -> None:
    matmul.peak(5000)


def _mean(call: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - started) / times


def kernels() -> list[BenchKernel]:
    rng = np.random.default_rng(0)

    def make(*shape: int) -> Array:
        return rng.normal(size=shape).astype(np.float32)

    vector, learns = implementations(), available("micro_update")
    return [
        *(
            _for_each(kernel, vector)
            for kernel in (_attention(make), _append(make), _migration(make), *_layers(make))
        ),
        *(_for_each(kernel, learns) for kernel in (*_learning(make), *_rating(make))),
        *(_for_each(kernel, matmul.implementations()) for kernel in _products(rng)),
    ]


def _for_each(kernel: BenchKernel, names: Sequence[str]) -> BenchKernel:
    """Return a copy of the kernel, with `names` as the names of its implementations."""
    return BenchKernel(**{**vars(kernel), "implementations": tuple(names)})


def _turns(tokens: int) -> Array:
    return layers.turns(np.arange(tokens), 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM / 2)))


def _attention(make) -> BenchKernel:
    """Return the attention of one new token to CONTEXT tokens, in all heads of a layer."""
    turn, group = _turns(CONTEXT + 1), HEADS // KV_HEADS
    kv = [(make(CONTEXT, HEAD_DIM), make(CONTEXT, HEAD_DIM)) for _ in range(KV_HEADS)]
    caches = [layers.PagedKV(HEAD_DIM) for _ in kv]
    for cache, (k, v) in zip(caches, kv, strict=True):
        cache.append(k, v, turn[:CONTEXT])
    q, here = make(1, group, HEAD_DIM), turn[CONTEXT - 1 : CONTEXT]
    return BenchKernel(
        f"attention, {CONTEXT} tokens, {HEADS} heads",
        lambda impl: [c.attend(q, here, CONTEXT - 1, impl=impl) for c in caches],
        lambda: np.stack([layers.attend_ref(q, k, v, turn, CONTEXT - 1) for k, v in kv]),
        2 * 2 * KV_HEADS * CONTEXT * HEAD_DIM,
        2000,
    )


def _append(make) -> BenchKernel:
    """Return the kernel that appends keys and values of a page's second token as float16, in all heads of a
    layer."""
    turn, k, v, q = _turns(2), make(2, HEAD_DIM), make(2, HEAD_DIM), make(1, 1, HEAD_DIM)
    caches = [layers.PagedKV(HEAD_DIM) for _ in range(KV_HEADS)]
    for cache in caches:
        cache.append(k, v, turn)

    def append(impl: str) -> None:
        for cache in caches:
            cache.tokens = 1
            cache.append(k[1:], v[1:], turn[1:], impl)

    return BenchKernel(
        "KV append, hot",
        append,
        lambda: layers.attend_ref(q, k, v, turn, 1),
        2 * 6 * KV_HEADS * HEAD_DIM,
        100,
        read=lambda _: caches[0].attend(q, turn[1:], 1),
    )


def _migration(make) -> BenchKernel:
    """Return the kernel that converts a KV page of 64 tokens from f16 (the tier hot) to 8 bits (the tier
    warm), in all heads of a layer. The kernel's twin is the scalar C code."""
    hot, warm = (KV_HEADS * head_page_bytes(tier, HEAD_DIM) for tier in (HOT, WARM))
    page, target = matmul.aligned_bytes(hot), matmul.aligned_bytes(warm)
    page.view(np.float16)[:] = make(hot // 2)

    def migrate(impl: str) -> Array:
        run = layers.functions(impl).demote
        if run(HOT, page.ctypes.data, WARM, target.ctypes.data, KV_HEADS, HEAD_DIM):
            raise ValueError("the page was not demoted")
        return target

    return BenchKernel("KV migration, hot to warm", migrate, lambda: migrate(SLOW), hot + warm, 1000)


def _layers(make) -> list[BenchKernel]:
    """Return the kernels of a decoder layer's small operations, such as norms, and of LoRA's forward pass."""
    turn, heads = _turns(1), make(1, HEADS + KV_HEADS, HEAD_DIM)
    x, weight, gate, up = make(1, HIDDEN), make(HIDDEN), make(1, 14336), make(1, 14336)
    y, wide, a, b = make(1, 768), make(1, 768), make(768, 8), make(8, 768)
    before = y.copy()

    def lora(call: Callable[..., None], *impl: str) -> Array:
        call(y, wide, a, b, 1e-3, *impl)
        return y

    return [
        BenchKernel(
            "RoPE, 40 heads", lambda impl: layers.rope(heads, turn, impl=impl),
            lambda: layers.rope_ref(heads, turn), 2 * heads.nbytes, 100,
        ),
        BenchKernel(
            "RMSNorm, 4,096", lambda impl: layers.rms_norm(x, weight, 1e-5, impl),
            lambda: layers.rms_norm_ref(x, weight, 1e-5), 3 * x.nbytes, 50,
        ),
        BenchKernel(
            "SwiGLU, 14,336", lambda impl: layers.swiglu(gate, up, impl),
            lambda: layers.swiglu_ref(gate, up), 3 * gate.nbytes,
        ),
        BenchKernel(
            "LoRA forward 768, rank 8", lambda impl: lora(layers.lora_add, impl),
            lambda: lora(layers.lora_add_ref), a.nbytes + b.nbytes + 3 * y.nbytes, 30,
            reset=lambda: np.copyto(y, before),
        ),
        *(_lora_overhead(make, tokens) for tokens in (1, TOGETHER)),
    ]  # fmt: skip


def _lora_overhead(make, tokens: int) -> BenchKernel:
    """Return the work that adapters add to a layer and the head: a LoRA of rank 8 on each of seven matrices
    768 x 768, and the MicroLoRA of rank 2 on the head."""
    x, ys = make(tokens, 768), [make(tokens, 768) for _ in range(7)]
    a, b = make(768, 8), make(8, 768)
    h, logits, head_a, head_b = make(tokens, WIDTH), make(tokens, VOCAB), make(WIDTH, RANK), make(RANK, VOCAB)
    changed = [*ys, logits]
    before = [array.copy() for array in changed]

    def add(layer: Callable[..., None], head: Callable[..., None], *impl: str) -> Array:
        for y in ys:
            layer(y, x, a, b, 1e-3, *impl)
        head(logits, h, head_a, head_b, 1e-3, *impl)
        return logits

    def whole(_: Array) -> Array:
        return np.concatenate([array.ravel() for array in changed])

    def undo() -> None:
        for array, old in zip(changed, before, strict=True):
            array[...] = old

    at_once = "a token" if tokens == 1 else f"{tokens} tokens at once"
    return BenchKernel(
        f"LoRA overhead of {at_once}: 7 matrices 768, rank 8, and the head",
        lambda impl: add(layers.lora_add, micro.head_add, impl),
        lambda: whole(add(layers.lora_add_ref, micro.head_add_ref)),
        7 * (a.nbytes + b.nbytes + 2 * ys[0].nbytes) + 2 * logits.nbytes + head_b.nbytes,
        100 if tokens == 1 else 30 * tokens,
        reset=undo,
        read=whole,
    )


def _learning(make) -> list[BenchKernel]:
    """Return the kernels of a rating, and of the trace of a token (the record from which a rating learns)."""
    pair = [(make(*s), np.zeros(s, np.float32), make(*s)) for s in ((768, 2), (2, 768))]
    start = [w.copy() for w, _, _ in pair]
    a, b, h, z = make(WIDTH, RANK), make(RANK, VOCAB), make(WIDTH), make(VOCAB)
    e_a, e_b, logits = np.zeros_like(a), np.zeros_like(b), z.copy()
    u, p = make(32, RANK), np.exp(make(32, VOCAB))
    p /= p.sum(axis=1, keepdims=True)
    ids, many = np.arange(16, dtype=np.int32), make(16, VOCAB)

    def step(call: Callable[..., None], *impl: str) -> Array:
        call(pair, 1e-6, 0.9, *impl)
        return np.concatenate([w.ravel() for w, _, _ in pair])

    def calm() -> None:
        for (w, velocity, _), old in zip(pair, start, strict=True):
            w[...], velocity[...] = old, 0

    def trace(call: Callable[..., Any], *impl: str) -> Array:
        call(h, z, 7, a, b, 1e-3, e_a, e_b, *impl)
        return e_b

    def forget() -> None:
        e_a[...], e_b[...] = 0, 0

    def head(call: Callable[..., None], *impl: str) -> Array:
        call(logits, h, a, b, 1e-3, *impl)
        return logits

    return [
        BenchKernel(
            "MicroLoRA update 768x768, rank 2", lambda impl: step(micro.micro_step, impl),
            lambda: step(micro.micro_step_ref), 5 * 4 * 4 * 768, 50, reset=calm,
        ),
        BenchKernel(
            "MicroLoRA forward, output head", lambda impl: head(micro.head_add, impl),
            lambda: head(micro.head_add_ref), z.nbytes + a.nbytes + b.nbytes, 500,
            reset=lambda: np.copyto(logits, z),
        ),
        BenchKernel(
            "trace of one token", lambda impl: trace(micro.trace_accumulate, impl),
            lambda: trace(micro.trace_accumulate_ref), z.nbytes + 3 * (a.nbytes + b.nbytes), reset=forget,
        ),
        BenchKernel(
            "KL to the frozen model, 32 contexts", lambda impl: micro.kl_to_frozen(p, u, b, 1e-2, impl=impl),
            lambda: np.array(micro.kl_to_frozen_ref(p, u, b, 1e-2)), p.nbytes + b.nbytes,
        ),
        BenchKernel(
            "log-probabilities, 16 tokens", lambda impl: micro.logprobs(many, ids, impl),
            lambda: micro.logprobs_ref(many, ids), many.nbytes,
        ),
    ]  # fmt: skip


def _rating(make) -> list[BenchKernel]:
    """Return the kernels of a rating's update of weights (ruvmlx/sona/instant.py). Most of their arrays have
    the same sizes for all models."""
    tokens, along = 2048, 256
    n = tokens + along
    held, (g, f), precision = np.abs(make(3, RANK, n)), make(2, RANK, n), np.abs(make(n))
    features = (make(tokens, along) / 10).astype(np.float16)
    asking, slow = (
        EvidenceSolver(precision, matmul.Matrix(features), RANK),
        EvidenceSolverRef(precision, features),
    )
    rule = Rule(Push(1.0, 12.0, 0.0), Push(1.5, 12.0, 1.0), 0.05)
    # (number of contexts, share of the prose) of each group: one group is in answers, two are in prose
    groups = [(48, 0.0), (48, 0.1), (80, 0.9)]
    p, u = np.exp(make(176, tokens + 1)), make(176, RANK)
    p /= p.sum(axis=1, keepdims=True)
    rest, block, b = make(RANK, tokens + 1) / 1e4, make(RANK, tokens + 1), make(RANK, VOCAB)
    text = KLContexts(p, None, u, np.arange(176, dtype=np.int32), groups, rest, rest)
    answers = KLContexts(p[:48], None, u[:48], np.arange(48, dtype=np.int32), [(48, 0.0)])
    rating = held, g, f, block, 0.7, 0.99, rule, answers, 1.0
    place = b, 0.0, block, np.arange(0, VOCAB, VOCAB // tokens, dtype=np.int32)[:tokens], 0.8, 1e8
    return [
        BenchKernel(
            "what the evidence asks for", lambda impl: asking.block(held, rule, impl=impl),
            lambda: slow.block(held, rule), held.nbytes + features.nbytes,
        ),
        BenchKernel(
            "one rating more, and what all ask for", lambda impl: asking.add_rating(*rating, 1e8, impl)[1],
            lambda: slow.add_rating(*rating)[1],
            2 * held.nbytes + 3 * g.nbytes + features.nbytes + p[:48].nbytes,
        ),
        BenchKernel(
            "distance on neutral text", lambda impl: np.array(text.distance(block, 0.1, impl)),
            lambda: np.array(text.distance_ref(block, 0.1)), p.nbytes,
        ),
        BenchKernel(
            "the new lora_b", lambda impl: micro.micro_place(*place, impl),
            lambda: micro.micro_place_ref(*place), b.nbytes,
        ),
    ]  # fmt: skip


def _products(rng: np.random.Generator) -> list[BenchKernel]:
    """Return two matrix products: of 4-bit matrices that do not fit into caches with one token, and of one
    4-bit matrix with 256 tokens."""
    rows, cols = 1536, 576
    weight = rng.integers(0, 2**32, (rows, cols // 8), dtype=np.uint32)
    scales = rng.normal(0, 0.1, (rows, cols // 32)).astype(np.float16)
    biases = -8 * scales
    matrix, dense = (
        matmul.Matrix(weight, scales, biases, cols),
        matmul.dequantise_ref(weight, scales, biases, 4),
    )
    one, many = (rng.normal(size=(tokens, cols)).astype(np.float32) for tokens in (1, 256))
    turn = itertools.cycle(_copies(matrix))
    name = "matrix 1,536x576, 4 bits"
    return [
        BenchKernel(
            f"{name}, 1 token, from memory", lambda impl: matmul.matmul(next(turn), one, impl),
            lambda: matmul.matmul_ref(dense, one, 16), matrix.memory.nbytes, streamed=True,
        ),
        BenchKernel(
            f"{name}, 256 tokens", lambda impl: matmul.matmul(matrix, many, impl, 8),
            lambda: matmul.matmul_ref(dense, many, 8), matrix.memory.nbytes, products=rows * cols * len(many),
        ),
    ]  # fmt: skip


def _copies(matrix: matmul.Matrix) -> list[matmul.Matrix]:
    """Return copies of a matrix that together fill BLOCK bytes."""
    copies = [copy.copy(matrix) for _ in range(BLOCK // matrix.memory.nbytes)]
    for w in copies:
        w.memory = matmul.aligned_bytes(matrix.memory.nbytes)
        w.memory[:] = matrix.memory
    return copies

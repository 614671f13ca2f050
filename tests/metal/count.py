"""`python -m tests.metal.count`: what a layer of one token costs on Metal, as far as it can be counted.

Bytes of kernel text, which MLX builds and hashes at every call; accesses to device memory of the busiest
thread, which are its serial round trips where they wait for each other. Llama 3.1 8B's heads, float16.
"""

from collections.abc import Callable

import numpy as np

from ruvmlx.backends.mlx.kernels import decode, rope_append
from ruvmlx.backends.mlx.kernels.pages import GPUPageTable, SequencePages
from ruvmlx.backends.mlx.kernels.source import Kernel, text
from ruvmlx.platform.mx import mx
from ruvmlx.tiers import HOT, PAGE

from .simulator import Simulated, to_mx, to_numpy

N_HEADS, N_KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
VALUES = {
    rope_append.ROPE_APPEND: (DIM, 0, mx.float16),
    decode.ATTEND: (DIM, N_HEADS // N_KV_HEADS),
    decode.MERGE: (DIM, mx.float16),
}


def text_bytes(kernel: Kernel) -> tuple[int, int]:
    """With whole headers, and as MLX gets it."""
    headers = sum(len(text(name)) for name in ("dialect_metal.h", *kernel.headers))
    return headers + len(kernel.metal_body()), len(kernel.header("metal") + kernel.metal_body())


def accesses(tokens: int) -> dict[str, int]:
    """By kernel, of the busiest thread, in a step that writes the last of so many tokens, all of them hot."""
    made = {kernel: Simulated(kernel, [chosen]) for kernel, chosen in VALUES.items()}
    table, pages = _table(tokens), -(-tokens // PAGE)
    rng = np.random.default_rng(1)
    halves: Callable[..., mx.array] = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float16))  # noqa: E731

    def run(kernel, inputs, shapes, groups, chosen) -> list[mx.array]:  # type: ignore[no-untyped-def]
        outputs = made[kernel]([to_numpy(x) for x in inputs], shapes, groups, chosen)
        return [to_mx(out) for out in outputs]

    heads = [halves(1, n * DIM) for n in (N_HEADS, N_KV_HEADS, N_KV_HEADS)]
    opened = halves(1, N_KV_HEADS, 2, PAGE, DIM).view(mx.uint8)
    new = rope_append.rope_append_gpu(*heads, mx.zeros((1, DIM)), opened, table, run=run)
    pools = [mx.zeros(64, mx.uint8)] * HOT + [halves(pages, N_KV_HEADS, 2 * PAGE * DIM).view(mx.uint8)]
    decode.attend_gpu(new.q, new.q_rotated, pools, new.open, table, mx.float16, run=run)
    return {kernel.name: simulated.accesses for kernel, simulated in made.items()}


def _table(tokens: int) -> GPUPageTable:
    hot = range(-(-tokens // PAGE))
    return GPUPageTable([SequencePages([[]] * HOT + [hot], tokens)], N_HEADS, N_KV_HEADS, DIM)


def main() -> None:
    whole, pruned = (sum(sizes) for sizes in zip(*map(text_bytes, VALUES), strict=True))
    for kernel in VALUES:
        with_all, sent = text_bytes(kernel)
        print(f"{kernel.name}: {sent} bytes of text, {with_all} with whole headers")
    print(f"a layer: {pruned}, {whole}; a token of {LAYERS} layers: {LAYERS * pruned}, {LAYERS * whole}")
    for tokens in (300, 1024):
        found = accesses(tokens)
        print(f"{tokens} tokens, accesses of the busiest thread: {found}; splits: {_table(tokens).splits}")


if __name__ == "__main__":
    main()

"""Measure the time of PyTorch's attention for one new token on a long f16 cache, to compare the tiered kernel
with it.

    python3 metal_kernels/cuda/compare_torch.py [--tokens 32768] [--kv-heads 8] [--group 4] [--dim 128]

One layer runs at batch size 1, with each backend of scaled_dot_product_attention that takes the shapes:
  repeated     K and V are repeated to all query heads, as in a model without grouped-query support
  grouped      enable_gqa=True; K and V are not repeated
  as a batch   the queries of the group are rows of one head, so K and V are read once
Eight caches take turns; with the default sizes, no cache is then read from the L2 cache. A CUDA graph keeps
the time of Python out of the measured time. GB/s count the bytes of K and V once, even if a backend reads
them more often.
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LAYERS = 8
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


def variants(group: int) -> dict:
    def repeated(q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def grouped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def as_batch(q, k, v):
        b, heads, _, d = q.shape
        return F.scaled_dot_product_attention(q.reshape(b, heads // group, group, d), k, v)

    return {"repeated": repeated, "grouped": grouped, "as a batch": as_batch}


def seconds(work) -> float:
    """Return the median time of 15 replays of a CUDA graph of `work`, in seconds."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(15):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e4)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in {"tokens": 32768, "kv-heads": 8, "group": 4, "dim": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    a = parser.parse_args()
    print(torch.__version__, torch.cuda.get_device_name(), vars(a))
    make = lambda heads, n: torch.randn(1, heads, n, a.dim, dtype=torch.float16, device="cuda")  # noqa: E731
    q = make(a.kv_heads * a.group, 1)
    caches = [(make(a.kv_heads, a.tokens), make(a.kv_heads, a.tokens)) for _ in range(LAYERS)]
    bytes_read = 2 * a.kv_heads * a.tokens * a.dim * 2
    want = variants(a.group)["repeated"](*(x.float() for x in (q, *_repeat(caches[0], a.group))))
    for name, attend in variants(a.group).items():
        held = [_repeat(c, a.group) for c in caches] if name == "repeated" else caches
        for backend in BACKENDS:
            measure(name, backend, attend, q, held, want, bytes_read)


def measure(name: str, backend, attend, q, caches, want, bytes_read: int) -> None:
    def work():
        for k, v in caches:
            attend(q, k, v)

    try:
        with sdpa_kernel(backend):
            error = (attend(q, *caches[0]).reshape(want.shape).float() - want).abs().max().item()
            s = seconds(work) / len(caches)
    except RuntimeError as why:
        print(f"{name:10}  {backend.name:20}  not for these shapes: {str(why).splitlines()[0][:60]}")
        return
    rate = bytes_read / s / 1e9
    print(f"{name:10}  {backend.name:20}  {s * 1e6:8.2f} us  {rate:6.0f} GB/s  error {error:.1e}")


def _repeat(cache, group: int):
    return tuple(x.repeat_interleave(group, dim=1) for x in cache)


if __name__ == "__main__":
    main()

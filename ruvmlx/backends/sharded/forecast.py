"""This module says, before a model loads, how many tokens per second one machine and all machines together
are expected to write.

    seconds of a token = bytes that are read / bytes per second + sums * seconds of a sum

A rank reads its share of the layers, and rank 0 also the output head. A token needs two sums for each layer,
and one for the embedding.
"""

import time
from dataclasses import dataclass

from ...models.config.model import Model, ModelConfig
from ...platform import cpu
from ...platform.gpu import gpu
from ...platform.mx import mx
from ..mlx.backend import dtype_name, plan
from ..mlx.runner import default_device
from ..weight_bytes import bytes_of_weights
from .peers import PeerLinks

READ = 128 << 20  # bytes of the matrix whose product is timed; more than a processor's caches hold
WIDTH = 2048  # the number of columns of this matrix
ROUNDS, SUMS = 5, 20


def read_speed() -> float:
    """Return the bytes per second with which this machine reads a matrix and multiplies it by a vector."""
    on_cpu = default_device() == "cpu"
    dtype = mx.float32 if on_cpu else mx.float16
    with mx.stream(mx.Device(mx.cpu) if on_cpu else gpu.device):
        matrix = mx.ones((READ // dtype.size // WIDTH, WIDTH), dtype)
        x = mx.ones((1, WIDTH), dtype)
        mx.eval(matrix, x, x @ matrix.T)
        return READ / min(_seconds(lambda: mx.eval(x @ matrix.T)) for _ in range(ROUNDS))


def compute_sums(group: mx.distributed.Group, width: int, dtype: str, n: int) -> float:
    """Return the seconds of a sum of [1, width] over all ranks: the median of n sums, each after the last."""
    x, times = mx.zeros((1, width), getattr(mx, dtype)), []
    for _ in range(n):
        times.append(_seconds(lambda: mx.eval(mx.distributed.all_sum(x, group=group))))
    return sorted(times)[n // 2]


def _seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@dataclass(frozen=True)
class Forecast:
    """The expected tokens per second. alone: on rank 0 alone; 0: the model does not fit there."""

    ranks: int
    alone: float
    together: float
    sum_seconds: float

    @classmethod
    def measure(cls, peers: PeerLinks, model: Model, ranks: int) -> "Forecast":
        """Measure this machine alone, then all machines at once."""
        assert peers.group is not None
        own = read_speed()
        peers.tell({"do": "read_speed"})
        speeds = [read_speed(), *(link.receive()[0]["speed"] for link in peers.links)]
        device = default_device()
        wire = dtype_name(plan(model.load_weights(), device).dtype)
        width = model.config.hidden_size
        peers.tell({"do": "sums", "width": width, "dtype": wire, "n": SUMS})
        with peers.step():
            seconds = compute_sums(peers.group, width, wire, SUMS)
        whole = bytes_of_weights(model.types, model.bytes, model.parameters, "mlx", device)
        return cls.of(model, whole, own, speeds, seconds, cpu.memory_limit(device == "metal"))

    @classmethod
    def of(
        cls, model: Model, whole: int, own: float, speeds: list[float], sum_seconds: float, limit: int
    ) -> "Forecast":
        """whole: the bytes of all weights in memory. own: rank 0's bytes per second alone. speeds: those of
        each rank while all read. limit: the bytes that rank 0 can give a model."""
        layers, head = _read_bytes(model.config, model.parameters, whole)
        each = [layers / len(speeds) + (0 if rank else head) for rank in range(len(speeds))]
        reading = max(nbytes / speed for nbytes, speed in zip(each, speeds, strict=True))
        together = 1 / (reading + (2 * model.config.n_layers + 1) * sum_seconds)
        alone = own / (layers + head) if whole <= limit else 0.0
        return cls(len(speeds), alone, together, sum_seconds)

    @property
    def line(self) -> str:
        """Return one line for the user."""
        many = f"{self.ranks} machines: about {self.together:.3g} tokens per second"
        if not self.alone:
            return f"{many}; the model does not fit one machine."
        line = f"{many}, one machine: about {self.alone:.3g}"
        if self.alone < self.together:
            return f"{line}."
        return (
            f"{line}. One machine is faster (a sum over the connection takes "
            f"{1e3 * self.sum_seconds:.2g} ms): run without `launch`."
        )


def _read_bytes(config: ModelConfig, parameters: int, whole: int) -> tuple[float, float]:
    """Return the bytes that a token reads (of the layers, of the output head)."""
    table, each = config.vocab_size * config.hidden_size, whole / parameters
    tables = table if config.tie_word_embeddings else 2 * table
    return each * (parameters - tables), each * table

"""This module limits the memory of training. Training needs a graph that computes gradients
(training/trainer.py). If the native backend runs the model, the graph has a second copy of the weights, in
float32. For example, Qwen 2.5 0.5B with 4 bits takes 0.4 GB, and its graph takes 2.5 GB.

A training begins only if the graph and the layers' numbers of the longest text fit into the memory. While the
training runs, it stops if the memory runs out. A stopped training is saved, and its graph is freed.
"""

import time
from typing import NoReturn

from ..backends.base import Backend
from ..backends.select import Choice
from ..backends.sharded.place import reason_against_training
from ..models.config.header_facts import Facts
from ..models.config.model import Model, ModelConfig
from ..pausing import MemoryRanOut, Pause
from ..platform import cpu
from ..platform.memory import resident
from ..text import size
from .load_plan import weight_bytes

TRY_EVERY = 60.0  # seconds from a training that found no room to the next training
LOOK_EVERY = 0.25  # seconds between two looks at the memory while a training runs
LONGEST_TEXT = 512  # tokens; slices.MAX_TOKENS, whose module imports MLX
MIN_FREE = 1 / 32  # a training stops if less than this share of the machine's memory is free


def training_bytes(facts: Facts, lends_graph: bool, device: str = "cpu", tokens: int = LONGEST_TEXT) -> int:
    """Return the bytes that the training of a model takes at most.

    The sum has the weights of the graph, and the numbers of each layer that the backward pass reads: in
    float32. The attention scores of all heads are [n_heads, tokens, tokens].

    lends_graph: True if the backend's own weights are the graph. device: "cpu", or the GPU on which MLX runs.
    tokens: the length of the text.
    """
    shape = facts.shape
    if not isinstance(shape, ModelConfig):
        return 0
    graph = 0 if lends_graph else weight_bytes(facts, Choice("mlx", device, "mlx", ""))
    keys = 2 * shape.n_kv_heads * shape.head_dim
    numbers = 8 * shape.hidden_size + keys + 3 * shape.intermediate_size + shape.n_heads * tokens
    return graph + 4 * shape.n_layers * tokens * numbers


class LearningRoom:
    """The memory that the training of one model can take (pausing.Room)."""

    def __init__(self, model: Model, backend: Backend, limit: int = 0):
        """limit: the setting memory_limit in bytes; 0: not set."""
        self._model, self._limit, self.next_try = model, limit, 0.0
        self._backend = backend

    @property
    def need(self) -> int:
        """The bytes that a training takes at most."""
        from ..backends.mlx.runner import default_device  # this import starts MLX

        lends_graph = getattr(self._backend, "lent_graph", lambda: None)() is not None
        return training_bytes(Facts.of(self._model), lends_graph, default_device())

    @property
    def bytes_left(self) -> int:
        """The bytes that a training can still take: what is free, and at most what memory_limit leaves."""
        free = int(cpu.available_memory() * cpu.SPARE)
        return min(free, self._limit - resident()) if self._limit else free

    def check(self) -> None:
        if why := reason_against_training():
            self._refuse(why)
        need, left = self.need, self.bytes_left
        if need > left:
            self._refuse(f"training needs about {size(need)} of memory, and {size(max(0, left))} are left")

    def guard(self, work_pause: Pause) -> Pause:
        next_look = time.monotonic()

        def pause() -> None:
            nonlocal next_look
            work_pause()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + LOOK_EVERY
                self._check_running()

        return pause

    def _check_running(self) -> None:
        used = resident()
        if self._limit and used > self._limit:
            self._refuse(f"training stopped: the program takes {size(used)} of memory")
        free, total = cpu.available_memory(), cpu.total_memory()
        if free < MIN_FREE * total:
            self._refuse(f"training stopped: {size(free)} of {size(total)} of memory are free")

    def _refuse(self, reason: str) -> NoReturn:
        self.next_try = time.monotonic() + TRY_EVERY
        raise MemoryRanOut(reason + (f"; memory_limit is {size(self._limit)}" if self._limit else ""))

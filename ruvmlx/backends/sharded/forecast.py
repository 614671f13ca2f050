"""This module says, before a model loads, how many tokens per second one machine and all machines together
are expected to write.

The module measures both with pretend models. A pretend model has the first layers of the model, so many that
a processor's caches do not hold them. A step computes these layers again and again, until a token has passed
as many layers as the model has. So a step reads, computes and adds up as much as a step of the whole model.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ...kv.policy import TIERED
from ...models.config.model import Model
from ..base import Backend, NotFiniteLogits

READ = 128 << 20  # bytes of the loaded layers of each machine; more than a processor's caches hold
WARM_UP = 3  # the number of first steps that do not count
LEAST, MOST = 12, 60  # the number of measured steps; after LEAST, measuring ends if it took SECONDS
SECONDS = 2.0


def pretend_layers(model: Model, whole: int, ranks: int) -> int:
    """Return the number of layers that a pretend model loads. whole: the bytes of all weights in memory."""
    config = model.config
    table = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    each = whole * (1 - table / model.parameters) / config.n_layers / ranks
    return min(config.n_layers, int(READ / each) + 1)


def decode_speed(backend: Backend, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the tokens per second that a backend writes after a prompt of one token: the median of
    steps."""
    cache, times, started = backend.new_cache(TIERED), list[float](), clock()
    backend.prefill([0], cache)
    while len(times) < WARM_UP + LEAST or (len(times) < WARM_UP + MOST and clock() - started < SECONDS):
        begun = clock()
        # layers that a token passes again and again can exceed the largest number of 16 bits
        with contextlib.suppress(NotFiniteLogits):
            backend.decode(0, cache)
        times.append(clock() - begun)
    return 1 / median(times[WARM_UP:])


@dataclass(frozen=True)
class Forecast:
    """The expected tokens per second. alone: on rank 0 alone; 0: the model does not fit there."""

    ranks: int
    alone: float
    together: float

    @property
    def line(self) -> str:
        """Return one line for the user."""
        many = f"{self.ranks} machines: about {self.together:.3g} tokens per second"
        if not self.alone:
            return f"{many}; the model does not fit one machine."
        line = f"{many}, one machine: about {self.alone:.3g}."
        return line if self.alone < self.together else f"{line} One machine is faster: run without `launch`."

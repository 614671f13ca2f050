"""This module decides which models of a server fit into the memory together, and how much memory their KV
caches can take."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ruvmlx.memory.load_plan import PROGRAM, Need, NotEnoughMemory
from ruvmlx.memory.memory_plan import limit_caches
from ruvmlx.text import size

from .errors import ApiError
from .serving import Serving


@dataclass
class PooledModel:
    """A model that a request has named, or the server's first model. The model can be closed.

    name: the name in the request; "" for the server's first model. need: the planned memory; None: there is
    no plan. scratch: bytes of working memory that the plan does not include. users: the number of requests,
    and of questions about the model, that keep the model open now. used_at: the `time.monotonic` time at
    which the last request ended or, if later, the model was opened. is_tended: True if an `IdleWork` runs for
    the model. terminals: the number of attached terminals that keep the model open now.
    """

    name: str
    serving: Serving
    need: Need | None = None
    scratch: int = 0
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)
    is_tended: bool = False
    terminals: int = 0

    @property
    def is_open(self) -> bool:
        return not self.serving.unloaded

    @property
    def is_idle(self) -> bool:
        return not (self.users or self.serving.is_writing)

    def is_unused(self, seconds: float) -> bool:
        """Return True if no request has used the model for more than `seconds` seconds."""
        return self.is_idle and time.monotonic() - self.used_at > seconds

    @property
    def bytes(self) -> int:
        """The planned memory of the model in bytes, without the memory that all models share; 0 if there is
        no plan."""
        return self.need.total - PROGRAM + self.scratch if self.need else 0

    @contextlib.contextmanager
    def with_terminal(self) -> Iterator[None]:
        """In the `with` block, one more attached terminal keeps the model open."""
        self.terminals += 1
        try:
            yield
        finally:
            self.terminals -= 1

    def note_plan(self) -> None:
        """Copy the memory plan with which the runtime has opened the model. If no runtime is open, because a
        switch to another model failed, mark the model as closed, so that the next request opens the model
        again."""
        host = self.serving.host
        self.serving.unloaded, plan = not host.is_open, host.holder.plan
        if plan is not None and host.is_open:
            self.need = plan.need
            self.scratch = max(0, self.serving.runtime.backend.nbytes - plan.need.weights)


@dataclass
class MemoryShare:
    """The memory that a server has for its models. limit: the maximum memory of all models together in bytes,
    or 0 if no limit is known. is_fixed: True if the user chose the limit. kv_budget: the bytes for the KV
    caches of each model, if the user chose this number; else 0."""

    limit: int = 0
    is_fixed: bool = False
    kv_budget: int = 0

    async def begin(self, first: PooledModel) -> None:
        """Raise NotEnoughMemory if the server's first model, which is open, takes more memory than the limit.
        If the user chose the limit, also set the memory limit of this model's KV caches."""
        if not self.limit:
            return
        if plan_bytes([first]) > self.limit:
            raise NotEnoughMemory(
                f"server_memory is {size(self.limit)}, and {first.serving.model_name} needs about "
                f"{size(plan_bytes([first]))}; raise the setting, or choose a smaller model or max_context."
            )
        if self.is_fixed:
            await self.divide([first])

    def check(self, model: PooledModel) -> None:
        """Raise ApiError if the model takes more memory than the limit even without other models."""
        if self.limit and plan_bytes([model]) > self.limit:
            need, name = plan_bytes([model]), model.serving.model_name
            raise ApiError(
                400,
                f"model: {name} needs about {size(need)} of memory, and all models of this server may take "
                f"{size(self.limit)}; the setting server_memory changes that.",
                "model",
                "model_too_large",
            )

    def check_beside_terminals(self, opened: Sequence[PooledModel], model: PooledModel) -> None:
        """Raise ApiError, 503, if the model does not fit into the memory beside the open models that attached
        terminals keep open."""
        kept = [other for other in opened if other.terminals]
        if kept and self.limit and plan_bytes([*kept, model]) > self.limit:
            need, name = plan_bytes([model]), model.serving.model_name
            others = " and ".join(other.serving.model_name for other in kept)
            raise ApiError(
                503,
                f"model: {name} needs about {size(need)} of memory, and attached terminals keep {others} "
                "open; close them, then ask again.",
                "model",
                "memory_busy",
            )

    async def has_room(self, opened: Sequence[PooledModel], model: PooledModel) -> bool:
        """Return True if the model fits into the memory beside the open models. The function first limits the
        KV caches of the open models, to leave memory for this model. Return False if the model does not fit,
        or if the replies in progress need more KV cache memory than the new limits leave."""
        if not self.limit:
            return True
        together = [*opened, model]
        return plan_bytes(together) <= self.limit and await self.divide(together)

    async def divide(self, models: Sequence[PooledModel]) -> bool:
        """Set the memory limit of each model's KV caches: each limit is the planned size plus an equal part
        of the memory that is left under the limit of all models, but at most the model's `kv_room`. If the
        user chose `kv_budget`, the limits stay. Return False if the replies in progress of a model need more
        KV cache memory than the model's new limit."""
        if not (self.limit and models):
            return True
        left = (self.limit - plan_bytes(models)) // len(models)
        parts = [(m, m.need.cache + left) for m in models if m.is_open and m.need is not None]
        return all([await self._limit_caches(model, part) for model, part in parts])

    async def _limit_caches(self, model: PooledModel, part: int) -> bool:
        if self.kv_budget:
            return True
        most = model.serving.runtime.planned.kv_room
        wanted = max(1, min(part, most or part))
        return await model.serving.host.call_between(
            lambda runtime: limit_caches(runtime.engine, runtime.writer.scheduler, wanted)
        )


def plan_bytes(models: Sequence[PooledModel]) -> int:
    """Return the planned memory of the program and of these models together, in bytes."""
    return PROGRAM + sum(model.bytes for model in models)

"""This module lists, for each purpose (weights, KV caches, adapters and others), the planned bytes of memory,
the bytes in use and the limit.

The program makes the plan when it opens a model. The command `show --memory`, the server's endpoint
`/metrics` and the server's page show the list. docs/cache.md explains the behaviour at the limit of the KV
caches.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..backends.base import Backend
from ..chats.learning import Learning
from ..engine import LLMInferenceEngine
from ..engine.admission import Admission
from ..engine.scheduler import Scheduler, fits_into
from ..errors import UsageError
from ..lora.residency import BUDGET
from ..platform.memory import MemoryUse
from ..text import size
from .load_plan import PER_WORD, PROGRAM, Plan, cached_tokens, token_bytes

# a KV budget must be large enough for MIN_CONTEXT_TOKENS tokens (prompt and reply), or for the model's whole
# context if that is shorter
MIN_CONTEXT_TOKENS = 128


@dataclass(frozen=True)
class Purpose:
    """The bytes of memory that the program plans and uses for one purpose. limit: the maximum number of
    bytes; 0: no limit, or not known. name: "weights", "scratch" (working memory), "kv", "kv_disk" (KV caches
    on the disk), "adapters_hot", "adapters_warm", "adapters_cold" (adapters in use, loaded, and only on
    disk), "learning", "program", or "total" (the sum without the disk)."""

    name: str
    planned: int
    used: int
    limit: int


@dataclass(frozen=True)
class Planned:
    """The bytes that the program planned for each purpose when it opened the model. limit: the maximum number
    of bytes for one model; 0: not known."""

    weights: int
    scratch: int
    kv: int
    learning: int
    limit: int = 0

    @classmethod
    def of(cls, engine: LLMInferenceEngine, plan: Plan | None) -> "Planned":
        """plan: the memory plan that the program made before it read the weights. If `plan` is None, the
        method takes the bytes that the weights use now as the planned bytes."""
        shape, scratch = engine.model.shape, _scratch(engine.backend)
        weights, limit = engine.backend.nbytes - scratch, 0
        kv = token_bytes(shape) * cached_tokens(shape, engine.model.context)
        if plan is not None:
            weights, kv, limit = plan.need.weights, plan.need.cache, plan.memory.limit
        weights += _draft_bytes(engine)
        if not shape.writes:
            return cls(weights, token_bytes(shape) * engine.model.context, 0, 0, limit)
        return cls(weights, scratch, kv, PER_WORD * shape.vocab_size, limit)

    @property
    def adapters(self) -> int:
        """Return the bytes for loaded adapters: an eighth of the memory limit, and at most BUDGET."""
        return min(BUDGET, self.limit // 8) if self.limit else BUDGET

    @property
    def kv_room(self) -> int:
        """Return the bytes that the memory limit leaves for KV caches, or 0 if the limit is not known. The
        result is never less than the smaller of two numbers: the planned bytes of the KV cache, and a quarter
        of the limit."""
        if not self.limit:
            return 0
        rest = self.limit - self.weights - self.scratch - self.learning - PROGRAM - self.adapters
        return max(rest, min(self.kv, self.limit // 4))


def use_budget(engine: LLMInferenceEngine, planned: Planned) -> None:
    """If the user has not set kv_budget, set the budget of the KV caches to the bytes that the other purposes
    leave free.

    If the user's kv_budget is too small for the model's context, write this into the backend's `caveat`, a
    text that the program shows. Raises UsageError if the kv_budget is too small for one chat."""
    pool = engine.backend.pool
    if pool is None:
        return
    if not pool.budget:
        pool.budget = planned.kv_room
        return
    longest, context = Admission(engine).longest(), engine.model.context
    if longest < min(MIN_CONTEXT_TOKENS, context):
        raise UsageError(
            f"kv_budget is {size(pool.budget)}; that holds {longest} tokens of {engine.model.name}, and a "
            f"chat needs {MIN_CONTEXT_TOKENS} or more. 64 tokens take {size(pool.sizes[-1])}: raise it."
        )
    if longest < context:
        told = (
            f"kv_budget of {size(pool.budget)} holds {longest:,} tokens of prompt and reply, not {context:,}"
        )
        engine.backend.caveat = "; ".join(filter(None, [engine.backend.caveat, told]))


def limit_caches(engine: LLMInferenceEngine, scheduler: Scheduler, nbytes: int) -> bool:
    """Limit all KV caches of a model to `nbytes`. If the running replies can need more bytes, change nothing
    and return False."""
    pool = engine.backend.pool
    if pool is None:
        return True
    if not fits_into(scheduler, nbytes):
        return False
    pool.budget = nbytes
    engine.sessions.make_room()
    for tier in range(len(pool.pages)):
        pool.compact(tier)
    return True


def purposes(
    planned: Planned, held: MemoryUse, engine: LLMInferenceEngine, learning: Learning
) -> list[Purpose]:
    """Return the bytes of each purpose, then the total of all purposes in memory."""
    scratch, folder = _scratch(engine.backend), engine.sessions.folder
    disk = folder.budget if folder else 0
    tiers = {tier: 0 for tier in ("hot", "warm", "cold")}
    for adapter in learning.residency.tiers():
        tiers[adapter.tier] += adapter.bytes
    adapters = learning.residency.budget
    draft = _draft_bytes(engine)
    graph = _training_graph_bytes(engine.backend)
    rest = max(0, held.rest - draft - graph)
    in_memory = [
        Purpose("weights", planned.weights, held.model - scratch + draft, planned.limit),
        Purpose("scratch", planned.scratch, scratch, planned.scratch),
        Purpose("kv", planned.kv, held.kv, held.kv_budget or engine.sessions.limit),
        Purpose("adapters_hot", tiers["hot"], tiers["hot"], adapters),
        Purpose("adapters_warm", max(0, adapters - tiers["hot"]), tiers["warm"], adapters),
        Purpose("adapters_cold", 0, tiers["cold"], 0),
        Purpose("learning", planned.learning, graph, graph + max(0, learning.room.bytes_left)),
        Purpose("program", PROGRAM, rest, 0),
    ]
    stored = folder.contents()[1] if folder else 0
    total = Purpose("total", sum(p.planned for p in in_memory), held.resident, planned.limit or held.budget)
    return [*in_memory[:3], Purpose("kv_disk", disk, stored, disk), *in_memory[3:], total]


def sum_purposes(tables: Sequence[Sequence[Purpose]], resident: int) -> list[Purpose]:
    """Return one table for all models of a process: the sum of the models' tables, for each purpose. Memory
    that the models share is added only once. resident: the bytes of memory that the process uses."""
    found: dict[str, Purpose] = {}
    for row in (row for table in tables for row in table):
        one = found.get(row.name)
        shared = one is None or row.name in ("kv_disk", "program")
        found[row.name] = row if shared or one is None else _add_rows(one, row)
    parts = [row for name, row in found.items() if name not in ("kv_disk", "program", "total")]
    if tables:
        rest = max(0, resident - sum(row.used for row in parts))
        found["program"] = replace(found["program"], used=rest)
        planned = PROGRAM + sum(row.planned for row in parts)
        found["total"] = replace(found["total"], planned=planned, used=resident)
    return [*found.values()]


def _add_rows(one: Purpose, other: Purpose) -> Purpose:
    limit = (
        max(one.limit, other.limit)
        if one.name in ("weights", "learning", "total")
        else one.limit + other.limit
    )
    return Purpose(one.name, one.planned + other.planned, one.used + other.used, limit)


def facts(rows: Sequence[Purpose]) -> list[dict[str, Any]]:
    """Return the rows of the table of purposes as dictionaries for JSON."""
    return [asdict(row) for row in rows]


WORDS = {
    "weights": "the model's weights",
    "scratch": "working memory",
    "kv": "what was read of chats (KV cache)",
    "kv_disk": "the same, on the disk",
    "adapters_hot": "adapters in use",
    "adapters_warm": "adapters used a while ago",
    "adapters_cold": "adapters that are put aside",
    "learning": "learning from ratings",
    "program": "the program",
    "total": "all, without the disk",
}


def table(rows: Sequence[Purpose]) -> list[tuple[str, str, str, str]]:
    """Return the purposes as rows of a table for the user: name, planned, in use, limit."""
    return [
        (WORDS[row.name], size(row.planned), size(row.used), size(row.limit) if row.limit else "-")
        for row in rows
    ]


def _training_graph_bytes(backend: Backend) -> int:
    """Return the bytes of the graph that computes gradients. Beside the native backend, MLX holds only this
    graph. Return 0 for another backend, because MLX holds its weights, too."""
    mlx = sys.modules.get("mlx.core")
    return mlx.get_active_memory() if mlx is not None and backend.name == "native" else 0


def _draft_bytes(engine: LLMInferenceEngine) -> int:
    """Return the bytes of the draft model; 0 if there is none."""
    return engine.draft_model.nbytes if engine.draft_model else 0


def _scratch(backend: Backend) -> int:
    """Return the bytes of activations and working memory, or 0 if the backend does not separate these bytes
    from the weights."""
    return getattr(backend, "scratch", 0)

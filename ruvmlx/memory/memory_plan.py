"""One plan for the memory of a process, by purpose: what was planned, what is in use, and the limit.

Made when the model is opened. `show --memory`, `doctor`, the side panel, `/metrics` and the server's page all
show this. README of the cache: what happens at the limit of the KV caches.
"""

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

MIN_CONTEXT_TOKENS = 128  # tokens of prompt and reply that a KV budget must hold


@dataclass(frozen=True)
class Purpose:
    """Bytes for one purpose. limit: 0 for none. name: "weights", "scratch", "kv", "kv_disk", "adapters_hot",
    "adapters_warm", "adapters_cold", "learning", "program", or "total", which leaves out the disk."""

    name: str
    planned: int
    used: int
    limit: int


@dataclass(frozen=True)
class Planned:
    """What was planned when the model was opened. limit: bytes that one model may take; 0: not known."""

    weights: int
    scratch: int
    kv: int
    learning: int
    limit: int = 0

    @classmethod
    def of(cls, engine: LLMInferenceEngine, plan: Plan | None) -> "Planned":
        """plan: made before the weights were read; None: what they took counts as planned."""
        shape, scratch = engine.model.shape, _scratch(engine.backend)
        weights, limit = engine.backend.nbytes - scratch, 0
        kv = token_bytes(shape) * cached_tokens(shape, engine.model.context)
        if plan is not None:
            weights, kv, limit = plan.need.weights, plan.need.cache, plan.memory.limit
        return cls(weights, scratch, kv, PER_WORD * shape.vocab_size, limit)

    @property
    def kv_room(self) -> int:
        """Bytes that are left for KV caches; 0: not known. The plan for the smallest context always fits."""
        if not self.limit:
            return 0
        rest = self.limit - self.weights - self.scratch - self.learning - PROGRAM - BUDGET
        return max(rest, min(self.kv, self.limit // 4))


def use_budget(engine: LLMInferenceEngine, planned: Planned) -> None:
    """Give the KV caches what is left by the plan, if no budget was asked for. One that was asked for and
    holds less than the context is told in the backend's `caveat`. UsageError if it holds no chat at all."""
    pool = getattr(engine.backend, "pool", None)
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
    """Let all KV caches of a model take at most so many bytes. False, and nothing changes, while replies that
    run may take more."""
    pool = getattr(engine.backend, "pool", None)
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
    """All purposes, and the total of those in memory."""
    scratch, folder = _scratch(engine.backend), engine.sessions.folder
    disk = folder.budget if folder else 0
    tiers = {tier: 0 for tier in ("hot", "warm", "cold")}
    for adapter in learning.residency.tiers():
        tiers[adapter.tier] += adapter.bytes
    adapters = learning.residency.budget
    traces = sum(learner.traces.nbytes for learner in learning.residency.loaded_adapters())
    rest = max(0, held.rest - traces)
    in_memory = [
        Purpose("weights", planned.weights, held.model - scratch, planned.limit),
        Purpose("scratch", planned.scratch, scratch, 0),
        Purpose("kv", planned.kv, held.kv, held.kv_budget or engine.sessions.limit),
        Purpose("adapters_hot", tiers["hot"], tiers["hot"], adapters),
        Purpose("adapters_warm", max(0, adapters - tiers["hot"]), tiers["warm"], adapters),
        Purpose("adapters_cold", 0, tiers["cold"], 0),
        Purpose("learning", planned.learning, traces, 0),
        Purpose("program", PROGRAM, rest, 0),
    ]
    stored = folder.contents()[1] if folder else 0
    total = Purpose("total", sum(p.planned for p in in_memory), held.resident, planned.limit or held.budget)
    return [*in_memory[:3], Purpose("kv_disk", disk, stored, disk), *in_memory[3:], total]


def sum_purposes(tables: Sequence[Sequence[Purpose]], resident: int) -> list[Purpose]:
    """The purposes of several models in one process, which has so many bytes. What they share counts once."""
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
    limit = max(one.limit, other.limit) if one.name in ("weights", "total") else one.limit + other.limit
    return Purpose(one.name, one.planned + other.planned, one.used + other.used, limit)


def facts(rows: Sequence[Purpose]) -> list[dict[str, Any]]:
    """As JSON shows them."""
    return [asdict(row) for row in rows]


def table(rows: Sequence[Purpose]) -> list[str]:
    """Lines for people."""
    lines = [f"{'':<15}{'planned':>10}{'in use':>10}{'limit':>10}"]
    for row in rows:
        name, limit = row.name.replace("_", " "), size(row.limit) if row.limit else "-"
        lines.append(f"{name:<15}{size(row.planned):>10}{size(row.used):>10}{limit:>10}")
    return lines


def _scratch(backend: Backend) -> int:
    """Bytes of activations and working memory, as far as the backend tells them apart from weights."""
    return getattr(backend, "scratch", 0)

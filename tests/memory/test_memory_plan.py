"""The plan of a process's memory: one source for `show --memory`, the metrics and the page."""

import json
from dataclasses import replace

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.errors import UsageError
from ruvmlx.kv.policy import TIERED
from ruvmlx.memory import memory_plan
from ruvmlx.memory.memory_plan import Planned, table, use_budget
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings

from ..cli.verbs import run  # noqa: F401 - a fixture
from ..test_runtime import say

NAMES = [
    "weights", "scratch", "kv", "kv_disk", "adapters_hot", "adapters_warm", "adapters_cold", "learning",
    "program", "total",
]  # fmt: skip


def test_the_parts_are_those_of_the_process(open_tiny):
    with open_tiny(kv_disk=3) as runtime:
        before = {row.name: row for row in runtime.memory_purposes()}
        say(runtime, runtime.chats.new_chat(), "hello")
        rows = {row.name: row for row in runtime.memory_purposes()}
        held = runtime.memory_use()
        assert list(rows) == NAMES and before["kv"].used == 0
        assert rows["weights"].used + rows["scratch"].used == held.model > 0
        assert rows["kv"].used == held.kv > 0
        traces = runtime.learner.traces.nbytes
        assert rows["adapters_hot"].used >= before["adapters_hot"].used + traces > traces > 0
        adapters = [rows[f"adapters_{tier}"].used for tier in ("hot", "warm", "cold")]
        assert sum(adapters) == held.adapters == adapters[0] > 0
        assert rows["kv_disk"].limit == 3 << 20
        parts = sum(row.used for name, row in rows.items() if name not in ("total", "kv_disk"))
        assert abs(parts - rows["total"].used) < 8 << 20  # the process itself moves between two looks
        runtime.learning.of("other")
        rows = {row.name: row for row in runtime.memory_purposes()}
        assert rows["adapters_warm"].used > 0 and rows["adapters_hot"].used == adapters[0]


def test_a_table_has_a_line_each(open_tiny):
    with open_tiny() as runtime:
        rows = table(runtime.memory_purposes())
    assert len(rows) == len(NAMES) == len({name for name, *_ in rows})
    assert rows[2][0] == "what was read of chats (KV cache)" and all(len(row) == 4 for row in rows)


def test_the_caches_get_what_is_left(tiny):
    """Of the memory that one model may take; at least a quarter, or the smallest context."""
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), TIERED)
    known = Planned.of(engine, None)
    assert known.kv_room == 0 and known.weights + known.scratch == engine.backend.nbytes
    use_budget(engine, replace(known, limit=4 << 30))
    taken = known.weights + known.scratch + known.learning + memory_plan.PROGRAM + memory_plan.BUDGET
    assert engine.backend.pool.budget == (4 << 30) - taken
    assert replace(known, limit=1 << 20).kv_room == min(known.kv, 1 << 18)


@pytest.mark.parametrize(
    ("pages", "told"), [(2, None), (4.2, "256 tokens of prompt and reply, not 512"), (1000, "")]
)
def test_a_budget_is_kept_or_the_start_says_what_it_cannot_hold(tiny, pages, told):
    engine = LLMInferenceEngine(tiny, NativeBackend(tiny, threads=1), TIERED)
    pool = engine.backend.pool
    pool.budget = int(pages * pool.sizes[-1])
    if told is None:
        with pytest.raises(UsageError, match=r"^kv_budget is .* a chat needs 128 or more\. 64 tokens take "):
            use_budget(engine, Planned.of(engine, None))
        return
    use_budget(engine, Planned.of(engine, None))
    assert engine.backend.caveat.startswith("kv_budget of") == bool(told) and told in engine.backend.caveat


@pytest.mark.parametrize("kv_budget", [None, 0])
def test_a_runtime_that_is_opened_has_a_budget(home, starter_file, kv_budget):
    """The settings explain kv_budget 0 as the default, so 0 gives a budget, too."""
    with Runtime.open(Settings(adapter="none", kv_disk=None, kv_budget=kv_budget)) as runtime:
        rows = {row.name: row for row in runtime.memory_purposes()}
        assert rows["kv"].limit == runtime.backend.pool.budget > rows["kv"].planned > 1 << 20
        assert rows["total"].limit > rows["total"].planned > rows["weights"].planned > 50 << 20


def test_show_memory(run, starter_file, monkeypatch):  # noqa: F811
    monkeypatch.setenv("RUVMLX_KV_BUDGET", "64")
    _, out, _ = run("show", "--memory", "--json")
    facts = json.loads(out)
    assert [row["name"] for row in facts["memory"]] == NAMES
    assert facts["memory"][2]["limit"] == 64 << 20
    assert "what was read of chats (KV cache)" in run("show", "--memory")[1]

"""Models that are proposed fit the machine, are the best that do, and are not here already."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ruvmlx import settings
from ruvmlx.memory import proposals
from ruvmlx.memory.load_plan import MachineMemory
from ruvmlx.models.config.families import ARCHITECTURES
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.find.resolve import REPO
from ruvmlx.platform import cpu

GB = 10**9


@pytest.fixture
def machine(monkeypatch):
    """A machine with so much memory for one model, so many bytes per second, and these models."""

    def of(memory, bandwidth=100 * GB, here=()):
        (settings.home() / proposals.BANDWIDTH).unlink(missing_ok=True)
        total = math.ceil(memory / cpu.GPU_SHARE)
        monkeypatch.setattr(cpu, "memory_of_models", lambda total, metal: int(total * cpu.GPU_SHARE))
        monkeypatch.setattr(MachineMemory, "now", lambda _: MachineMemory(total, memory // 9, memory // 9))
        monkeypatch.setattr(proposals, "memory_bandwidth", lambda: bandwidth)
        monkeypatch.setattr(proposals, "readable_models", lambda: iter(here))

    return of


def row(name) -> Facts:
    return next(row.facts for row in proposals.table() if name in row.facts.name)


def test_the_table_is_sound():
    """Each row names one GGUF file of a repository, has a licence, and is larger than the row after it."""
    rows = proposals.table()
    assert all(REPO.fullmatch(row.facts.name)["type"] == "Q4_K_M" and row.licence for row in rows)
    sizes = [row.facts.bytes for row in rows]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(rows)
    assert all(4 < row.facts.bits < 8.5 for row in rows) and {"qwen2", "qwen3", "llama"} <= set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("memory", "best"), [(5.3, "Qwen3-4B"), (10.7, "Qwen3-8B"), (21, "24B"), (43, "Qwen3-32B"), (0.5, None)]
)
def test_more_memory_brings_a_larger_model(machine, memory, best):
    """What one model may take on machines with 8, 16, 32 and 64 GB, and where nothing fits."""
    machine(int(memory * GB), bandwidth=400 * GB)
    found = proposals.proposals()
    assert (best in found[0].name) if best else found == []
    assert all(offer.memory_at_8k <= memory * GB and not offer.installed for offer in found)
    assert len(found) <= proposals.MAX_PROPOSALS


def test_what_other_programs_do_changes_no_proposal(machine, monkeypatch):
    """Neither free memory (the fixture has little) nor a slower second measurement, of another process."""
    machine(10.7 * GB, bandwidth=50 * GB)
    first = proposals.proposals()
    assert "Qwen3-8B" in first[0].name
    monkeypatch.setattr(proposals, "memory_bandwidth", lambda: 20 * GB)
    assert proposals.proposals() == first
    monkeypatch.setattr(cpu, "physical_cores", lambda: 77)
    assert proposals.proposals() != first
    (settings.home() / proposals.BANDWIDTH).write_text("[")
    assert proposals.proposals() != first


def test_a_slow_machine_gets_a_fast_model(machine):
    """Of models that fit, those that write pleasantly fast; the fastest, where none does."""
    machine(43 * GB, bandwidth=40 * GB)
    assert "4B" in proposals.proposals()[0].name
    machine(43 * GB, bandwidth=1 * GB)
    (only,) = proposals.proposals()
    assert "0.5B" in only.name and only.tps_expected < proposals.PLEASANT


def test_weights_of_another_program_are_not_fetched_again(machine):
    """The same model under ollama's name, also with other bits, is shown as here and not proposed."""
    own = replace(row("Qwen3-8B"), name="ollama:qwen3:8b", path=Path("/x"), bytes=8 * GB, to_fetch=0)
    machine(11 * GB, here=[own])
    assert [offer.name for offer in proposals.installed_offers()] == ["ollama:qwen3:8b"]
    assert all(offer.installed for offer in proposals.installed_offers())
    assert not any("Qwen3-8B" in offer.name for offer in proposals.proposals())


def test_the_models_here_are_read_once(machine, monkeypatch):
    """Each read takes the header of every model, some 30 ms for one."""
    machine(16 * GB)
    reads, here = [], proposals.readable_models
    monkeypatch.setattr(proposals, "readable_models", lambda: reads.append(1) or here())
    assert len(proposals.table()) > 1 and proposals.proposals() and len(reads) == 1


def test_nothing_is_proposed_beside_a_good_model(machine):
    """A smaller model than one that is here and fits is no better one; beside the starter it is."""
    starter = replace(row("0.5B"), name="starter", parameters=135_000_000, bytes=10**8)
    machine(10 * GB, here=[starter])
    assert "Qwen3-8B" in proposals.best_proposal(starter).name
    machine(11 * GB, here=[starter, replace(row("14B"), name="mine", bytes=5 * GB)])
    assert proposals.best_proposal(starter) is None

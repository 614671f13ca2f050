"""The pattern of an agent: what must be read again, and how soon the first token comes."""

import statistics
from dataclasses import replace

import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.kv.policy import F16, TIERED
from tests.backends.exact_prompts import ExactPrompts

from .agent import Agent


@pytest.mark.parametrize(
    "policy", [TIERED, pytest.param(F16, marks=pytest.mark.full("ruvmlx/kv"))], ids=["tiered", "f16"]
)
def test_only_new_tokens_are_read(starter, policy, tmp_path, full):
    """A small one: 700 tokens, 4 turns, a restart after 2. Greedy replies are those without reuse; with tiers
    the distributions differ by less than what the tiers themselves cost.

    The prompts are exact. The model reads its replies again here, and it wrote them with activations of 16
    bits."""
    agent = Agent(starter, ExactPrompts(starter), policy, tmp_path, 700, 8)
    figures = agent.run(4, alone=4)
    assert figures.prefilled <= 1.05 * figures.new
    assert all(figures.same) and max(figures.kl) < (1e-3 if policy is TIERED else 1e-5)
    assert max(figures.restart_ms) < min(figures.again_ms)


def test_the_bars(starter, tmp_path, full):
    """8,000 tokens, 30 turns: minutes, on a machine that does nothing else."""
    if not full:
        pytest.skip("slow; give --full")
    model = replace(starter, shape=replace(starter.config, max_context=12_288))
    figures = Agent(model, NativeBackend(model), TIERED, tmp_path, 8000, 40).run(30)
    print("\n".join(figures.lines()))
    assert figures.prefilled <= 1.05 * figures.new
    assert statistics.median(figures.first_ms) < 50
    assert 10 * max(figures.restart_ms) < min(figures.again_ms)

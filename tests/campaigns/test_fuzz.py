"""Each target takes its seeds, its committed cases and some random mutants; fuzz.py has the rest."""

import random

import pytest

from .fuzz import CASES, NAMES, is_accepted
from .fuzz_targets import TARGETS

COUNT = {"tokenizer": 6, "template": 15, "http": 60, "schema": 30, "backup": 30}  # of mutants; 100 of others


def test_every_target_has_a_name():
    assert tuple(TARGETS) == NAMES
    assert {folder.name for folder in CASES.glob("*")} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_or_one_line(name, tmp_path, full, request):
    target, rng = TARGETS[name](tmp_path), random.Random(0)
    request.addfinalizer(target.close)
    seeds = [is_accepted(target.run, seed) for seed in target.seeds]
    assert all(seeds) or name in ("schema", "http", "template")
    for case in sorted((CASES / name).glob("*")):
        is_accepted(target.run, case.read_bytes())
    mutants = [rng.choice(target.seeds) for _ in range(COUNT.get(name, 100) * (20 if full else 1))]
    taken = [is_accepted(target.run, target.mutant(seed, rng)) for seed in mutants]
    assert True in taken

"""The hybrid backend: where work runs, that both sides work at the same time, and that a failed side is not
used."""

import threading
from functools import partial

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ruvmlx.backends import select
from ruvmlx.backends.base import KL, QUESTIONS, SAMPLES, Drafting, Streaming, Together, TwoSided, worker
from ruvmlx.backends.hybrid import side as sides
from ruvmlx.backends.hybrid.backend import join_sides
from ruvmlx.backends.hybrid.placement import OPERATIONS, plan_words
from ruvmlx.backends.hybrid.side import Interval, overlap
from ruvmlx.errors import AdapterMismatch, SideFailed, UsageError
from ruvmlx.lora.base_lora import BaseLoRA
from tests.backends.hybrid import Clock, Failing, join, open_side, slow

TEXT = list(range(5, 45))
NAMES = ("native", "mlx")


@pytest.fixture(scope="module")
def pair(tiny):
    """One side of each kind. They keep no state between tests."""
    return {name: open_side(name, tiny) for name in NAMES}


def other_of(name):
    return NAMES[1 - NAMES.index(name)]


def random_lora(config, scale=0.5):
    rng = np.random.default_rng(3)
    shapes = {("q_proj", 1): (config.hidden_size, config.n_heads * config.head_dim)}
    shapes[("lm_head", 0)] = config.hidden_size, config.vocab_size
    shapes[("embed_tokens", 0)] = config.vocab_size, config.hidden_size
    return BaseLoRA(
        {
            place: tuple(rng.standard_normal(s).astype(np.float32) for s in ((n, 2), (2, out)))
            for place, (n, out) in shapes.items()
        },
        scale,
    )


@pytest.mark.parametrize("name", NAMES)
def test_replies_are_the_main_side_s(pair, name):
    """Prefill, decode, a batch, drafts and the head are the main side's, with and without a base LoRA.

    Native computes the same bits each time. A matrix product of MLX on the CPU can add in another order.
    """
    same = (
        np.testing.assert_array_equal if name == "native" else partial(assert_allclose, rtol=1e-4, atol=1e-4)
    )
    main, hybrid = pair[name], join(pair[name], pair[other_of(name)])
    for lora in (None, random_lora(main.config)):
        main.set_lora(lora)
        cache = main.new_cache()
        wanted = [main.prefill(TEXT, cache), main.decode(7, cache), *main.decode_batch([8], [cache])]
        wanted.append(main.head(wanted[0].hidden[None]))
        main.set_lora(None)
        hybrid.set_lora(lora)
        cache = hybrid.new_cache()
        got = [hybrid.prefill(TEXT, cache), hybrid.decode(7, cache), *hybrid.decode_batch([8], [cache])]
        got.append(hybrid.head(got[0].hidden[None]))
        for one, two in zip(wanted[:3], got[:3], strict=True):
            same(one.logits, two.logits)
            same(one.hidden, two.hidden)
        same(wanted[3], got[3])
    hybrid.set_lora(None)


def test_the_optional_parts_are_the_main_sides(pair):
    native, mlx = (join(pair[name], pair[other_of(name)]) for name in NAMES)
    for kind in (Drafting, Together):
        assert isinstance(native, kind) and not isinstance(mlx, kind)
    assert isinstance(mlx, Streaming) and isinstance(mlx, TwoSided)
    assert native.pool is pair["native"].pool and mlx.pool is pair["mlx"].pool
    assert native.nbytes == sum(side.nbytes for side in pair.values())


def test_each_kind_of_work_has_its_own_lora(pair):
    """A question is read without the base LoRA of a reply in progress, also on the main side."""
    hybrid = join(pair["native"], pair["mlx"], are_apart=False, costs=(1.0, 9.0))
    plain = pair["native"].hidden_states(TEXT)
    hybrid.set_lora(random_lora(hybrid.config))
    cache = hybrid.new_cache()
    hybrid.prefill(TEXT, cache)
    changed = hybrid.hidden_states(TEXT)
    np.testing.assert_array_equal(worker(hybrid, QUESTIONS).hidden_states(TEXT), plain)
    np.testing.assert_array_equal(hybrid.hidden_states(TEXT), changed)
    assert not np.array_equal(plain, changed)
    hybrid.set_lora(None)


# Placement ----------------------------------------------------------------------------------------


def reads(hybrid, kind=QUESTIONS, times=12):
    """The side on which each of several readings ran."""
    seen = []
    for _ in range(times):
        worker(hybrid, kind).hidden_states(TEXT)
        seen.append(max((s for s in (hybrid.placement.main, hybrid.placement.other) if s.intervals),
                        key=lambda s: s.intervals[-1].ended).name)  # fmt: skip
    return seen


def test_the_placement_follows_a_side_that_becomes_slow(pair, monkeypatch):
    """Questions run on the side that costs less. When that side becomes slow, they move; the reply stays."""
    clock = Clock()
    monkeypatch.setattr(sides, "perf_counter", clock)
    quick = slow(pair["mlx"], clock, hidden_states=1.0)
    hybrid = join(slow(pair["native"], clock, hidden_states=4.0), quick, are_apart=False, costs=(0.1, 0.025))
    placement = hybrid.placement
    assert set(reads(hybrid)) == {"mlx"}
    quick.backend = slow(pair["mlx"], clock, hidden_states=30.0)
    quick.hidden_states = quick.backend.hidden_states
    seen = reads(hybrid)
    assert seen[0] == "mlx" and set(seen[4:]) == {"native"}
    assert placement.side_of("replies").name == "native"
    assert "questions on native" in plan_words(placement)


def test_noise_moves_nothing(pair):
    hybrid = join(pair["native"], pair["mlx"], are_apart=False, costs=(1.0, 0.95))
    first = hybrid.placement.side_of(KL)
    for cost in (0.9, 1.1, 0.95):
        first.partner.costs.update(read=cost, head=cost)
        assert hybrid.placement.side_of(KL) is first


@pytest.mark.parametrize(
    ("are_apart", "cost", "name"), [(0, 2.0, "native"), (1, 2.0, "mlx"), (1, 9.0, "native")]
)
def test_another_device_may_cost_more(pair, are_apart, cost, name):
    """Work on another device takes no time from a reply; up to eight times the cost is worth it."""
    hybrid = join(pair["native"], pair["mlx"], bool(are_apart), (1.0, cost))
    assert {hybrid.placement.side_of(kind).name for kind in (QUESTIONS, KL, SAMPLES)} == {name}


def test_the_side_that_decodes_sooner_writes_the_replies(pair, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("ruvmlx.backends.hybrid.backend.perf_counter", clock)
    hybrid = join_sides(slow(pair["native"], clock, decode=3.0), slow(pair["mlx"], clock, decode=2.0), False)
    assert hybrid.placement.main.name == "mlx" and hybrid.placement.main.costs["decode"] == 2.0
    assert hybrid.finish()["costs_ms"]["replies"] == {"mlx": 2000.0, "native": 3000.0}


# At the same time -----------------------------------------------------------------------------------


def test_both_sides_work_at_the_same_time(pair):
    """A question is read in the thread beside while the main side decodes: the intervals of the sides
    intersect. On the main side nothing is read beside."""
    reading, decoded = threading.Event(), threading.Event()
    other = Failing(pair["mlx"])
    other.hooks["hidden_states"] = lambda: (reading.set(), decoded.wait(30))
    hybrid = join(pair["native"], other)
    cache = hybrid.new_cache()
    hybrid.prefill(TEXT, cache)
    job = hybrid.start_beside(QUESTIONS, lambda backend, pause: backend.hidden_states(TEXT))
    assert reading.wait(30)
    for token in range(5, 10):
        hybrid.decode(token, cache)
    decoded.set()
    np.testing.assert_array_equal(job.result(), pair["mlx"].hidden_states(TEXT))
    [read] = hybrid.placement.other.intervals
    inside = [i for i in hybrid.placement.main.intervals if read.begun < i.begun and i.ended < read.ended]
    assert len(inside) == 5 and {i.kind for i in inside} == {"replies"} and read.kind == QUESTIONS
    facts = hybrid.finish()
    assert facts["overlap_s"] >= 0 and overlap([read, *inside]) == pytest.approx(
        sum(i.ended - i.begun for i in inside)
    )
    assert (
        join(pair["native"], pair["mlx"], False, (1.0, 9.0)).start_beside(QUESTIONS, lambda b, p: 0) is None
    )


def test_the_overlap_of_intervals():
    a, b = (lambda begun, ended, side=side: Interval(side, "", begun, ended) for side in NAMES)
    assert overlap([a(0, 4), b(1, 2), b(3, 6), a(7, 9)]) == 2
    assert overlap([a(0, 4), a(1, 3)]) == 0 == overlap([])


def test_the_end_stops_the_work_beside(pair):
    """`finish` waits only until the work's next pause."""
    begun = threading.Event()

    def endless(backend, pause):
        begun.set()
        while True:
            pause()

    hybrid = join(pair["native"], pair["mlx"])
    job = hybrid.start_beside(KL, endless)
    assert begun.wait(30)
    assert hybrid.finish()["placement"] == {
        kind: "native" if kind == "replies" else "mlx" for kind in OPERATIONS
    }
    assert job.exception() is not None


# Failures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_work_without_a_cache_runs_again_on_the_other_side(pair, name):
    """The caller of a worker sees no failure. The failed side is not asked again, and is told once."""
    broken = Failing(pair[name], calls=0)
    hybrid = join(pair[other_of(name)], broken)
    wanted = pair[other_of(name)].hidden_states(TEXT)
    np.testing.assert_array_equal(worker(hybrid, QUESTIONS).hidden_states(TEXT), wanted)
    np.testing.assert_array_equal(worker(hybrid, QUESTIONS).hidden_states(TEXT), wanted)
    assert broken.seen == ["hidden_states"]
    [failure] = hybrid.take_failures()
    assert failure.side == name and "RuntimeError: the device is gone" in failure.line
    assert hybrid.take_failures() == [] and hybrid.finish()["failed"] == [name]


def test_a_call_with_a_lost_cache_says_so(pair):
    broken = Failing(pair["mlx"], calls=1)
    hybrid = join(broken, pair["native"])
    cache = hybrid.new_cache()
    hybrid.prefill(TEXT, cache)
    for _ in range(2):
        with pytest.raises(SideFailed, match="mlx failed"):
            hybrid.decode(5, cache)
    assert hybrid.is_lost(cache) and not hybrid.is_lost(hybrid.new_cache())
    assert hybrid.placement.main.name == "native" and isinstance(hybrid, Drafting)
    assert hybrid.pool is pair["native"].pool and broken.seen == ["prefill", "decode"]


def test_the_last_sides_errors_stay_what_they_are(pair):
    hybrid = join(Failing(pair["mlx"], calls=0), Failing(pair["native"], calls=0))
    with pytest.raises(RuntimeError, match="the device is gone"):
        hybrid.hidden_states(TEXT)
    assert hybrid.placement.main.failure is None


class Enough(Exception):
    pass


def enough(*_):
    raise Enough


def test_a_wrong_request_is_no_failure(pair):
    """Neither unknown tokens, nor another model's adapter, nor the caller's own exception."""
    hybrid = join(pair["native"], pair["mlx"])
    for kind in (None, QUESTIONS):
        backend = hybrid if kind is None else worker(hybrid, kind)
        with pytest.raises(UsageError):
            backend.hidden_states([10**6])
        with pytest.raises(AdapterMismatch):
            backend.set_lora(BaseLoRA({("q_proj", 99): (np.ones((3, 1)), np.ones((1, 3)))}))
        with pytest.raises(Enough):
            backend.prefill(TEXT, backend.new_cache(), progress=enough)
        with pytest.raises(Enough):
            backend.hidden_states(TEXT, enough)
        assert backend.lora is None
    assert hybrid.take_failures() == []


# Opening --------------------------------------------------------------------------------------------


def test_it_opens_by_name(tiny):
    choice, backend = select.describe("hybrid", 1), select.open_backend("hybrid", tiny, threads=1)
    assert choice.name == backend.name == "hybrid" and isinstance(backend, TwoSided)
    assert set(choice.kernels.split(" + ")) == set(backend.kernels.split(" + "))
    assert all(set(side.costs) == {"read", "decode", "head"} for side in
               (backend.placement.main, backend.placement.other))  # fmt: skip


def test_a_side_that_fails_at_opening_is_not_used(pair):
    hybrid = join_sides(Failing(pair["mlx"], calls=0), pair["native"], True)
    assert hybrid.placement.living().name == "native" and hybrid.kernels == pair["native"].kernels
    assert [failure.side for failure in hybrid.take_failures()] == ["mlx"]
    assert plan_words(hybrid.placement).startswith("replies on native (native ")

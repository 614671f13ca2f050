"""The KV loop on a tiny model: the cost of policies is measured and stored, and decides the policy of new
caches."""

import threading

import numpy as np
import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.select import open_backend
from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import UsageError
from ruvmlx.kv.policy import F16, TIERED, TierPolicy
from ruvmlx.kv_tuning import tier_choice, tier_measurement
from ruvmlx.kv_tuning.tier_measurement import TIMED, Stopped, TierComparison, long_enough
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.store import Store
from ruvmlx.store.audit import disagreement
from ruvmlx.tiers import EVERYTHING, PAGE
from tests.oracles.divergence import mean_kl

SOON, LATER, NEVER = (TierPolicy("tiered", (64, warm)) for warm in (64, 128, EVERYTHING))
COLD_FROM = LATER.reach
LONG = COLD_FROM + 2 * PAGE + TIMED


@pytest.fixture(scope="session")
def tiny_backend(tiny):
    return NativeBackend(tiny, threads=1)


@pytest.fixture(autouse=True)
def few(monkeypatch, tiny_backend):
    """Candidates whose tiers all occur within 336 tokens, and enough memory."""
    monkeypatch.setattr(tier_choice, "CANDIDATES", (SOON, LATER, NEVER))
    monkeypatch.setattr(tiny_backend.pool, "pressure", lambda: 0.1)


def tokens(n, seed=3) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def long_reply(runtime, i, n=LONG) -> str:
    request = GenerationRequest(
        request_id=f"long-{i}", input_ids=tokens(n - 4, i), max_new_tokens=4, sampling=Sampling(seed=i),
        ignore_eos=True,
    )  # fmt: skip
    for _ in runtime.writer.generate(request):
        pass
    return request.request_id


def review_all(runtime) -> dict:
    report = runtime.tiers.review()
    while runtime.tiers.is_due():
        report = runtime.tiers.review()
    return report


@pytest.fixture
def three(open_tiny):
    """A runtime with three long replies and a short one."""
    with open_tiny(kv_limit=1.0) as runtime:
        for i in range(3):
            long_reply(runtime, i)
        long_reply(runtime, 9, 100)
        yield runtime


def nothing() -> None:
    pass


# -- measuring ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["native", "mlx"])
def test_f16_costs_nothing_and_less_precision_costs_more(tiny, name):
    reading = TierComparison(open_backend(name, tiny, threads=1), tokens(LONG), COLD_FROM)
    costs = [reading.cost(policy, nothing) for policy in (F16, NEVER, LATER, SOON)]
    assert costs[0].kl == [0.0, 0.0]
    means = [np.mean(cost.kl) for cost in costs]
    assert 0 < means[1] < means[2] and means[1] < means[3]
    assert all(cost.us > 0 and cost.us_f16 > 0 for cost in costs)


def test_it_is_what_one_reading_of_everything_gives(tiny_backend):
    """The slow twin: both caches read token by token, from the first to the last; lengths are odd."""
    ids = tokens(LONG + 37)
    got = TierComparison(tiny_backend, ids, COLD_FROM).cost(LATER, nothing).kl
    caches = [tiny_backend.new_cache(policy) for policy in (F16, LATER)]
    p, q = (np.stack([tiny_backend.decode(t, cache).logits for t in ids]) for cache in caches)
    blocks = [slice(at, at + PAGE) for at in (COLD_FROM, COLD_FROM + PAGE)]
    assert got == pytest.approx([mean_kl(p[block], q[block]) for block in blocks], rel=0.05)


@pytest.mark.parametrize("n", [LONG, LONG + 37])
def test_a_comparison_says_how_many_bytes_it_adds(tiny_backend, n):
    """The f16 cache is read once, for the first policy. It counts once."""
    reading, pool = TierComparison(tiny_backend, tokens(n), COLD_FROM), tiny_backend.pool
    needs = []
    for policy in (NEVER, SOON, LATER):
        before, peak = pool.nbytes, [0]
        needs.append(reading.new_bytes(policy, pool.sizes))
        reading.cost(policy, lambda peak=peak: peak.append(pool.nbytes))
        assert max(peak) - before <= needs[-1]
    assert needs[1] < needs[0] and needs[2] < needs[0]


def test_policies_are_measured_where_one_policy_and_f16_have_room(three, monkeypatch):
    """The budget is that of two caches, and the f16 cache of the first policy serves the others."""
    pool = three.engine.backend.pool
    monkeypatch.setattr(pool, "pressure", lambda: 0.1)
    whole = [policy.bytes(LONG + PAGE, pool.sizes) for policy in (F16, SOON, LATER, NEVER)]
    monkeypatch.setattr(pool, "budget", pool.nbytes + whole[0] + max(whole[1:]))
    report = three.tiers.review()
    assert report["stopped"] == "" and report["measured"] == 2


@pytest.mark.parametrize("policy", [SOON, LATER, NEVER, TIERED])
def test_reach_is_where_the_lowest_tier_begins(policy):
    cold, low = policy.counts(policy.reach)
    before = policy.counts(policy.reach - PAGE)
    assert (low > 0 and before[1] == 0) if policy is NEVER else (cold > 0 and before[0] == 0)
    assert F16.reach == 0 and long_enough((SOON, LATER, NEVER)) == LONG


def test_it_can_be_stopped_between_pieces(tiny_backend, monkeypatch):
    """No call of the backend has more than 2 PIECE tokens, and each is preceded by a look at `cancel`."""
    looks, sizes = [], []
    for name in ("prefill", "verify"):
        real = getattr(tiny_backend, name)
        monkeypatch.setattr(
            tiny_backend, name, lambda ids, cache, real=real: (sizes.append(len(ids)), real(ids, cache))[1]
        )
    TierComparison(tiny_backend, tokens(LONG), COLD_FROM).cost(LATER, lambda: looks.append(1))
    assert max(sizes) <= 2 * tier_measurement.PIECE and len(looks) >= len(sizes)


# -- reviewing ---------------------------------------------------------------------------------------


def test_without_long_replies_the_default_stays(open_tiny):
    with open_tiny() as runtime:
        long_reply(runtime, 0, LONG - 1)
        assert not runtime.tiers.is_due()
        report = runtime.tiers.review()
        assert not report["changed"] and "not enough long replies" in report["reason"]
        status = runtime.tiers.status()
        assert (status.policy, status.long_replies, status.needed_tokens) == (TIERED, 0, LONG)
        assert "the default; 0 of the 3 long replies that a choice needs have been measured" in status.reason
        assert runtime.engine.sessions.policy == TIERED and not runtime.store.witness.rows("kv_choice")


def test_two_are_not_enough_three_are(three):
    assert three.tiers.is_due()
    report = three.tiers.review()  # two at a time
    assert (report["measured"], report["changed"], report["candidates"]) == (2, False, [])
    report = three.tiers.review()
    assert (report["measured"], report["changed"]) == (1, True) and not three.tiers.is_due()
    assert [(c["replies"], c["tokens"]) for c in report["candidates"]] == [(3, 6 * PAGE)] * 3
    chosen = three.engine.sessions.policy
    assert chosen.lengths_by_name() == {name: report[name] for name in ("hot", "warm")} and chosen in (
        SOON,
        LATER,
        NEVER,
    )
    assert three.tiers.status().reason == report["reason"]
    assert not three.tiers.review()["changed"]


def test_idle_time_measures_only_if_asked_and_only_until_it_is_enough(three, open_tiny):
    assert three.tiers.is_due() and not three.tiers.due_when_idle()
    with open_tiny(kv_limit=1.0, kv_measure=True) as asking:
        rounds = 0
        while asking.tiers.due_when_idle():
            rounds += bool(asking.tiers.review()["measured"])
        assert rounds == 2
        long_reply(asking, 7)
        assert asking.tiers.is_due() and not asking.tiers.due_when_idle()


def test_the_choice_survives_a_restart_and_is_used(three, open_tiny):
    review_all(three)
    chosen = three.engine.sessions.policy
    with open_tiny() as again:
        assert again.engine.sessions.policy == chosen == again.tiers.status().policy
        assert again.engine.sessions.get_or_create(None).cache.policy == chosen
        assert not again.tiers.is_due()  # what was measured is known, too


def test_other_candidates_leave_the_choice_until_they_are_known(three, open_tiny, monkeypatch):
    report = review_all(three)
    monkeypatch.setattr(tier_choice, "CANDIDATES", (SOON, LATER, TierPolicy("tiered", (128, EVERYTHING))))
    with open_tiny(kv_limit=1e-9) as runtime:
        half = runtime.tiers.review()
        assert (half["measured"], half["changed"], half["reason"]) == (2, False, report["reason"])
        assert review_all(runtime)["changed"] and runtime.tiers.status().policy.lengths[0] == 128


def test_a_limit_that_nothing_keeps_takes_the_least_kl(three, open_tiny):
    with open_tiny(kv_limit=1e-9) as strict:
        report = review_all(strict)
        assert strict.engine.sessions.policy == NEVER and "none is under it" in report["reason"]


def test_memory_pressure_takes_the_smallest_and_lets_go_late(three, tiny_backend, monkeypatch):
    """Over 0.9 it is short, under 0.8 there is room again; measuring stops over 0.8."""
    review_all(three)
    for level, pressed in ((0.85, False), (0.95, True), (0.85, True), (0.5, False)):
        monkeypatch.setattr(tiny_backend.pool, "pressure", lambda level=level: level)
        report = three.tiers.review()
        assert report["pressed"] == pressed
        assert ("memory is short" in report["reason"]) == pressed
        assert not pressed or three.engine.sessions.policy == SOON
    monkeypatch.setattr(tiny_backend.pool, "pressure", lambda: 0.85)
    long_reply(three, 4)
    report = three.tiers.review()
    assert report["measured"] == 0 and "no room" in report["stopped"] and three.tiers.is_due()


def mine(runtime) -> tuple[str, str]:
    """What measurements are kept for: a model on a backend."""
    return runtime.model.fingerprint, runtime.backend.name


def test_a_budget_without_room_for_two_caches_measures_nothing(three, tiny_backend, monkeypatch):
    monkeypatch.setattr(tiny_backend.pool, "budget", 2 * tiny_backend.pool.sizes[2])
    assert "no room" in three.tiers.review()["stopped"]
    assert tiny_backend.pool.level == 0 and not three.store.kv.measurements(*mine(three))


def test_pressure_in_the_middle_is_not_measured(three, tiny_backend, monkeypatch):
    """The pool tightens its caches: what would be measured is another policy. The level goes back."""
    values = iter([0.1] * 4)
    monkeypatch.setattr(tiny_backend.pool, "pressure", lambda: next(values, 0.95))
    assert "memory is short" in three.tiers.review()["stopped"]
    assert tiny_backend.pool.level == 0 and not three.store.kv.measurements(*mine(three))


class CancelAfter(threading.Event):
    """An event that is set after n queries."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_stopped_in_the_middle_it_keeps_whole_pairs(three, tiny_backend):
    """At every stop the store is sound; what was done is not done again; the end is the same."""
    store, kept_for = three.store, mine(three)
    done, stops = 0, 0
    while three.tiers.is_due():
        report = three.tiers.review(CancelAfter(97))
        stops += bool(report["stopped"])
        rows = store.kv.measurements(*kept_for)
        assert len(rows) >= done and len({(r.reply_id, r.lengths) for r in rows}) == len(rows)
        assert store.integrity() == "ok" and disagreement(store) == "" and tiny_backend.lora is None
        done = len(rows)
        assert (store.kv.choice(*kept_for) is None) == (done < 9)  # half of the candidates are no choice
    assert stops > 2 and done == 9
    whole = TierComparison(tiny_backend, store.replies.tokens("long-1"), COLD_FROM).cost(LATER, nothing)
    wanted = "long-1", LATER.lengths
    kept = next(r for r in store.kv.measurements(*kept_for) if (r.reply_id, r.lengths) == wanted)
    assert (kept.blocks, kept.total) == (len(whole.kl), pytest.approx(sum(whole.kl)))


def test_a_stop_comes_through(tiny_backend):
    def stop() -> None:
        raise Stopped

    used = tiny_backend.pool.nbytes
    with pytest.raises(Stopped):
        TierComparison(tiny_backend, tokens(LONG), COLD_FROM).cost(LATER, stop)
    assert tiny_backend.pool.nbytes == used


# -- what overrules it, and what does not ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "policy"),
    [
        ({"kv": "f16"}, F16),
        ({"kv": "tiered"}, TIERED),
        ({"kv_tiers": "128,192"}, TierPolicy("tiered", (128, 192))),
        ({"kv": "tiered", "kv_tiers": "128,all"}, TierPolicy("tiered", (128, EVERYTHING))),
        ({"kv": "f16", "kv_tiers": "128,192"}, F16),
        ({"kv": "auto"}, None),
    ],
)
def test_what_the_user_asks_for_wins(three, open_tiny, options, policy):
    review_all(three)
    with open_tiny(**options, kv_limit=1.0) as runtime:
        want = policy or three.engine.sessions.policy
        assert runtime.engine.sessions.policy == want
        runtime.tiers.review()
        status = runtime.tiers.status()
        assert runtime.engine.sessions.policy == want == status.policy
        assert status.asked == (policy is not None) == (status.reason == "you asked for it")


@pytest.mark.parametrize("tiers", ["64", "64,32", "65,128", "a,b", "64,128,192", "0,64"])
def test_tiers_that_are_none(open_tiny, tiers):
    with pytest.raises(UsageError, match="kv_tiers"):
        open_tiny(kv_tiers=tiers)


def test_ratings_do_not_change_it(three):
    """Neither what is chosen nor what is measured: bit for bit as without them."""
    review_all(three)
    before = three.tiers.review()
    for i in range(3):
        three.rate(f"long-{i}", "down")
    after = three.tiers.review()
    assert {**after, "seconds": 0} == {**before, "seconds": 0}


def test_a_base_has_no_part_in_it(three, tiny, tiny_backend):
    """Measured under a base and micro it is what the untouched model gives, and the base is back after it."""
    shape, rng = (
        (tiny.config.hidden_size, tiny.config.n_heads * tiny.config.head_dim),
        np.random.default_rng(1),
    )
    pair = rng.normal(0, 0.2, (shape[0], 2)), rng.normal(0, 0.2, (2, shape[1]))
    base = BaseLoRA({("q_proj", 0): tuple(x.astype(np.float32) for x in pair)}, 2.0)
    plain = TierComparison(tiny_backend, three.store.replies.tokens("long-2"), COLD_FROM).cost(LATER, nothing)
    tiny_backend.set_lora(base)
    try:
        three.tiers.review()
        assert tiny_backend.lora is base
    finally:
        tiny_backend.set_lora(None)
    kept = three.store.kv.measurements(*mine(three))
    found = next(r for r in kept if (r.reply_id, r.lengths) == ("long-2", LATER.lengths))
    assert found.total == pytest.approx(sum(plain.kl))


# -- what is kept ------------------------------------------------------------------------------------


def test_every_reply_is_observed(three):
    seen = three.store.kv.observations(*mine(three), 9)
    assert [s.reply_id for s in seen] == ["long-9", "long-2", "long-1", "long-0"]
    assert (seen[1].lengths, seen[1].pressure, seen[1].level) == (TIERED.lengths, 0.1, 0)
    assert seen[1].tokens == LONG - 1  # the last one drawn was never read
    cold, warm, hot = seen[1].tier_bytes
    assert seen[1].us_per_token > 0 and hot > 0 < warm and cold == 0


def test_a_chat_keeps_the_policy_it_began_with(three):
    chat, given = three.chats.new_chat(), {"sampling": Sampling(0.0), "max_new_tokens": 2}
    list(three.chats.say(chat, "one", **given, cancel=threading.Event()))
    review_all(three)
    list(three.chats.say(chat, "two", **given, cancel=threading.Event()))
    long_reply(three, 7, 90)
    new, old, first, *_ = three.store.kv.observations(*mine(three), 9)
    assert old.lengths == first.lengths == TIERED.lengths
    assert new.lengths == three.engine.sessions.policy.lengths


def test_every_change_is_witnessed(three, open_tiny, home, monkeypatch):
    """The choice with its reason, and that a reply had another policy than the one before. Times are equal,
    so that the first choice is the smallest whatever the machine does, and never the second one."""
    monkeypatch.setattr(tier_measurement, "_token_times", lambda *_: [1.0, 1.0])
    report = review_all(three)
    assert report["warm"] == SOON.lengths[1]
    (row,) = three.store.witness.rows("kv_choice")
    assert (row.body["before"], row.body["hot"]) == (None, report["hot"])
    assert row.body["reason"] == report["reason"]
    with open_tiny(kv="f16") as runtime:
        long_reply(runtime, 5, 50)
    with open_tiny(kv_limit=1e-9) as strict:
        strict.tiers.review()
    store = Store(home / "ruvmlx.db")
    assert [r.body["warm"] for r in store.witness.rows("kv_choice")] == [report["warm"], EVERYTHING]
    (used,) = store.witness.rows("kv_used")
    assert (used.body["hot"], used.body["before"]) == (EVERYTHING, list(TIERED.lengths))
    assert store.witness.check().broken is None and disagreement(store) == ""


def test_a_backend_without_tiers_says_so(tiny, tiny_neutral, tiny_whitening, open_tiny, monkeypatch):
    from ruvmlx.backends.reference import ReferenceBackend

    with open_tiny() as runtime:
        history = tier_measurement.TierHistory(runtime.store, tiny, "reference")
        loop = tier_measurement.KVLoop(history, tiny, ReferenceBackend(tiny))
        assert not loop.is_due() and loop.review()["reason"] == tier_measurement.NO_TIERS
        assert loop.history.status().policy == F16

"""The router in the runtime: off by default, learns from ratings, undone exactly, never lost."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.sona.adapter_history import AdapterHistory
from ruvmlx.sona.optional import router as router_module
from ruvmlx.sona.optional.router import ARMS, INPUTS, TURNS, Route, Router, turns_of
from ruvmlx.sona.signal import Pace
from ruvmlx.store import ReplyRow, Store
from ruvmlx.store.audit import disagreement

MODEL = "f" * 16


def reply(runtime, text="hello there", seed=1, n=9):
    request = GenerationRequest(
        messages=[Message("user", text)], max_new_tokens=n, sampling=Sampling(seed=seed), ignore_eos=True
    )
    chunks = list(runtime.writer.generate(request))
    runtime.learning.settle()
    return chunks[-1].response


def router_state(router) -> bytes:
    """The router's whole state, as bytes."""
    router.sync()
    return b"".join(a.precision.tobytes() + a.moment.tobytes() + bytes([a.count]) for a in router._arms)


def force_arm(monkeypatch, arm):
    """Make every choice this arm."""
    monkeypatch.setattr(
        router_module.bandit, "choose", lambda beliefs, *_: (arm, np.full(len(beliefs), 1 / len(beliefs)))
    )


# -- in the runtime ----------------------------------------------------------------------------------------


def test_off_by_default_and_then_nothing_is_other_than_without_it(open_tiny):
    """Off: no choice is stored. On: a reply with the default arm has the very same tokens."""
    with open_tiny() as runtime:
        runtime.rate(reply(runtime).request_id, "up")
        plain = reply(runtime, "and this", seed=5)
        assert plain.route is None
        assert runtime.store.db.rows("SELECT * FROM routes") == []
        assert runtime.store.witness.rows("route") == []
    with open_tiny(router=True) as runtime:
        routed = [reply(runtime, "and this", seed=5) for _ in range(2)]
    assert routed[0].route.arm == routed[1].route.arm  # same seed
    for r in routed:
        assert (r.token_ids == plain.token_ids) == (r.route.arm == "adapter")


def test_nothing_is_chosen_before_anything_was_learned(open_tiny):
    with open_tiny(router=True) as runtime:
        first = reply(runtime)
        assert first.route is None
        runtime.rate(first.request_id, "up")
        assert reply(runtime).route.arm in ("adapter", "plain")
        runtime.rollback(0)
        assert reply(runtime).route is None


def test_a_choice_is_stored_with_its_reply_and_witnessed(open_tiny):
    with open_tiny(router=True) as runtime:
        runtime.rate(reply(runtime).request_id, "up")
        made = reply(runtime, "how is tea made?")
        (row,) = runtime.store.witness.rows("route")
        body = row.body
        assert body["reply"] == made.request_id and body["arm"] == made.route.arm
        assert body["probability"] == made.route.probability == body["best"][made.route.arm]
        assert sum(body["best"].values()) == pytest.approx(1) and made.route.turns.shape == (1, INPUTS)
        assert disagreement(runtime.store) == ""
        runtime.store.db.execute("UPDATE routes SET probability = 0.123")
        assert made.request_id in disagreement(runtime.store)


def test_a_reply_of_the_untouched_model_is_just_that_and_can_be_rated(open_tiny, monkeypatch):
    with open_tiny() as runtime:
        untouched = reply(runtime, "and this", seed=5).token_ids
        for i in range(3):
            runtime.rate(reply(runtime, seed=i).request_id, "down")
    force_arm(monkeypatch, 1)
    with open_tiny(router=True) as runtime:
        made = reply(runtime, "and this", seed=5)
        assert made.route.arm == "plain" and made.token_ids == untouched
        row = runtime.store.replies.get("last")
        assert row.adapter_version == 0 and row.adapter == "default"
        up = runtime.rate(made.request_id, "up")
        assert up.logprob_after > up.logprob_before
        runtime.undo()
    with open_tiny(router=True) as runtime:  # by its stored trace
        again = runtime.rate(made.request_id, "up")
        assert again.logprob_after == pytest.approx(up.logprob_after, abs=1e-5)
        runtime.undo()
        runtime.learner.traces.held.clear()
        runtime.store.db.execute("DELETE FROM traces")
        replayed = runtime.rate(made.request_id, "up")
        assert replayed.logprob_after == pytest.approx(up.logprob_after, abs=1e-4)


def test_a_changed_rating_takes_the_old_one_back_exactly(open_tiny, monkeypatch):
    force_arm(monkeypatch, 1)
    monkeypatch.setattr(Pace, "ratio", lambda *_: 1.0)  # replies so short are fast and slow by chance
    with open_tiny(router=True) as runtime:
        runtime.rate(reply(runtime).request_id, "up")
        router = runtime.learning._routing.of(runtime.learner)
        nothing = router_state(router)
        made = reply(runtime, "one", seed=2).request_id
        assert router_state(router) == nothing  # not rated yet
        runtime.rate(made, "down")
        down = router_state(router)
        runtime.rate(made, "up")
        up = router_state(router)
        assert len({nothing, down, up}) == 3
        runtime.rate(made, "down")
        assert router_state(router) == down
        runtime.undo()
        assert router_state(router) == up
        for _ in range(2):
            runtime.undo()
        assert router_state(router) == nothing


def test_wrong_facts_teach_the_router_nothing(open_tiny):
    """The bad rating changed the router. When the user adds the reason, the program undoes this change."""
    with open_tiny(router=True) as runtime:
        for i in range(3):
            runtime.rate(reply(runtime, seed=i).request_id, "up")
        router = runtime.learning._routing.of(runtime.learner)
        before, last = router_state(router), reply(runtime, seed=9).request_id
        runtime.rate(last, "down")
        assert router_state(router) != before
        runtime.choices.give_reason(last, "facts")
        assert router_state(router) == before and runtime.status().ratings == 4


def test_ten_restarts_lose_nothing(open_tiny):
    expected = None
    for i in range(10):
        with open_tiny(router=True) as runtime:
            router = runtime.learning._routing.of(runtime.learner)
            assert expected is None or router_state(router) == expected
            runtime.rate(reply(runtime, f"number {i}", seed=i).request_id, "up" if i % 3 else "2")
            expected = router_state(router)
            status = router.status()
            assert sum(a.rated for a in status.arms) == sum(a.chosen for a in status.arms) == i


def test_a_deleted_chat_takes_its_choices_along(open_tiny):
    with open_tiny(router=True) as runtime:
        runtime.rate(reply(runtime).request_id, "up")
        router = runtime.learning._routing.of(runtime.learner)
        chat, nothing = runtime.chats.new_chat(), router_state(router)
        for text in ("one", "two"):
            given = {"sampling": Sampling(seed=1), "max_new_tokens": 4, "cancel": threading.Event()}
            chunks = list(runtime.chats.say(chat, text, **given))  # seeded: an empty reply would be left out
            runtime.learning.settle()
        made = chunks[-1].response
        assert made.route.turns.shape == (3, INPUTS) and np.abs(made.route.turns[0, :4]).max() > 0
        runtime.rate(made.request_id, "up")
        assert router_state(router) != nothing
        runtime.store.chats.delete(chat)
        assert router_state(router) == nothing and runtime.store.db.rows("SELECT * FROM routes") == []
        assert disagreement(runtime.store) == ""


def test_examples_are_an_arm_only_where_they_are_allowed_and_found(open_tiny, monkeypatch):
    with open_tiny(router=True, examples=1) as runtime:
        liked = reply(runtime, "how is tea made?").request_id
        runtime.rate(liked, "up")
        text = "UPDATE replies SET text = 'with water', finish_reason = 'stop'"
        runtime.store.db.execute(text)
        force_arm(monkeypatch, 0)
        made = reply(runtime, "how is tea made by you?")
        assert made.route.arm == "adapter+examples" and made.examples == (liked,)
        assert made.route.probability == 0.25
        force_arm(monkeypatch, 2)
        made = reply(runtime, "how is tea made by them?")
        assert made.route.arm == "adapter" and made.examples == ()
        force_arm(monkeypatch, 1)
        none = reply(runtime, "how is tea made?")  # the very question: no example is found
        assert none.route.arm == "plain" and none.examples == ()
        assert none.route.best == {"adapter": 0.5, "plain": 0.5} and none.route.probability == 0.5


# -- alone -------------------------------------------------------------------------------------------------


def test_the_newest_turns_are_read_and_no_others():
    said = [Message("system", "be kind")]
    for i in range(9):
        said += [Message("user", f"question {i}"), Message("assistant", "words " * i)]
    said.append(Message("user", "the last"))
    asked = []

    def vector(text):
        asked.append(text)
        return np.eye(600, dtype=np.float32)[3] if text == "the last" else None

    turns = turns_of(said, vector)
    assert turns.shape == (TURNS, INPUTS) and asked[-1] == "the last" and "question 0" not in asked
    assert np.linalg.norm(turns[-1, :-2]) == pytest.approx(4) and not turns[:-1, :-2].any()
    assert turns[:, -2].tolist() == [-1, 1] * (TURNS // 2) and np.isfinite(turns).all()
    assert turns_of([], vector).shape == (0, INPUTS)


@pytest.fixture
def store_and_router(home):
    """A store with an adapter of one version, and its router."""
    store = Store(home / "ruvmlx.db")
    history = AdapterHistory(store, MODEL)
    yield store, history, Router(store, history, MODEL)
    store.close()


def add(store, history, route: Route, rating: str, latency_ratio=1.0) -> str:
    """Store a reply made by a choice, and its rating."""
    reply_id = f"r{store.db.value('SELECT count(*) FROM replies'):05d}"
    row = ReplyRow(reply_id, "m", MODEL, history.name, 0, [1], [2], "q", "t", "stop", None, None,
                   latency_ratio=latency_ratio)  # fmt: skip
    store.replies.add(row, None, route=route.row(reply_id, MODEL, history.name))
    history.commit(history.version(), [(reply_id, rating, "", 0.0)], b"", 0.0, 0.0)
    return reply_id


def question(rng, kind: int) -> np.ndarray:
    """A conversation of one turn about one of two topics."""
    turns = np.zeros((1, INPUTS), np.float32)
    topic = np.random.default_rng(100 + kind).standard_normal(INPUTS - 2)
    noisy = topic / np.linalg.norm(topic) + 0.1 * rng.standard_normal(INPUTS - 2)
    turns[0, :-2] = 4 * noisy / np.linalg.norm(noisy)
    turns[0, -2] = 1
    return turns


def regret_per_reply(router, store, history, rng, n, uniform=False) -> float:
    """Regret per reply, for a user who wants the adapter for one topic and the original model for another."""
    total = 0.0
    for _ in range(n):
        kind = int(rng.integers(2))
        route = router.choose(question(rng, kind), int(rng.integers(1 << 30)))
        if uniform:
            arm = ("adapter", "plain")[int(rng.integers(2))]
            route = Route(arm, 0.5, route.turns, {"adapter": 0.5, "plain": 0.5})
        right = route.adapter == (kind == 0)
        total += 0.0 if right else 0.6
        add(store, history, route, "up" if rng.random() < (0.8 if right else 0.2) else "down")
    return total / n


def test_a_simulated_users_regret_is_less_than_by_chance(home):
    """160 ratings, three users, through the store: a uniform choice loses 0.3 a reply."""
    found = []
    for seed in range(3):
        regrets = []
        for uniform in (False, True):
            store = Store(home / f"{seed}{uniform}.db")
            history = AdapterHistory(store, MODEL)
            router = Router(store, history, MODEL)
            regrets.append(
                regret_per_reply(router, store, history, np.random.default_rng(seed), 160, uniform)
            )
            store.close()
        found.append(regrets)
    mean = np.mean(found, axis=0)
    assert mean[1] == pytest.approx(0.3, abs=0.04) and mean[0] < 0.7 * mean[1]


def test_the_probability_is_how_often_it_is_chosen(store_and_router):
    store, history, router = store_and_router
    rng = np.random.default_rng(8)
    turns = question(rng, 0)
    for rating in ("up", "down", "up"):
        add(store, history, router.choose(turns, 1), rating)
    routes = [router.choose(turns, seed) for seed in range(600)]
    often = np.mean([route.arm == "plain" for route in routes])
    assert (
        often == pytest.approx(np.mean([r.best["plain"] for r in routes]), abs=0.06) and 0.02 < often < 0.98
    )
    assert all(route.probability == route.best[route.arm] for route in routes)


def test_the_faster_of_two_equally_liked_arms_wins(store_and_router):
    """As well liked, but twice as slow as usual: the other arm becomes the better one."""
    store, history, router = store_and_router
    rng = np.random.default_rng(3)
    for i in range(40):
        arm = ("adapter", "plain")[i % 2]
        route = Route(arm, 0.5, question(rng, i % 3 % 2), {"adapter": 0.5, "plain": 0.5})
        add(store, history, route, "up", latency_ratio=1.9 if arm == "adapter" else 1.0)
    status = {arm.arm: arm for arm in router.status().arms}
    assert status["adapter"].mean_reward == pytest.approx(0.1) and status["plain"].mean_reward == 1
    assert status["plain"].best > 0.95 and status["plain"].rated == status["plain"].chosen == 20


def test_choices_that_are_not_understood_are_left_out(store_and_router):
    store, history, router = store_and_router
    rng = np.random.default_rng(4)
    best = {"adapter": 1.0}
    add(store, history, Route("adapter", 1.0, question(rng, 0), best), "up")
    sound = router_state(router)
    add(store, history, Route("rot13", 1.0, question(rng, 0), best), "up")
    add(store, history, Route("adapter", 1.0, question(rng, 0) * np.float32(np.nan), best), "up")
    add(store, history, Route("adapter", 1.0, np.ones((2, 3), np.float32), best), "up")
    assert router_state(router) == sound


def test_only_the_newest_ratings_count(store_and_router, monkeypatch):
    store, history, router = store_and_router
    rng = np.random.default_rng(5)
    monkeypatch.setattr(router_module, "WINDOW", 5)
    for i in range(9):
        add(store, history, Route("plain", 1.0, question(rng, i % 2), {"plain": 1.0}), "up")
    router.sync()
    assert sum(arm.count for arm in router._arms) == 5


def trained_on(store, history, rng, n, liked) -> None:
    """The right arm depends on whether the topic is the previous turn's, which only a recurrent state
    knows."""
    for _ in range(n):
        kinds = rng.integers(2, size=2)
        turns = np.concatenate([question(rng, int(k)) for k in kinds])
        arm = int(rng.integers(2))
        route = Route(ARMS[arm], 0.5, turns, {"adapter": 0.5, "plain": 0.5})
        add(store, history, route, "up" if liked(rng, arm, kinds) else "down")


def test_training_is_adopted_only_where_it_foretells_better(store_and_router):
    store, history, router = store_and_router
    rng = np.random.default_rng(6)
    assert router.train()["reason"] == "0 rated choices; training needs 64"
    trained_on(store, history, rng, 100, lambda rng, arm, kinds: rng.random() < 0.5)
    before = router_state(router)
    report = router.train()
    assert not report["trained"] and report["ratings"] == 100 and router_state(router) == before
    assert router.status().training == report
    (row,) = store.witness.rows("router")
    assert row.body["state"] is None and disagreement(store) == ""
    cancel = threading.Event()
    cancel.set()
    assert router.train(cancel)["reason"] == "stopped"


@pytest.mark.parametrize("held_out", [0, 1, 63, 64])
def test_a_training_without_a_comparison_is_refused(store_and_router, monkeypatch, held_out):
    """NumPy warned of a mean of nothing, and the report had a NaN."""
    store, history, router = store_and_router
    trained_on(store, history, np.random.default_rng(6), 64, lambda rng, arm, kinds: rng.random() < 0.5)
    hashes = iter([3] * held_out + [0] * (64 - held_out))
    monkeypatch.setattr(router_module, "zlib", SimpleNamespace(crc32=lambda _: next(hashes)))
    report = router.train()
    assert not report["trained"] and report["reason"].startswith(
        f"{held_out} of 64 rated choices are held out;"
    )


def test_a_trained_cell_survives_a_restart(store_and_router):
    store, history, router = store_and_router
    rng = np.random.default_rng(7)
    trained_on(store, history, rng, 300, lambda rng, arm, kinds: (kinds[0] == kinds[1]) == arm)
    report = router.train()
    assert report["trained"] and report["error_after"] < report["error_before"]
    after = router_state(router)
    assert router_state(Router(store, history, MODEL)) == after and disagreement(store) == ""
    store.db.execute("UPDATE router_cells SET state = x'00'")
    assert router_state(router) != after  # damaged: the cell as it was drawn
    assert "router" in disagreement(store)

"""The bank against plain recomputation: lookups, values of questions, forgetting."""

import random
import threading

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.models.config.model import Message
from ruvmlx.sona import rating_index, reasoning_bank, signal
from ruvmlx.sona.reasoning_bank import ALIKE, NEIGHBOURS, PRIOR, SCAN, ReasoningBank

from ..oracles.objective import reward_ref
from ..test_runtime import say
from .feedback import chat_with_reply


def unit(x) -> np.ndarray:
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def questions(n, width, seed=0, topics=200) -> np.ndarray:
    return with_topics(n, width, seed, topics)[0]


def with_topics(n, width, seed=0, topics=200) -> tuple[np.ndarray, np.ndarray]:
    """Vectors distributed like questions (topics, some frequent, with a few intents each, and noise), and the
    topics."""
    rng = np.random.default_rng(seed)
    world = np.random.default_rng(99)
    topic, intent = (
        unit(world.normal(size=(count, width)).astype(np.float32)) for count in (topics, 15 * topics)
    )
    share = 1 / (np.arange(topics) + 5.0)
    at = rng.choice(topics, n, p=share / share.sum())
    words = unit(rng.normal(size=(n, width)))
    return unit(0.5 * topic[at] + 0.5 * intent[15 * at + rng.integers(0, 15, n)] + 0.7 * words), at


def value_ref(query, past, without=None) -> float:
    """V(x) computed from every rating. past: reply id -> (label, vector or None)."""
    past = {reply_id: entry for reply_id, entry in past.items() if reply_id != without}
    given = [label for label, _ in past.values() if label in signal.RATINGS]

    def worth(label):
        return signal.IMPLICIT[label] if label in signal.IMPLICIT else (reward_ref(label, given), 1.0)

    pushes = [worth(label) for label, _ in past.values()]
    overall = sum(r * w for r, w in pushes) / (sum(w for _, w in pushes) + PRIOR)
    found = [(float(query @ v), *worth(label)) for label, v in past.values() if v is not None]
    near = sorted(found, reverse=True)[:NEIGHBOURS]
    a = [w * min(1.0, max(0.0, s / ALIKE)) ** 2 for s, _, w in near]
    total = sum(x * r for x, (_, r, _) in zip(a, near, strict=True))
    return (total + PRIOR * overall) / (sum(a) + PRIOR)


@pytest.mark.parametrize("n,width", [(1, 7), (3, 64), (37, 33), (301, 130), (SCAN, 17)])
def test_small_banks_find_exactly_what_is_nearest(n, width):
    vectors, bank = questions(n, width), ReasoningBank(width)
    for i, v in enumerate(vectors):
        bank.put(f"r{i}", "up", v)
        if i % 40 == 13:
            bank.tend()
    for query in questions(9, width, seed=1):
        found = bank.lookup(query, 5)
        similarity = np.sort(vectors @ query)[::-1][:5]
        np.testing.assert_allclose(found.similarity, similarity, atol=1e-5)
        got = [vectors[int(bank._ids[row][1:])] @ query for row in found.rows]
        np.testing.assert_allclose(got, similarity, atol=1e-5)


def test_nothing_is_found_in_an_empty_bank():
    bank = ReasoningBank(5)
    query = unit(np.ones(5))
    assert len(bank.lookup(query).rows) == 0 and bank.liked_replies(query) == [] and bank.patterns() == []
    assert bank.value(query) == 0 and bank.value(None) == 0 and not bank.tend()


@pytest.fixture(scope="module")
def full_bank():
    """10,000 entries, their vectors and labels. This user likes every second topic."""
    (vectors, topics), bank = with_topics(10_000, 192), ReasoningBank(192)
    labels = np.where(topics % 2, "up", "down").tolist()
    for i, v in enumerate(vectors):
        bank.put(f"r{i}", labels[i], v)
        if i in (20, 2000, 9950):
            bank.tend()
    return bank, vectors, labels


def test_of_10000_entries_nearly_all_of_the_nearest_are_found(full_bank):
    """Two levels, a tenth of the entries compared: recall against brute force."""
    bank, vectors, _ = full_bank
    assert len(bank) == 10_000 and 1 < len(bank.patterns()) <= reasoning_bank.CELLS
    recall = {1: [], 8: [], 32: []}
    for query in questions(200, 192, seed=2):
        nearest = np.argsort(-(vectors @ query))
        for k, found in recall.items():
            got = {int(bank._ids[row][1:]) for row in bank.lookup(query, k).rows}
            found.append(len(got & set(nearest[:k].tolist())) / k)
    assert np.mean(recall[1]) > 0.85 and np.mean(recall[8]) > 0.8 and np.mean(recall[32]) > 0.8


def test_a_lookup_compares_a_bounded_number_of_entries(full_bank):
    bank, _, _ = full_bank
    for query in questions(20, 192, seed=3):
        rows, similarity = bank._similarities(query)
        assert len(rows) == len(similarity) == len(set(rows.tolist())) <= SCAN + reasoning_bank.TAIL


def test_what_questions_are_worth_is_nearly_the_same_in_two_levels(full_bank):
    bank, vectors, labels = full_bank
    past = {f"r{i}": (labels[i], v) for i, v in enumerate(vectors)}
    queries, topics = with_topics(12, 192, seed=4)
    got, exact = np.array([(bank.value(q), value_ref(q, past)) for q in queries]).T
    assert np.abs(got - exact).mean() < 0.1
    assert np.mean(np.sign(got) == np.where(topics % 2, 1, -1)) > 0.9


def test_random_walks_of_ratings_changes_and_undos():
    """Put, change, remove and tend in any order: the bank answers like the plain list."""
    rng = random.Random(11)
    for width, steps in ((9, 150), (40, 700)):
        vectors, bank, past = questions(steps, width), ReasoningBank(width), {}
        for i in range(steps):
            move = rng.random()
            if move < 0.65 or not past:
                reply_id, vector = f"r{i}", vectors[i] if rng.random() < 0.9 else None
                past[reply_id] = (rng.choice(signal.LABELS), vector)
                bank.put(reply_id, *past[reply_id])
            elif move < 0.8:
                reply_id = rng.choice(list(past))
                past[reply_id] = (rng.choice(signal.LABELS), past[reply_id][1])
                bank.put(reply_id, past[reply_id][0], None)
            elif move < 0.95:
                reply_id = rng.choice(list(past))
                bank.remove(reply_id)
                del past[reply_id]
            else:
                bank.tend()
            if i % 10 == 0:
                query, without = questions(1, width, seed=i)[0], rng.choice([None, *past, "unknown"])
                assert bank.value(query, without) == pytest.approx(value_ref(query, past, without), abs=1e-5)
                assert bank.labels() == {reply_id: label for reply_id, (label, _) in past.items()}
                assert sum(p.size for p in bank.patterns()) == sum(v is not None for _, v in past.values())
        assert len(bank) == len(past)


def test_alike_questions_decide_and_others_only_lean():
    bank = ReasoningBank(3)
    x, y, z = np.eye(3, dtype=np.float32)
    for i in range(40):
        bank.put(f"x{i}", "up", x)
        bank.put(f"y{i}", "down", y)
    assert bank.value(x) > 0.8 and bank.value(y) < -0.8 and abs(bank.value(z)) < 0.01
    assert bank.value(None) == 0


def test_equal_entries_give_equal_patterns():
    def make_bank():
        bank = ReasoningBank(20)
        for i, v in enumerate(questions(150, 20)):
            bank.put(f"r{i}", "up", v)
        bank.tend()
        return bank

    assert make_bank().patterns() == make_bank().patterns() and len(make_bank().patterns()) > 5


def test_cells_with_nearly_the_same_centre_are_one_pattern():
    rng = np.random.default_rng(0)
    a, b = np.eye(30, dtype=np.float32)[:2]
    bank = ReasoningBank(30)
    for i in range(30):
        for name, centre, label in (("a", a, "up"), ("b", b, "down")):
            bank.put(f"{name}{i}", label, unit(centre + 0.05 * rng.normal(size=30)))
    bank.hit("a3")
    bank.hit("a4")
    bank.tend()
    patterns = sorted(bank.patterns(), key=lambda p: p.quality)
    assert [(p.size, p.hits, p.poor) for p in patterns] == [(30, 0, True), (30, 2, False)]
    assert patterns[0].quality == 0 and patterns[1].quality == 1


def test_a_full_bank_prunes_poor_patterns_first_and_then_the_oldest(monkeypatch):
    """What is pruned is not found any more; that it was rated still counts."""
    a, b = np.eye(2, dtype=np.float32)
    bank = ReasoningBank(2)
    for i in range(8):
        bank.put(f"good{i}", "up", a)
        bank.put(f"poor{i}", "down", b)
    bank.tend()
    monkeypatch.setattr(reasoning_bank, "CAPACITY", 12)
    monkeypatch.setattr(reasoning_bank, "TAIL", 1)
    bank.put("new0", "up", a)
    bank.put("new1", "up", b)
    bank.tend()
    assert set(bank._at) == {*(f"good{i}" for i in range(8)), "new0", "new1", "poor6", "poor7"}
    for i in range(20):
        bank.put(f"more{i}", "up", a)
    bank.tend()
    assert set(bank._at) == {f"more{i}" for i in range(8, 20)}
    assert bank.value(None) == pytest.approx((30 - 8) / (38 + PRIOR)) and len(bank) == 38
    bank.remove("poor1")
    assert len(bank) == 37 and bank.counts.sum() == 37


def test_liked_is_what_this_user_means_by_it():
    v = unit(np.ones(4))
    bank = ReasoningBank(4)
    for label in ("up", "down", "5", "4", "3", "2", "1", "copied"):
        bank.put(label, label, v)
    assert set(bank.liked_replies(v)) == {"up", "5", "4"}
    for i in range(30):
        bank.put(f"more{i}", "5", v)
    assert "5" in bank.liked_replies(v, k=40) and "4" not in bank.liked_replies(v, k=40)
    assert bank.liked_replies(-v) == [] and bank.liked_replies(unit(np.array([1, -1, 0, 0]))) == []


# -- with a runtime ------------------------------------------------------------------------------------


def reply(runtime, text="hello there", seed=1, settle=True) -> str:
    request = GenerationRequest(
        messages=[Message("user", text)], max_new_tokens=5, sampling=Sampling(seed=seed), ignore_eos=True
    )
    for _ in runtime.writer.generate(request):
        pass
    if settle:
        runtime.learning.settle()
    return request.request_id


def test_settling_after_many_replies(open_tiny, monkeypatch):
    """Only the newest are prepared, and it can be stopped between two of them. Any can still be rated."""
    monkeypatch.setattr(rating_index, "MAX_PENDING_REPLIES", 4)
    with open_tiny() as runtime:
        ids = [reply(runtime, f"question {i}", settle=False) for i in range(6)]
        stopped = threading.Event()
        stopped.set()
        runtime.learning.settle(stopped)
        known = [runtime.store.replies.query(each) is not None for each in ids]
        assert not any(known)
        runtime.learning.settle()
        known = [runtime.store.replies.query(each) is not None for each in ids]
        assert known == [False, False, True, True, True, True]
        for each in ids[:5]:
            runtime.rate(each, "up")
        assert all(runtime.store.replies.query(each) is not None for each in ids)
        assert runtime.learner.rating_index.status().entries == 5
        assert runtime.store.signals.all(runtime.model.fingerprint, "explicit")  # written before any settling


def plain_past(runtime) -> dict:
    memory = runtime.learner.rating_index
    return {
        r.reply_id: (r.rating, memory.whitening(runtime.store.replies.query(r.reply_id)))
        for r in runtime.learner.history.ratings()
    }


def test_random_walks_through_a_store(open_tiny):
    """Ratings, changes, undos, rollbacks and restarts: the bank has the ratings in force, and no others."""
    rng = random.Random(3)
    with open_tiny() as runtime:
        ids = [
            reply(runtime, text, seed=i) for i, text in enumerate(["tea?", "why is tea hot?", "a boat", "b"])
        ]
    for _ in range(4):
        with open_tiny() as runtime:
            memory = runtime.learner.rating_index
            for _ in range(9):
                move = rng.choice(["rate", "rate", "rate", "undo", "rollback"])
                if move == "rate":
                    runtime.rate(rng.choice(ids), rng.choice(signal.RATINGS))
                elif move == "undo" and runtime.status().adapter_version:
                    runtime.undo()
                else:
                    runtime.rollback(rng.choice([0, *runtime.status().versions]))
                past, asked = plain_past(runtime), rng.choice(ids)
                memory.sync()
                query = memory.whitening(runtime.store.replies.query(asked))
                assert memory.bank.labels() == {i: label for i, (label, _) in past.items()}
                assert memory.bank.value(query, asked) == pytest.approx(
                    value_ref(query, past, asked), abs=1e-5
                )


def test_the_learner_takes_the_value_of_alike_questions(open_tiny):
    """After many likes of one question, one more like of it means less than one of a new kind."""
    with open_tiny() as runtime:
        for i in range(6):
            runtime.rate(reply(runtime, "tea?", seed=i), "up")
        store, memory = runtime.store, runtime.learner.rating_index
        again = store.replies.get(reply(runtime, "tea?", seed=50))
        r, value = memory.reward_and_value(again, "up")
        assert r == 1 and value == pytest.approx(
            value_ref(memory.query(again), plain_past(runtime)), abs=1e-5
        )
        assert value > 0.6 > memory.bank.value(None) - 0.01


def test_what_another_process_rates_is_noticed(open_tiny):
    with open_tiny() as one, open_tiny() as two:
        first = reply(one)
        one.rate(first, "up")
        assert two.learner.rating_index.status().entries == 1
        two.rate(reply(two, seed=2), "down")
        one.rate(first, "2")
        two.learner.rating_index.sync()
        assert (
            one.learner.rating_index.status().entries == 2
            and two.learner.rating_index.bank.labels()[first] == "2"
        )


def test_a_deleted_chat_leaves_the_bank_as_after_a_restart(open_tiny):
    """The bank counts the rating of the deleted reply, but has no vector of its question and no implicit
    feedback. Before, both stayed in the lookups until the program ended."""

    def memory(runtime):
        index = runtime.learner.rating_index
        index.sync()
        query = index.whitening(runtime.store.replies.query(kept))
        return index.bank.labels(), index.bank.is_placed(rated), index.bank.value(query, kept)

    with open_tiny(implicit_feedback=True) as runtime:
        chat, _ = chat_with_reply(runtime, "tea?")
        rated = runtime.chats.turns(chat)[-1].reply_id
        runtime.rate(rated, "up")
        say(runtime, chat, "tea, again?")
        copied, kept = runtime.chats.turns(chat)[-1].reply_id, reply(runtime, "tea?", seed=2)
        runtime.learning.notice(copied, "copied")
        runtime.rate(kept, "down")
        assert memory(runtime)[0] == {rated: "up", copied: "copied", kept: "down"}
        runtime.erase_chat(chat)
        found = memory(runtime)
        assert found[:2] == ({rated: "up", kept: "down"}, False)
        with open_tiny(implicit_feedback=True) as again:
            assert memory(again) == found


def test_a_question_that_was_never_read_or_is_not_finite_only_counts(open_tiny):
    with open_tiny() as runtime:
        good, bad = reply(runtime, "tea?"), reply(runtime, "coffee?", seed=2)
        nan = np.full(runtime.model.config.hidden_size, np.nan, np.float32)
        runtime.store.replies.set_query(bad, nan)
        assert runtime.rate(bad, "up").applied
        runtime.store.db.execute("UPDATE replies SET query = NULL WHERE id = ?", good)
        assert runtime.rate(good, "up").applied  # read now
        assert runtime.store.replies.query(good) is not None
        bank = runtime.learner.rating_index.bank
        assert len(bank) == 2 and bad in bank._unplaced and np.isfinite(bank.value(None))


def test_ratings_without_learning_are_recorded_and_the_weights_stay(open_tiny):
    with open_tiny(learn=False) as runtime:
        before = runtime.learner.micro.to_bytes()
        first = reply(runtime)
        for rating in ("up", "down", "5"):
            result = runtime.rate(first, rating)
            assert not result.applied and result.kl == 0
        runtime.rate(reply(runtime, seed=2), "up")
        assert runtime.learner.micro.to_bytes() == before
        assert runtime.learner.rating_index.status().entries == runtime.status().ratings == 2
        runtime.undo()
        assert runtime.learner.rating_index.status().entries == 1
    with open_tiny() as runtime:
        assert runtime.learner.micro.to_bytes() == before
        assert runtime.rate(first, "up").applied


# -- the deep loop's part ----------------------------------------------------------------------------


def of_three_topics() -> tuple[ReasoningBank, np.ndarray]:
    """Three topics of 30 entries: two are liked and nearly equal, one is not liked."""
    rng, bank = np.random.default_rng(0), ReasoningBank(33)
    axes = np.eye(33)
    middle = np.repeat([axes[0] + axes[3], axes[0] + 1.1 * axes[3], axes[1] - axes[2]], 30, axis=0)
    vectors = unit(middle + rng.normal(0, 0.05, (90, 33)))
    for i, v in enumerate(vectors):
        bank.put(f"r{i}", "down" if i >= 60 else "up", v)
    return bank, vectors


def test_tidying_merges_what_is_alike_and_prunes_what_is_poor():
    bank, vectors = of_three_topics()
    counts, labels = bank.counts.copy(), bank.labels()
    found = bank.tidy()
    assert set(found.entries) == {f"r{i}" for i in range(60, 90)} and set(found.entries.values()) == {"down"}
    assert found.patterns == len(bank.patterns()) == 1 and found.merged > 0 and found.pruned >= 1
    assert all(not p.poor for p in bank.patterns())
    np.testing.assert_array_equal(bank.counts, counts)
    assert bank.labels() == labels and len(bank) == 90  # every rating still counts
    assert {bank._ids[row] for row in bank.lookup(vectors[70], 90).rows} == {f"r{i}" for i in range(60)}
    assert not bank.is_placed("r70") and bank.is_placed("r7")
    again = bank.tidy()
    assert (again.patterns, again.entries) == (1, {})
    bank.put("r70", "up", vectors[70])  # thought better of
    assert bank.is_placed("r70") and bank.liked_replies(vectors[70])[0] == "r70"


def test_tidying_can_be_left_and_has_changed_nothing_then(full_bank):
    bank, calls = full_bank[0], []
    before = (bank.labels(), bank.patterns())

    def stop():
        calls.append(1)
        if len(calls) == 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bank.tidy(stop)
    assert (bank.labels(), bank.patterns()) == before


def test_tidying_nothing_or_all_of_it():
    bank = ReasoningBank(5)
    assert bank.tidy() == reasoning_bank.Tidied(0, 0, 0, {})
    for i in range(4):
        bank.put(f"r{i}", "down", unit(np.eye(5)[i]))
    assert len(bank.tidy().entries) == 4 and bank.patterns() == []
    assert len(bank.lookup(unit(np.ones(5))).rows) == 0 and bank.value(unit(np.ones(5))) < 0
    bank.put("new", "up", unit(np.ones(5)))
    assert bank.liked_replies(unit(np.ones(5))) == ["new"] and not bank.tend()

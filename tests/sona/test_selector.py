"""The model selector: its prior, its rewards, exact undo, and less regret than one model for everything."""

import numpy as np
import pytest

from ruvmlx.models.config.model import Message
from ruvmlx.sona.optional import selector as selector_module
from ruvmlx.sona.optional.selector import (
    INPUTS,
    WAIT,
    ModelSelector,
    SelectorModel,
    is_unsure,
    turns_for,
    with_latency,
)
from ruvmlx.store import RatedModelChoice, ReplyRow, Store

from . import handover_study, selector_study
from .handover_study import Answer, auc, is_right

SMALL, MIDDLE, LARGE = (SelectorModel(f"f{n}", f"m{n}", 10**8 * 4**n, 4096) for n in range(3))


@pytest.fixture
def store(home):
    store = Store(home / "ruvmlx.db")
    yield store
    store.close()


def question(text="Why is the sky blue?"):
    return turns_for([Message("user", text)], lambda _: np.eye(40, dtype=np.float32)[3])


def add(store, selector, choice, rating, ms=10.0, note="") -> str:
    """Store a reply of the chosen model, its choice and its rating."""
    reply_id = f"r{store.db.value('SELECT count(*) FROM replies'):05d}"
    model = choice.model.fingerprint
    row = ReplyRow(reply_id, "m", model, "default", 0, [1], [2], "q", "t", "stop", None)
    store.replies.add(row, None)
    store.model_choices.add(choice.row(reply_id, selector.reader, ms))
    with store.transaction():
        version = store.versions.head(model, "default")
        store.ratings.add(model, "default", version + 1, reply_id, rating, note, 1.0)
    return reply_id


def state(selector) -> bytes:
    selector.sync()
    return b"".join(arm.precision.tobytes() + arm.moment.tobytes() for arm in selector._arms)


def test_without_ratings_the_largest_model_answers_and_the_prior_prefers_it(store):
    selector = ModelSelector(store, [LARGE, SMALL, MIDDLE])
    assert [model.name for model in selector.models] == ["m0", "m1", "m2"] and selector.reader == "f0"
    choices = [selector.choose(question(), seed) for seed in range(20)]
    assert {choice.model for choice in choices} == {LARGE}
    assert "no reply is rated yet" in choices[0].line and choices[0].confidence == choices[0].best["f2"]
    means = [mean for mean, _ in selector.beliefs(question(), selector.arms)]
    assert means == pytest.approx([0.2, 0.4, 0.6])
    assert selector.choose(question(), arms=("f0", "f1")).model == MIDDLE
    assert "no other model" in selector.choose(question(), arms=("f0",)).why


def test_a_turn_has_its_length_and_that_of_the_conversation():
    said = [Message("system", "x" * 500), Message("user", "a" * 109), Message("assistant", "b" * 890)]
    turns = turns_for([*said, Message("user", "c" * 9)], lambda _: None)
    assert turns.shape == (3, INPUTS) and turns.dtype == np.float32
    np.testing.assert_allclose(turns[:, -2], np.log([110, 891, 10]) - 4.7, rtol=1e-5)
    np.testing.assert_allclose(turns[:, -1], np.log([110, 1000, 1009]) - 4.7, rtol=1e-5)
    assert turns_for([], lambda _: None).shape == (0, INPUTS)


def test_the_reward_counts_the_time_against_the_usual_time_of_the_models():
    turns = question()
    rows = [RatedModelChoice(f"r{n}", arm, turns, "up", ms) for n, (arm, ms) in enumerate(
        [("f0", 5.0), ("f2", 20.0), ("f0", 5.0), ("f0", 5.0), ("f2", 80.0), ("f2", 20.0), ("f2", 0.0)]
    )]  # fmt: skip
    ratios = [row.latency_ratio for row in with_latency(rows)]  # usual: 10 ms, whatever was chosen more often
    assert ratios == pytest.approx([1 - WAIT, 1 + WAIT, 1 - WAIT, 1 - WAIT, 1 + 3 * WAIT, 1 + WAIT, 1])
    assert with_latency([]) == []


def test_of_two_models_rated_alike_the_faster_one_wins(store):
    selector = ModelSelector(store, [SMALL, LARGE])
    for n in range(60):
        model = (SMALL, LARGE)[n % 2]
        choice = selector_module.ModelChoice(model, 0.5, "", question(), {})
        add(store, selector, choice, "up" if n // 2 % 3 else "down", ms=10.0 if model is SMALL else 160.0)
    assert selector.status().arms[0].best > 0.7
    reason = selector.choose(question()).why
    assert "sure" in reason


def test_a_rating_that_is_taken_back_leaves_no_trace(store):
    """Also another set of models with the same reader knows the ratings of the models that it has."""
    selector = ModelSelector(store, [SMALL, MIDDLE, LARGE])
    nothing = state(selector)
    first = add(store, selector, selector.choose(question("One"), 1), "up")
    one = state(selector)
    choice = selector_module.ModelChoice(SMALL, 0.5, "", question("Two"), {})
    add(store, selector, choice, "down")
    two = state(selector)
    assert len({nothing, one, two}) == 3 and state(ModelSelector(store, [LARGE, SMALL, MIDDLE])) == two
    store.db.execute("UPDATE ratings SET in_force = 0 WHERE reply_id != ?", first)
    assert state(selector) == one
    store.db.execute("UPDATE ratings SET in_force = 0")
    assert state(selector) == nothing and not selector.has_ratings
    store.db.execute("UPDATE ratings SET in_force = 1")
    pair = ModelSelector(store, [SMALL, MIDDLE])
    assert pair.has_ratings and [arm.rated for arm in pair.status().arms] == [1, 0]


def test_wrong_facts_teach_the_selector_nothing(store):
    """The note "wrong facts" is a reason only with a bad rating, so a good rating with it still teaches."""
    selector = ModelSelector(store, [SMALL, LARGE])
    choice = selector_module.ModelChoice(SMALL, 0.5, "", question(), {})
    before = state(selector)
    for rating, note in [("down", "wrong facts"), ("1", "wrong facts: it was 1912")]:
        add(store, selector, choice, rating, note=note)
        assert state(selector) == before and not selector.has_ratings
    add(store, selector, choice, "up", note="wrong facts")
    assert state(selector) != before


def test_a_trained_cell_belongs_to_its_set_and_is_trained_when_due(store, monkeypatch):
    selector = ModelSelector(store, [SMALL, LARGE])
    monkeypatch.setattr(selector_module.router, "MINIMUM", 8)
    for n in range(12):
        add(store, selector, selector.choose(question(f"Number {n}"), n), "up" if n % 3 else "down")
    selector.train_if_due(13)
    assert selector.status().training == {}
    selector.train_if_due(12)
    assert selector.status().training["ratings"] == 12
    assert ModelSelector(store, [SMALL, MIDDLE]).status().training == {}


def test_only_an_unsure_small_model_hands_on(store, monkeypatch):
    selector = ModelSelector(store, [SMALL, MIDDLE, LARGE])
    choice = selector_module.ModelChoice(SMALL, 0.5, "", question(), {"f2": 0.3})
    monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", None)
    assert selector.best_larger(choice, selector.arms) is None and not is_unsure([-9.0])
    monkeypatch.setattr(selector_module, "UNSURE_LOGPROB", -1.0)
    assert selector.best_larger(choice, selector.arms) == LARGE
    assert selector.best_larger(choice, ("f0", "f1")) == MIDDLE
    assert selector.best_larger(choice.handed_to(LARGE), selector.arms) is None
    assert is_unsure([-2.0, -0.5]) and not is_unsure([-1.4, -0.5]) and not is_unsure([])
    handed = choice.handed_to(LARGE)
    assert handed.line == "m2: m0 was unsure of its answer" and handed.confidence == 0.3


# -- the studies -------------------------------------------------------------------------------------------


def mean_regrets(store, users=4, ratings=150) -> tuple[float, float]:
    """(the selector's regret, that of the better fixed model), averaged over a few users."""
    turns = selector_study.question_turns()
    found = [selector_study.simulate(seed, turns, store, ratings) for seed in range(50, 50 + users)]
    return tuple(np.mean([selector_study.regrets(rewards[ratings // 3 :]) for rewards in found], axis=0))


def test_the_selector_loses_less_than_one_model_for_all_questions(store):
    mine, fixed = mean_regrets(store)
    assert mine < 0.85 * fixed


@pytest.mark.full("ruvmlx/sona/optional")
@pytest.mark.parametrize("mistake", ["topic", "arm", "prior"])
def test_the_study_finds_planted_mistakes(store, monkeypatch, mistake):
    """Without the topics, with ratings of the wrong model, or with arms that learn nothing, it is not."""
    if mistake == "topic":
        blind = [np.zeros_like(turns) for turns in selector_study.question_turns()]
        monkeypatch.setattr(selector_study, "question_turns", lambda: blind)
    elif mistake == "arm":
        monkeypatch.setattr(
            selector_module, "with_latency", lambda rows: with_latency([swap_models(row) for row in rows])
        )
    else:
        monkeypatch.setattr(selector_module.Regression, "observe", lambda self, phi, reward: None)
    mine, fixed = mean_regrets(store)
    assert mine > 0.85 * fixed


def swap_models(row):
    arm = {"model0": "model1", "model1": "model0"}[row.arm]
    return RatedModelChoice(row.reply_id, arm, row.turns, row.rating, row.ms)


@pytest.mark.full("ruvmlx/sona/optional", "tests/sona/selector_study.py")
def test_the_regret_after_300_ratings_is_at_most_15_percent(store):
    turns = selector_study.question_turns()
    found = [selector_study.simulate(seed, turns, store) for seed in range(1000, 1006)]
    mine, fixed = np.mean([selector_study.regrets(rewards) for rewards in found], axis=0)
    assert mine < 0.15 and mine < fixed


def test_the_handover_study_judges_answers_and_separates():
    assert is_right("It is Paris.", ["paris"]) and is_right("56", ["56"]) and not is_right("156", ["56"])
    assert not is_right("Australia", ["au"])
    assert auc(np.array([1.0, 2.0, 3.0, 0.0]), np.array([False, True, True, False])) == 1.0
    assert auc(np.array([1.0, 1.0]), np.array([False, True])) == 0.5
    small = [Answer(n % 2 == 0, [-1.0 - (n % 2)], [1.0], 5.0) for n in range(20)]
    large = [Answer(True, [-0.1], [0.1], 9.0)] * 20
    lines = handover_study.report(small, large)
    assert lines[0] == "right: small 50%, large 100% of 20" and "AUC of the mean logprob: 1.00" in lines
    assert lines[-1] == "median ms per token: small 5.0, large 9.0"

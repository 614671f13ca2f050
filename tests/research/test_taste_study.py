"""The comparison of taste models, on made-up replies: no model runs."""

import numpy as np
import pytest
from ruvmlx.apps.prove import drawn_tastes

from tests.research import taste_study
from tests.research.taste_replies import REPLIES, SampledReplies
from tests.research.taste_rivals import RIVALS
from tests.research.taste_study import Study
from tests.sona import simulated_tastes as sim


@pytest.fixture(scope="module")
def replies() -> SampledReplies:
    """24 questions, of which 16 are rated."""
    rng = np.random.default_rng(0)
    questions = sim.questions(24)
    question = np.repeat(np.arange(24), REPLIES)
    texts = [sim.reply(rng) for _ in question]
    tokens = [np.array([len(word) for word in text.split()], np.int32) for text in texts]
    return SampledReplies(
        questions, texts, rng.random(len(texts)) < 0.5, question, tokens,
        rng.normal(size=(len(texts), 40)).astype(np.float32), rng.normal(size=(24, 6)).astype(np.float32),
        np.arange(24) < 16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def study(replies) -> Study:
    return Study(replies)


def test_sampled_replies_are_kept_in_a_file(replies, tmp_path):
    replies.save(tmp_path / "replies.npz")
    again = SampledReplies.load(tmp_path / "replies.npz")
    assert (again.questions, again.texts) == (replies.questions, replies.texts)
    for one, other in zip(again.tokens, replies.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("finished", "question", "hidden", "asked", "trained"):
        np.testing.assert_array_equal(getattr(again, name), getattr(replies, name))


def test_every_question_is_rated_once_before_any_is_rated_again(study, replies):
    order = study.order(3)
    for start in range(0, len(order), 16):
        assert sorted(replies.question[order[start : start + 16]]) == list(range(16))
    assert len(set(order)) == len(order) == 16 * REPLIES
    assert list(study.order(3)) == list(order) != list(study.order(4))


def test_a_perfect_judge_agrees_wholly_and_the_opposite_not_at_all(study):
    stars = study.stars("lists")
    perfect, opposite = (study.result(s * stars, np.ones_like(stars), stars) for s in (1, -1))
    assert perfect.agreement == pytest.approx(1) and perfect.win_rate == perfect.best > 0.6
    assert opposite.agreement == pytest.approx(-1) and opposite.win_rate < 0.4
    assert perfect.within == 1 and opposite.within < 0.5


def test_what_differs_between_questions_alone_does_not_count(study, replies):
    stars = study.stars("lists")
    of_question = np.array([stars[replies.question == q].mean() for q in replies.question])
    assert study.result(of_question, np.ones_like(stars), stars).agreement == pytest.approx(0)


@pytest.mark.parametrize("name", [*RIVALS, "taste model"])
def test_every_model_learns_who_likes_lists(study, name):
    """The states here are noise, so a model of states alone learns nothing."""
    stars = study.stars("lists")
    rated = study.order(0)[:100]
    found = study.result(*taste_study._by(study, name, rated, stars[rated]), stars)
    assert (found.agreement > 0.3) == (name != "hidden states")
    assert 0.5 < found.within <= 1


def test_someone_who_presses_one_thumb_has_the_rest_as_background(study):
    (row, *_), *_ = [list(taste_study.thumb_rows(study, ["lists"], 1, "only up"))]
    agreement = float(row.split("presses")[1].split()[0])
    assert agreement > 0.8


def test_drawn_users_give_every_star_equally_often_and_differ(replies):
    asked = [replies.questions[q] for q in replies.question]
    words, stars = drawn_tastes.stars(0, asked, replies.texts)
    assert words.count(",") == drawn_tastes.WANTED - 1
    assert set(stars) == {1, 2, 3, 4, 5} and abs(stars.mean() - 3) < 0.2
    assert any((drawn_tastes.stars(seed, asked, replies.texts)[1] != stars).any() for seed in (1, 2))

"""`learn check`: what it says of pairs of replies, and that it says nothing that chance could have made."""

from dataclasses import replace

import numpy as np
import pytest
from ruvmlx.apps.prove import learn_check
from ruvmlx.apps.prove.learn_check import CheckRow, CheckSummary, is_beyond_chance, sentences, sign_test

from ruvmlx.errors import NotFound
from ruvmlx.progress import QUIET, Watch

from ..test_runtime import say

SAME = CheckSummary(
    ratings=9, questions=20, words_before=93.0, words_after=93.0, shorter=0, longer=0, cut_before=0,
    cut_after=0, is_length_clear=False, preferred=0, not_preferred=0, is_taste_clear=False,
    is_preference_clear=False,
)  # fmt: skip
SHORTER = replace(SAME, words_after=64.0, shorter=17, longer=2, is_length_clear=True)
CLEAR = replace(SHORTER, is_taste_clear=True, preferred=16, not_preferred=4, is_preference_clear=True)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (SHORTER, "Shorter: 93 → 64 words on average; 17 of 20 replies are."),
        (CLEAR, "By your ratings you would prefer the reply with what was learned in 16 of 20."),
        (replace(SHORTER, words_after=120.0, longer=18), "Longer: 93 → 120 words on average; 18 of 20"),
        (SAME, "Length: no reply has another number of words (93 → 93 words)."),
        (replace(SHORTER, is_length_clear=False), "With 20 questions, such a difference can"),
        (SHORTER, "Your ratings do not show yet what you like"),
        (replace(CLEAR, preferred=12, not_preferred=8, is_preference_clear=False), "neither side is clearly"),
        (replace(CLEAR, preferred=3, not_preferred=17), "without what was learned in 17 of 20"),
        (replace(SAME, cut_before=5), "5 of 40 replies reached the length limit (5 before, 0 after"),
    ],
)  # fmt: skip
def test_it_says_what_is_clear_and_where_nothing_is(summary, said):
    assert said in " ".join(sentences(summary))


def test_sixteen_of_twenty_is_clear_and_fourteen_is_not():
    assert sign_test(16, 4) < 0.05 < sign_test(14, 6) and sign_test(4, 16) == sign_test(16, 4)
    assert sign_test(10, 10) == sign_test(0, 0) == 1


def test_chance_makes_a_length_clear_in_at_most_one_of_twenty():
    """Differences of either sign by chance, twenty at a time; a real one is found."""
    rng = np.random.default_rng(3)
    found = [is_beyond_chance(rng.normal(0, 0.4, 20)) for _ in range(200)]
    assert np.mean(found) < 0.09
    assert is_beyond_chance(rng.normal(-0.3, 0.4, 20)) and not is_beyond_chance(np.zeros(20))


def test_it_never_says_shorter_of_replies_that_became_longer():
    """19 of 20 replies have twice the words, and one long reply has become short: fewer words on average."""
    words = [(10, 20)] * 19 + [(250, 20)]
    rows = tuple(CheckRow("", False, "", "", *pair, 3.0, 3.0, "") for pair in words)
    summary = learn_check._summary(rows, (0, 0), 9, False)
    assert sentences(summary)[0].startswith("Length: 22 → 20 words on average (1 shorter, 19 longer).")
    grown = learn_check._summary(rows[:-1], (0, 0), 9, False)
    assert sentences(grown)[0] == "Longer: 10 → 20 words on average; 19 of 19 replies are."


def test_without_anything_learned_it_says_so(open_tiny):
    with open_tiny() as runtime, pytest.raises(NotFound, match="nothing was learned yet"):
        learn_check.check(runtime, None, 4, QUIET)


@pytest.fixture
def learned_runtime(open_tiny):
    """A runtime with chats and ratings."""
    with open_tiny() as runtime:
        for text in ("hello there", "how do I garden"):
            chat = runtime.chats.new_chat()
            say(runtime, chat, text, n=8)
            runtime.rate("last", "down", "too long")
            say(runtime, chat, "and then?", n=8)
        yield runtime


def test_own_questions_stand_alone(learned_runtime):
    """First messages of chats, the newest first; what only makes sense in its chat is left out."""
    assert learn_check.own_questions(learned_runtime)[:2] == ["how do I garden", "hello there"]
    assert "and then?" not in learn_check.own_questions(learned_runtime)


class Counting(Watch):
    def __init__(self):
        self.lines = []

    def progress(self, progress):
        self.lines.append(progress.line)


def test_each_question_gets_both_replies_and_nothing_is_stored(learned_runtime):
    """The untouched side is the model without an adapter; the progress counts to the end."""
    watch, version = Counting(), learned_runtime.learner.version
    before = learned_runtime.store.replies.get("last").id
    found = learn_check.check(learned_runtime, None, 12, watch)
    assert [row.is_own for row in found.rows] == [False] * 10 + [True] * 2
    assert found.summary.questions == 12 and found.summary.ratings == 2
    assert watch.lines[-1].startswith("Writing replies: 24 of 24 replies")
    assert (
        learned_runtime.store.replies.get("last").id == before and learned_runtime.learner.version == version
    )
    assert any(row.before != row.after for row in found.rows)
    learned_runtime.learning.use(None)
    (own,) = learned_runtime.writer.answers(
        [learn_check._request(learned_runtime, found.rows[0].question, 0, 12)]
    )
    assert own.text.strip() == found.rows[0].before


def test_questions_of_a_file_are_asked_alone(learned_runtime):
    found = learn_check.check(learned_runtime, ["one", "two"], 4, QUIET)
    assert [row.question for row in found.rows] == ["one", "two"]
    assert all(row.predicted == "" for row in found.rows)  # two ratings show no liking

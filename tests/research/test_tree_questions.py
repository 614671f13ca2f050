"""The questions of the tree test name files that exist, and wrong answers are counted."""

from pathlib import Path

from .tree_questions import questions, wrong_answers

ROOT = Path(__file__).parents[2]


def test_every_right_answer_is_a_file():
    named = [path for _, right in questions() for path in right]
    assert len(questions()) == 30 and [path for path in named if not (ROOT / path).is_file()] == []


def test_a_wrong_and_a_missing_answer_are_counted():
    answers = {n: right[0] for n, (_, right) in enumerate(questions(), 1)}
    assert wrong_answers(answers) == []
    del answers[3]
    assert wrong_answers(answers | {7: "README.md"}) == [3, 7]

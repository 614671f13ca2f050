"""This command grades a newcomer's answers to the questions of tree_questions.tsv. The newcomer names one
file for each question, and sees only the list of files (`git ls-files`).

    python -m tests.research.tree_questions                 # print the questions
    python -m tests.research.tree_questions ANSWERS.tsv     # grade "number<TAB>path" lines
"""

import sys
from pathlib import Path

QUESTIONS = Path(__file__).with_suffix(".tsv")


def questions() -> list[tuple[str, list[str]]]:
    """Return (question, paths of the files that are right answers) of each question."""
    rows = (line.split("\t") for line in QUESTIONS.read_text(encoding="utf-8").splitlines())
    return [(text, paths.split()) for text, paths in rows]


def wrong_answers(answers: dict[int, str]) -> list[int]:
    """Return the numbers, from 1, of the questions without a right answer. answers: {number: path}"""
    return [n for n, (_, right) in enumerate(questions(), 1) if answers.get(n) not in right]


def main() -> None:
    if len(sys.argv) == 1:
        for n, (text, _) in enumerate(questions(), 1):
            print(f"{n}. {text}")
        return
    rows = (line.split("\t") for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines() if line)
    answers = {int(number): path for number, path in rows}
    wrong = wrong_answers(answers)
    print(f"{len(questions()) - len(wrong)} of {len(questions())} right")
    for n in wrong:
        print(f"{n}. {questions()[n - 1][0]} {answers.get(n, '-')}")


if __name__ == "__main__":
    main()

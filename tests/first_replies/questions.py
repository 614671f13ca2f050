"""A hundred ordinary questions: one half to choose defaults by, the other to report on."""

from dataclasses import dataclass
from pathlib import Path

HALVES = ("choose", "report")


@dataclass(frozen=True)
class Question:
    """answer: a pattern that a right reply contains; "": any reply may be right. foreign: a reply in another
    language than English may be right."""

    text: str
    answer: str = ""
    foreign: bool = False


def questions(half: str) -> list[Question]:
    """The questions of a half, one a line of its file: the text, the pattern and "any language", by tabs."""
    lines = Path(__file__).with_name(f"{half}.txt").read_text(encoding="utf-8").splitlines()
    return [Question(*[*line.split("\t"), "", ""][:2], line.endswith("\tany language")) for line in lines]

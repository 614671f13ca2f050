"""This module reads the prompts of the experiments with simulated users. Simulated users rate replies to the
prompts of the file "train". The prompts of the file "heldout" are on other topics, and they test what the
model has learned."""

from importlib import resources


def own(name: str) -> list[str]:
    return lines(resources.files(__package__).joinpath("data", f"{name}.txt").read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """Return the prompts of a text with one prompt on each line. Empty lines are left out."""
    return [line.strip() for line in text.splitlines() if line.strip()]

"""This module reads the project's own prompts. Simulated users rate replies to the prompts "train". The
prompts "heldout", on other topics, test the result."""

from importlib import resources


def own(name: str) -> list[str]:
    return lines(resources.files(__package__).joinpath("data", f"{name}.txt").read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """Return the prompts of a text with one prompt on each line. Empty lines are left out."""
    return [line.strip() for line in text.splitlines() if line.strip()]

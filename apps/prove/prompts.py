"""The prompts of our own: to rate on ("train"), and, on other topics, to be judged on ("heldout")."""

from importlib import resources


def own(name: str) -> list[str]:
    return lines(resources.files(__package__).joinpath("data", f"{name}.txt").read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """One a line; empty lines are none."""
    return [line.strip() for line in text.splitlines() if line.strip()]

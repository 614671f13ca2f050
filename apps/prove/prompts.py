"""Our own prompts: "train" to rate on, and "heldout", on other topics, to test on."""

from importlib import resources


def own(name: str) -> list[str]:
    return lines(resources.files(__package__).joinpath("data", f"{name}.txt").read_text(encoding="utf-8"))


def lines(text: str) -> list[str]:
    """One prompt a line, without empty lines."""
    return [line.strip() for line in text.splitlines() if line.strip()]

"""This module parses the arguments of slash commands: ratings, reasons and numbers."""

from ruvmlx.errors import UsageError
from ruvmlx.ratings import RATINGS, REASONS, check_reason

WHY_USAGE = "/why REASON"
RATE_USAGE = "/rate up|down|1-5 [NOTE]"


def parse_rating(argument: str) -> tuple[str, str]:
    """Split the argument of /rate into a rating and a note: "down too long" -> ("down", "too long"). Raise
    UsageError for another rating, and for a reason with a rating that is not bad."""
    word, _, note = argument.partition(" ")
    rating = {"+": "up", "-": "down"}.get(word, word.lower())
    if rating not in RATINGS:
        raise UsageError(f"a rating is up, down or 1 to 5, got {word[:20]!r}; try {RATE_USAGE}")
    check_reason(rating, note.strip())
    return rating, note.strip()


def parse_reason(argument: str) -> str:
    """Return the reason for a bad rating that the argument names: "long" or "too long" -> "long"."""
    found = {text: word for word, text in REASONS.items()} | {word: word for word in REASONS}
    if argument.lower() not in found:
        raise UsageError(f"a reason is {', '.join(REASONS)}, got {argument[:20]!r}; try /why long")
    return found[argument.lower()]


def parse_number(argument: str, last: int, what: str) -> int | None:
    """Return the number in the argument: "2" -> 2, "" -> None.

    Raise UsageError if the argument is no number from 1 to `last`. what: the noun for a numbered thing, for
    example "chat"; the error's text has this noun.
    """
    if not argument:
        return None
    if not last:
        raise UsageError(f"that reply has no {what}")
    is_number = argument.isascii() and argument.isdigit() and len(argument) < 10
    if not is_number or not 1 <= int(argument) <= last:
        valid = f"a number from 1 to {last}" if last > 1 else "the number 1"
        raise UsageError(f"no {what} has the number {argument[:20]!r}; give {valid}")
    return int(argument)


def parse_version(argument: str) -> int:
    if not argument.isascii() or not argument.isdigit() or len(argument) >= 10:
        got = f"got {argument[:20]!r}" if argument else "and none was given"
        raise UsageError(f"/rollback needs the number of a version, which /learning shows, {got}")
    return int(argument)

"""This module lists the ratings that a user can give to a reply, and the reasons for a bad rating."""

RATINGS = ("up", "down", "1", "2", "3", "4", "5")
BAD = ("down", "1", "2")

# The keys are the words that a user types. The values are the texts with which the rating's note begins.
REASONS = {"long": "too long", "short": "too short", "tone": "wrong tone", "facts": "wrong facts"}
# The learner learns nothing from a rating with this reason, because ratings change a model's style, not its
# knowledge.
FACTS = REASONS["facts"]


def reason_of(rating: str, note: str) -> str:
    """Return the reason in a bad rating's note: "long", "short", "tone" or "facts"; "" if there is no reason.

    >>> reason_of("down", "too long: I wanted one line")
    'long'
    """
    said = note.partition(":")[0].strip()
    return next((word for word, text in REASONS.items() if text == said and rating in BAD), "")


def with_reason(note: str, reason: str) -> str:
    """Return the note with `reason` at its beginning, such as "too long: I wanted one line". `reason`
    replaces an earlier reason of the note."""
    rest = note.partition(":")[2].strip() if reason_of("down", note) else note.strip()
    return f"{REASONS[reason]}: {rest}" if rest else REASONS[reason]

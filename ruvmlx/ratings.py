"""The ratings that a user can give to a reply, and the reasons for a bad one."""

RATINGS = ("up", "down", "1", "2", "3", "4", "5")
BAD = ("down", "1", "2")

# What a user types -> what the rating's note says, or begins with.
REASONS = {"long": "too long", "short": "too short", "tone": "wrong tone", "facts": "wrong facts"}
FACTS = REASONS[
    "facts"
]  # such a rating teaches nothing: ratings change how a model writes, not what it knows


def reason_of(rating: str, note: str) -> str:
    """The reason that a bad rating's note gives: "long", "short", "tone" or "facts"; "" for none.

    >>> reason_of("down", "too long: I wanted one line")
    'long'
    """
    said = note.partition(":")[0].strip()
    return next((word for word, text in REASONS.items() if text == said and rating in BAD), "")


def with_reason(note: str, reason: str) -> str:
    """The note with this reason in place of an earlier one: "too long", "too long: I wanted one line"."""
    rest = note.partition(":")[2].strip() if reason_of("down", note) else note.strip()
    return f"{REASONS[reason]}: {rest}" if rest else REASONS[reason]

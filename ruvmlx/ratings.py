"""This module lists the ratings that a user can give to a reply, and the reasons for a bad rating."""

from string import whitespace

from .errors import UsageError

RATINGS = ("up", "down", "1", "2", "3", "4", "5")
GOOD, BAD = ("up", "4", "5"), ("down", "1", "2")

# The keys are the words that a user types. The values are the texts with which the rating's note begins.
REASONS = {"long": "too long", "short": "too short", "tone": "wrong tone", "facts": "wrong facts"}
# The learner learns nothing from a rating with this reason, because ratings change a model's style, not its
# knowledge.
FACTS = REASONS["facts"]
FELT = 0.0005  # nats per token: a smaller change of a reply's mean log-probability is next to nothing


def is_against(rating: str, moved: float) -> bool:
    """Return True if a rating's effect is the opposite of what the rating asks for. All ratings together
    make the change, so the other ratings can outweigh this one.

    moved: the change of the rated reply's log-probability

    >>> is_against("up", -0.01), is_against("3", -0.01)
    (True, False)
    """
    return (moved < 0 and rating in GOOD) or (moved > 0 and rating in BAD)


def reason_of(rating: str, note: str) -> str:
    """Return the reason in a bad rating's note: "long", "short", "tone" or "facts"; "" if there is no reason.

    >>> reason_of("down", "too long: I wanted one line")
    'long'
    """
    said = note.partition(":")[0].strip(whitespace)  # TEACHES of store/ratings.py removes the same characters
    return next((word for word, text in REASONS.items() if text == said and rating in BAD), "")


def check_reason(rating: str, note: str) -> None:
    """Raise UsageError if the note begins with a reason for a bad rating, but the rating is not bad."""
    if rating not in BAD and (reason := reason_of("down", note)):
        raise UsageError(f'"{REASONS[reason]}" goes with a bad rating: down, 1 or 2; got {rating}.')


def with_reason(note: str, reason: str) -> str:
    """Return the note with `reason` at its beginning, such as "too long: I wanted one line". If the note has
    words after an earlier reason, the earlier reason stays behind `reason`. If the note has no words,
    `reason` replaces the earlier reason."""
    earlier = []
    while said := reason_of("down", note):
        earlier.append(said)
        note = note.partition(":")[2]
    words = note.strip()
    kept = [said for said in earlier if words and said != reason]
    return ": ".join([*(REASONS[said] for said in (reason, *kept)), *filter(None, [words])])

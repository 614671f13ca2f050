"""This module makes the lines that an opened chat shows below its replies. A line says why the user rated the
reply bad, or that the user prefers the reply."""

from .describe import PREFERRED, YOUR_VERSION, bad_with_reason
from .view_model import Standing


def earlier_feedback(standing: Standing) -> dict[str, str]:
    """Return the words by the reply's id: "▼ bad, too long", "◆ preferred". Replies that have only a rating
    without a reason have no words."""
    replies = standing.reasons.keys() | standing.preferred.keys()
    return {reply_id: _words(standing, reply_id) for reply_id in replies}


def _words(standing: Standing, reply_id: str) -> str:
    rating, reason = standing.ratings.get(reply_id), standing.reasons.get(reply_id, "")
    kind = standing.preferred.get(reply_id)
    bad = bad_with_reason(rating, reason) if rating and reason else ""
    choice = f"◆ {YOUR_VERSION}" if kind == "edit" else PREFERRED if kind else ""
    return " · ".join(filter(None, (bad, choice)))

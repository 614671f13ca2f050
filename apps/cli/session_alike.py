"""This module finds the chats of `ruvmlx sessions search --like`."""

from typing import Any

from ruvmlx.text import count, excerpt

from .options import open_for_reading, resolve
from .output import log, print_json
from .session_words import ALIKE, session_facts
from .text_output import table


def show_alike(text: str, limit: int, as_json: bool, flags: dict[str, Any]) -> None:
    """Print the chats in which the user asked something like a text, the most like first.

    limit: the maximum number of chats. flags: the flags of the command that name the model
    """
    from ruvmlx.progress import Progress
    from ruvmlx.sona.similar_chats import MOST_READ, chats_like

    from ..progress import watching

    with open_for_reading(resolve(flags)) as opened, watching() as watch:
        alike = chats_like(
            *opened, text, limit,
            lambda count: watch.progress(Progress(f"Reading message {count:,}")),
        )  # fmt: skip
    hits = alike.found
    if alike.unread:
        log(f"note: {MOST_READ} messages were read; {count(alike.unread, 'older one')} not compared.")
    if as_json:
        print_json([session_facts(h.session) | _like(h) for h in hits])
    elif hits:
        rows = [(h.session.id, f"{h.similarity:.0%}", h.session.title, excerpt(h.content, [])) for h in hits]
        table(ALIKE, rows)
    else:
        log("no chat is about that.")


def _like(hit: Any) -> dict[str, Any]:
    return {"message_id": hit.message_id, "text": hit.content, "similarity": round(hit.similarity, 4)}

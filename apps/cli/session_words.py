"""This module has the tables and sentences of `ruvmlx sessions`: lists of chats, and words about one chat."""

from collections.abc import Sequence
from typing import Any

from ruvmlx.text import excerpt, one_line

from .text_output import TableColumn, ago, count, hint, say, table, time_left

COLUMNS = (
    TableColumn("ID", style="bold"),
    TableColumn("USED"),
    TableColumn("MESSAGES", right=True),
    TableColumn("TITLE", cut=True),
)
DELETED = (COLUMNS[0], TableColumn("TIME LEFT"), *COLUMNS[2:])
FOUND = (TableColumn("ID", style="bold"), TableColumn("TITLE", cut=True), TableColumn("FOUND", cut=True))
ALIKE = (FOUND[0], TableColumn("LIKE IT", right=True), FOUND[1], TableColumn("ASKED", cut=True))


def session_facts(session) -> dict[str, Any]:
    return {"id": session.id, "title": session.title, "turns": session.turns, "updated": session.updated} | {
        "pinned": bool(session.pinned),
        "folder": session.folder,
    }


def show_rows(rows: Sequence[dict[str, Any]]) -> None:
    table(COLUMNS, [(r["id"], ago(r["updated"]), f"{r['turns']:,}", title_in_lists(r)) for r in rows])


def title_in_lists(row: dict[str, Any]) -> str:
    folder = f"{one_line(row['folder'])} › " if row["folder"] else ""
    return ("★ " if row["pinned"] else "") + folder + (one_line(row["title"]) or "Untitled")


def no_such_folder(folder: str, every: Sequence[Any]) -> str:
    """Return a sentence that says that no chat is in the folder, and a sentence with the folders of all
    chats."""
    names = sorted({one_line(s.folder) for s in every if s.folder})
    several = "The only folder is" if len(names) == 1 else "The folders are:"
    known = f"{several} {', '.join(names)}." if names else "No chat is in a folder."
    return f"No chat is in folder {one_line(folder)}. {known}"


def author(role: str) -> str:
    """Return the word for the author of a message, as in an exported chat: "You", "Assistant" or "Tool"."""
    from ruvmlx.chats.chat_file import NAMES

    return NAMES.get(role, role.capitalize())


def found_words(hit: Any, wanted: str) -> str:
    """Return the author of the message that the search found, and the text around the words. If the search
    found the chat's title or system prompt, say so."""
    if hit.message_id is None:
        title = hit.content.casefold()
        is_title = all(word in title for word in wanted.casefold().split())
        return "in the title" if is_title else "in the system prompt"
    return f"{author(hit.role)}: {excerpt(hit.content, wanted.split())}"


def bare_title(session: Any) -> str:
    return one_line(session.title) or "Untitled"


def forgotten_words(number: int) -> str:
    if not number:
        return (
            "Nothing was deleted: at the moment there are no stored replies outside a chat. (`ruvmlx "
            "generate` and the server store such replies.) Your chats stay as they are."
        )
    replies = count(number, "reply", "replies")
    return f"Deleted the words of {replies} outside chats. Your chats and what the model learned stay."


def show_deleted_rows(rows: Sequence[dict[str, Any]], ends: dict[str, float]) -> None:
    """Print the deleted chats. ends: the time until which a chat can be restored, by the chat's id."""
    say("Deleted chats that you can still bring back:")
    table(DELETED, [(r["id"], time_left(ends[r["id"]]), f"{r['turns']:,}", title_in_lists(r)) for r in rows])
    hint("`ruvmlx sessions restore ID` brings one back, in the time left.")
    hint("Here, `last` is the chat that was deleted last.")

"""This module works on saved chats for the app and plain mode: it lists, finds, renames, exports and imports
chats."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ruvmlx.chats.chat_file import (
    ImportResult,
    as_json,
    as_markdown,
    import_once,
    read_bytes,
    write_new,
    writes_json,
)
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.runtime import Runtime
from ruvmlx.store import SessionRow
from ruvmlx.text import count, excerpt, one_line

from .user_files import UserFiles

ID_LENGTH = 12  # the number of characters of a chat's id; up to 5 digits mean a number in the list of chats


@dataclass(frozen=True)
class ChatEntry:
    """A row of the list of chats, with text that is safe for the terminal.

    said: an excerpt of the found message around the words of a search; "" without a search. message: the id
    of the newest message with these words. turns: the number of messages on the chat's branch. updated: the
    time of the chat's last use, in seconds since the epoch.
    """

    id: str
    title: str
    turns: int
    updated: float
    said: str = ""
    is_pinned: bool = False
    message: int | None = None
    folder: str = ""

    @property
    def name(self) -> str:
        """The title of the chat. If the chat is in a folder, the folder's name precedes the title."""
        return f"{self.folder} › {self.title}" if self.folder else self.title

    @property
    def when(self) -> str:
        """The time of the chat's last use: "14:05" for today, "Nov 20" for this year, "2024-11-20" for an
        earlier year."""
        then, now = time.localtime(self.updated), time.localtime()
        if then[:3] == now[:3]:
            return time.strftime("%H:%M", then)
        return time.strftime("%b %d" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def entries(runtime: Runtime, words: str = "") -> list[ChatEntry]:
    """Return the entries of all chats, or of the chats that contain `words` or have `words` in their folder's
    name. Pinned chats come first, the one that was used last before the others. Then the folder that was used
    last comes first, and in each folder the chat that was used last comes first."""
    store, wanted = runtime.store, words.split()
    if not wanted:
        return _in_order(map(_entry, store.chats.all()))
    found: dict[str, ChatEntry] = {}
    for s in store.chats.all():
        if s.folder and one_line(words).lower() in s.folder.lower():
            found[s.id] = _entry(s)
    for hit in store.search.find(words):
        said = excerpt(hit.content, wanted) if hit.message_id is not None else ""
        s = hit.session
        if s.id not in found or not found[s.id].said:
            found[s.id] = _entry(s, said, hit.message_id)
    return _in_order(found.values())


def _entry(session: SessionRow, said: str = "", message: int | None = None) -> ChatEntry:
    title = one_line(session.title) or "Untitled"
    return ChatEntry(
        session.id,
        title,
        session.turns,
        session.updated,
        said,
        bool(session.pinned),
        message,
        session.folder,
    )


def _in_order(found: Iterable[ChatEntry]) -> list[ChatEntry]:
    entries, used = list(found), dict[str, float]()
    for entry in entries:
        used[entry.folder] = max(entry.updated, used.get(entry.folder, 0.0))
    pinned = sorted((e for e in entries if e.is_pinned), key=lambda e: -e.updated)
    others = (e for e in entries if not e.is_pinned)
    return pinned + sorted(others, key=lambda e: (-used[e.folder], e.folder, -e.updated))


def pin(runtime: Runtime, session: str) -> str:
    """Pin a chat, or unpin the chat if it is pinned. Return a sentence for the user that says whether the
    chat is pinned now."""
    pinned = not runtime.store.chats.get(session).pinned
    runtime.store.chats.pin(session, pinned)
    return "Pinned: it stands first in your chats" if pinned else "No longer pinned"


def put_in_folder(runtime: Runtime, session: str, folder: str) -> str:
    """Put a chat into the folder `folder`. If `folder` is "none", take the chat out of its folder. Return a
    sentence for the user. If `folder` is "", change nothing and return the list of folders."""
    if not folder:
        counts = Counter(chat.folder for chat in runtime.store.chats.all() if chat.folder)
        told = ", ".join(f"{one_line(name)} ({count})" for name, count in sorted(counts.items()))
        return f"Folders: {told}" if told else "No folders yet; /folder NAME puts this chat into one."
    runtime.store.chats.set_folder(session, "" if folder == "none" else one_line(folder))
    return "No longer in a folder" if folder == "none" else f"In the folder {one_line(folder)}"


def lines(runtime: Runtime, listed: Sequence[ChatEntry], words: str = "") -> list[str]:
    """Return the lines that /chats prints for the chats in `listed`. words: the words that the user searched
    for, or ""."""
    if not listed:
        return ["No chat has these words." if words else "No chats yet."]
    place = {entry.id: n for n, entry in enumerate(entries(runtime), 1)}
    return [
        f"{place[entry.id]}. {entry.name}, {count(entry.turns, 'message')}, {entry.when}"
        + (", pinned" if entry.is_pinned else "")
        + (f": {entry.said}" if entry.said else "")
        for entry in listed
    ]


def find(runtime: Runtime, argument: str, listed: Sequence[str] = ()) -> str:
    """Return the id of the chat that the user names. argument: the chat's number in the list ("2"), its id,
    or a unique beginning of its id.

    listed: the ids in the order in which the user saw the numbered chats; if `listed` is empty, the numbers
    mean the places in the list of all chats as it is now.
    """
    if not argument:
        raise UsageError("which chat? Give its number in /chats, or its id")
    if argument.isascii() and argument.isdigit() and len(argument) < ID_LENGTH // 2:
        listed = listed or [entry.id for entry in entries(runtime)]
        if not 1 <= int(argument) <= len(listed):
            raise NotFound(f"no chat number {argument}; /chats lists {len(listed)}")
        return runtime.store.chats.find(listed[int(argument) - 1])
    return runtime.store.chats.find(argument)


def title(runtime: Runtime, session: str) -> str:
    return one_line(runtime.store.chats.get(session).title) or "Untitled"


def rename(runtime: Runtime, session: str, words: str) -> str:
    if not one_line(words):
        raise UsageError("a title needs a word; try /title My chat")
    runtime.store.chats.set_title(session, one_line(words))
    return f"Title: {title(runtime, session)}"


def restore_newest(runtime: Runtime) -> str:
    """Restore the chat that the user deleted last, and return the chat's id."""
    deleted = runtime.store.chats.soft_deleted()
    if not deleted:
        raise NotFound("no chat was deleted in the last 24 hours")
    runtime.store.chats.restore(deleted[0].id)
    return deleted[0].id


def export(runtime: Runtime, session: str, file: str, files: UserFiles) -> str:
    """Write a chat to a file, and return a sentence for the user with the file's path. A .json file gets all
    branches of the chat. A .md, .markdown or .txt file, or a file without an ending, gets the messages of the
    shown branch as Markdown. Raise UsageError for any other ending."""
    if not file:
        raise UsageError("which file? Give a name that ends in .md or .json")
    path, store = files.of_command(file), runtime.store
    if writes_json(path):
        write_new(path, json.dumps(as_json(store, session), indent=1) + "\n")
    else:
        write_new(path, as_markdown(store, session))
    return f"Written: {path.absolute()}"


def import_file(runtime: Runtime, file: str, files: UserFiles) -> ImportResult:
    """Import a chat from a .json file, unless the store has the chat already."""
    if not file:
        raise UsageError("which file? Give a .json file that /export wrote")
    path = files.of_command(file)
    if path.is_dir():
        raise UsageError(f"{one_line(file)} is a folder; `ruvmlx sessions import` takes all files of one")
    return import_once(runtime.store, read_bytes(path), one_line(file))

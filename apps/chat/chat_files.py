"""What both kinds of chat do with saved chats: list and find them, name, copy, write and read files."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from ruvmlx.chat_file import as_json, as_markdown, import_chat, read_bytes, write_new
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.text import excerpt, one_line

from .contract import ChatRuntime

ID_LENGTH = 12  # shorter figures are places in the list


@dataclass(frozen=True)
class Entry:
    """A chat in a list, safe to show. said: the words that were searched for, where they stand."""

    id: str
    title: str
    turns: int
    updated: float
    said: str = ""

    @property
    def when(self) -> str:
        """ "14:05" today, "Nov 20" this year, "2024-11-20" before."""
        then, now = time.localtime(self.updated), time.localtime()
        if then[:3] == now[:3]:
            return time.strftime("%H:%M", then)
        return time.strftime("%b %d" if then.tm_year == now.tm_year else "%Y-%m-%d", then)


def entries(runtime: ChatRuntime, words: str = "") -> list[Entry]:
    """All chats, or those with these words in them; the newest first."""
    store, wanted = runtime.store, words.split()
    if not wanted:
        return [Entry(s.id, one_line(s.title) or "Untitled", s.turns, s.updated) for s in store.chats.all()]
    found: dict[str, Entry] = {}
    for hit in store.search.find(words):
        said = excerpt(hit.content, wanted) if hit.message_id is not None else ""
        s = hit.session
        if s.id not in found or not found[s.id].said:
            found[s.id] = Entry(s.id, one_line(s.title) or "Untitled", s.turns, s.updated, said)
    return sorted(found.values(), key=lambda entry: -entry.updated)


def lines(runtime: ChatRuntime, words: str = "") -> list[str]:
    """The list as /chats says it."""
    listed = entries(runtime, words)
    if not listed:
        return ["No chat has these words." if words else "No chats yet."]
    place = {entry.id: n for n, entry in enumerate(entries(runtime), 1)}
    return [
        f"{place[entry.id]}. {entry.title}, {entry.turns} messages, {entry.when}"
        + (f": {entry.said}" if entry.said else "")
        for entry in listed
    ]


def find(runtime: ChatRuntime, argument: str) -> str:
    """ "2" is the second of all chats; anything else a chat's id, or a unique beginning of it."""
    if not argument:
        raise UsageError("which chat? Give its number in /chats, or its id")
    if argument.isascii() and argument.isdigit() and len(argument) < ID_LENGTH // 2:
        listed = runtime.store.chats.all()
        if not 1 <= int(argument) <= len(listed):
            raise NotFound(f"no chat number {argument}; /chats lists {len(listed)}")
        return listed[int(argument) - 1].id
    return runtime.store.chats.find(argument)


def title(runtime: ChatRuntime, session: str) -> str:
    return one_line(runtime.store.chats.get(session).title) or "Untitled"


def rename(runtime: ChatRuntime, session: str, words: str) -> str:
    if not one_line(words):
        raise UsageError("a title needs a word; try /title My chat")
    runtime.store.chats.set_title(session, one_line(words))
    return f"Title: {title(runtime, session)}"


def export(runtime: ChatRuntime, session: str, file: str) -> str:
    """Write a chat: all of it as .json, the conversation as Markdown otherwise. Says where it is."""
    if not file:
        raise UsageError("which file? Give a name that ends in .md or .json")
    path, store = Path(file).expanduser(), runtime.store
    if path.suffix == ".json":
        write_new(path, json.dumps(as_json(store, session), indent=1) + "\n")
    else:
        write_new(path, as_markdown(store, session))
    return f"Written: {path.absolute()}"


def take_up(runtime: ChatRuntime, file: str) -> str:
    """Import a chat; its id."""
    if not file:
        raise UsageError("which file? Give a .json file that /export wrote")
    return import_chat(runtime.store, read_bytes(Path(file).expanduser()), one_line(file))

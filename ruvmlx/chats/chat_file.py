"""This module writes chats to files and reads chats from files. A JSON file has every branch of a chat; a
Markdown file has only the current branch.

JSON: {"format": "ruvmlx-chat", "id", "title", "system", "model", "created", "updated", "head", "summary",
    "summarized_to", "messages": [{"id", "parent", "role", "content", "rating", "finish_reason", "created",
    "calls"}], "preferences": [{"better", "worse", "kind"}]}; summarized_to is the id of the last message
    that the summary replaces for the model; better and worse are the ids of two messages, of which the user
    prefers the first; tool_turns.py describes "calls". `parse` reads files in this JSON format, and files of
    other programs with any object or list of {"role", "content"} messages. Of a reply, `parse` reads the text
    and the tool calls, but no rating and no tokens, so the user cannot rate or continue imported replies.
"""

import errno
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CorruptFile, RuvmlxError, UsageError, unreadable
from ..models.files.json_files import parse_json
from ..models.text.tool_calls import ParsedCall
from ..platform.files import file_beside, flush_to_disk, open_ordinary, publish
from ..store import MessageRow, Store
from ..text import one_line, sanitize, size
from .tool_turns import calls_of_json, calls_to_json

FORMAT = "ruvmlx-chat"
ROLES = ("user", "assistant", "tool")
NAMES = {"user": "You", "assistant": "Assistant", "tool": "Tool"}
ENDINGS = {"", ".md", ".markdown", ".txt", ".json"}  # the endings of files to which chats are written
MAX_FILE_BYTES = 64 << 20  # bytes: the program does not import larger files
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # the errors of a full or broken disk
MAX_TIMESTAMP = 253_402_300_800.0  # as many seconds before 1970 as there are to the end of the year 9999


def as_json(store: Store, session_id: str) -> dict[str, Any]:
    """Return a chat with all its branches, in the format that this module describes. All parts show the
    store at one moment."""
    with store.snapshot():
        session, path = store.chats.get(session_id), store.messages.branch(session_id)
        messages = store.messages.all(session_id)
        preferences = _preferences(store, session_id, messages)
    return {
        "format": FORMAT,
        "id": session.id,
        "title": session.title,
        "system": session.system,
        "model": session.model,
        "created": session.created,
        "updated": session.updated,
        "head": path[-1].id if path else None,
        "summary": session.summary,
        "summarized_to": session.summarized_to,
        "messages": [
            {
                "id": m.id,
                "parent": m.parent,
                "role": m.role,
                "content": m.content,
                "rating": m.rating,
                "finish_reason": m.finish_reason,
                "created": m.created,
                "calls": json.loads(m.calls or "[]"),
            }
            for m in messages
        ],
        "preferences": preferences,
    }


def _preferences(store: Store, session_id: str, messages: list[MessageRow]) -> list[dict[str, Any]]:
    """Return the current preferences between the chat's replies, with the ids of the messages that show the
    replies."""
    ids = {m.reply_id: m.id for m in messages if m.reply_id}
    given = store.preferences.of_chat(session_id)
    return [{"better": ids[better], "worse": ids[worse], "kind": kind} for better, worse, kind in given]


def writes_json(path: Path) -> bool:
    """Return True if a file of this name is written as JSON with all branches, and False if it is written as
    Markdown. Raises UsageError if the file name's ending is not one of ENDINGS."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        known = ", ".join(sorted(ENDINGS - {""}))
        raise UsageError(f"a chat cannot be written as {ending}; give a name that ends in one of {known}.")
    return ending == ".json"


UNKNOWN = "unknown"  # the model of an imported chat if the file names no model


def as_markdown(store: Store, session_id: str) -> str:
    """Return the current branch of a chat as Markdown. Control sequences are removed."""
    session = store.chats.get(session_id)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(session.created))
    parts = [f"# {one_line(session.title) or 'Untitled'}", _origin_words(session.model, when)]
    if session.system:
        parts.append(f"> {sanitize(session.system)}".replace("\n", "\n> "))
    for message in store.messages.branch(session_id):
        rating = f" ({message.rating})" if message.rating else ""
        parts += [f"## {NAMES[message.role]}{rating}", *_body(message)]
    return "\n\n".join(parts) + "\n"


def _body(message: MessageRow) -> list[str]:
    """Return the text of a message. If the message is the result of a tool, put the text of the tool call
    before the result."""
    calls = calls_of_json(message.calls) if message.role == "tool" else ()
    return [*(sanitize(f"{call.name} {call.arguments}") for call in calls), sanitize(message.content)]


def _origin_words(model: str, when: str) -> str:
    """Return the model and the time of a chat, in words."""
    if model == UNKNOWN:
        return f"Chat of {when}. The model that wrote the replies is not known."
    return f"{one_line(model)}, {when}"


@dataclass
class Imported:
    title: str
    system: str | None
    model: str
    messages: list[MessageRow] = field(default_factory=list)  # parents before children
    head: int | None = None
    created: float = 0.0  # seconds since 1970; 0: the file has no time
    updated: float = 0.0
    summary: str | None = None
    summarized_to: int | None = None  # the id of the last message that the summary replaces


@dataclass(frozen=True)
class ImportResult:
    """The result of an import of a chat from a file. is_new: False if the store had the chat already, perhaps
    with more messages."""

    session_id: str
    is_new: bool


def import_once(store: Store, data: bytes, name: str) -> ImportResult:
    """Create a chat from a file's bytes, unless a chat in the store begins with the same messages. If the
    bytes are not a chat, raise CorruptFile and create no chat."""
    chat = parse(data, name)
    known = store.chats.beginning_with(chat.system, chat.messages)
    return ImportResult(known, False) if known else ImportResult(_add(store, chat), True)


def _add(store: Store, chat: Imported) -> str:
    return store.chats.add(
        chat.model, chat.system, chat.title, chat.messages, chat.head, chat.created, chat.updated,
        chat.summary, chat.summarized_to,
    )  # fmt: skip


def chat_files(path: Path) -> list[Path]:
    """If `path` is a file, return [path]. If `path` is a folder, return all .json files in the folder and its
    subfolders. Skip hidden files: macOS adds such files (._NAME) on some disks and in zip files. Raises
    UsageError for a folder without .json files."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("[!.]*.json") if file.is_file())
    if not found:
        raise UsageError(f"{one_line(str(path))} has no .json file; give a folder of exported chats.")
    return found


def parse(data: bytes, name: str) -> Imported:
    """Return the chat in a file's bytes. Raises CorruptFile if the file has no chat. name: the file's name,
    for the error."""
    try:
        found = parse_json(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise CorruptFile(
            f"{name} is not JSON: {one_line(str(e))}. Give one that `sessions export --format json` wrote."
        ) from e
    if isinstance(found, list):
        found = {"messages": found}
    raw = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(raw, list) or not raw:
        raise CorruptFile(f"{name} holds no chat: a list of messages is expected. Nothing was imported.")
    system = _text(found.get("system")) or next((_content(m) for m in raw if _role(m) == "system"), None)
    messages = _messages(_without_system(raw), name)
    title = _text(found.get("title")) or next((m.content for m in messages), "")
    chat = Imported(one_line(title)[:60], system or None, _text(found.get("model")) or UNKNOWN, messages)
    times = [message.created for message in messages if message.created] or [0.0]
    chat.created = _moment(found.get("created")) or times[0]
    chat.updated = _moment(found.get("updated")) or times[-1]
    head = _number(found.get("head"))
    chat.summary, chat.summarized_to = _text(found.get("summary")), _number(found.get("summarized_to"))
    chat.head = head if head in {m.id for m in messages} else messages[-1].id
    return chat


def _without_system(raw: list[Any]) -> list[Any]:
    """Return the messages without the system messages. If the parent of a message was a system message, the
    parent of that system message takes its place."""
    rows, parents = [], dict[int | None, Any]()  # parents: {id of a system message: its parent}
    for item in raw:
        parent = item.get("parent") if isinstance(item, dict) else None
        if (number := _number(parent)) in parents:
            parent = parents[number]
            item = item | {"parent": parent}
        if _role(item) != "system":
            rows.append(item)
        elif (own := _number(item.get("id"))) is not None:
            parents[own] = parent
    return rows


def _messages(raw: list[Any], name: str) -> list[MessageRow]:
    """Check the fields of a file's messages and return the messages. A parent must come before its children.
    If a message names no parent, the message before it is its parent."""
    rows: list[MessageRow] = []
    known: set[int] = set()
    for n, item in enumerate(raw, 1):
        calls = _calls(item)
        if _role(item) not in ROLES or _content(item) is None or (_role(item) == "tool" and not calls):
            raise CorruptFile(
                f"{name}: message {n} needs a role (user, assistant, tool, system) and text content."
            )
        own = _number(item.get("id"))
        parent = rows[-1].id if rows else None
        if own is not None and "parent" in item:
            parent = item["parent"]
        id_ = own if own is not None else n
        if id_ in known or not (parent is None or _number(parent) in known):
            raise CorruptFile(f"{name}: message {n} does not follow an earlier one. Nothing was imported.")
        known.add(id_)
        at = _moment(item.get("created"))
        rows.append(
            MessageRow(_role(item), _content(item) or "", None, None, None, id_, parent, at, calls=calls)
        )
    if not rows:
        raise CorruptFile(f"{name} holds no message of a user or a model. Nothing was imported.")
    return rows


def _role(item: Any) -> str:
    return str(item.get("role")) if isinstance(item, dict) else ""


def _content(item: Any) -> str | None:
    return _text(item.get("content")) if isinstance(item, dict) else None


def _calls(item: Any) -> str:
    """Return the tool calls of a message in the form of the store. Return "" if there are no calls, or if
    they are malformed."""
    with suppress(AttributeError, KeyError, TypeError, ValueError, RecursionError):
        calls = calls_of_json(json.dumps(item["calls"]))
        if all(isinstance(json.loads(call.arguments), dict) for call in calls):
            return calls_to_json(
                [ParsedCall(_text(c.id) or "", _text(c.name) or "", c.arguments) for c in calls]
            )
    return ""


def _no_number(name: str) -> None:
    """Raise ValueError for NaN and Infinity. Python's JSON reader accepts NaN and Infinity, but JSON does not
    have these numbers, and the store cannot write them as JSON."""
    raise ValueError(f"{name} is no number of JSON")


def _moment(value: Any) -> float:
    """Return a time in seconds since 1970. Return 0 for values that are no numbers, for times that no
    calendar shows, and for times after now: a chat of the future would always be the chat that was used
    last."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -MAX_TIMESTAMP < value <= time.time() else 0.0


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    """Return the value if it is text. The function removes lone surrogates from the text, because UTF-8
    cannot represent them."""
    return value.encode("utf-8", "ignore").decode() if isinstance(value, str) else None


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a file to import. Raises UsageError if the file cannot be read or is too large."""
    name = one_line(str(path))
    try:
        with open_ordinary(path) as file:
            return read_limited(file, name, limit)
    except OSError as e:
        raise unreadable(name, e) from e


def read_limited(file: BinaryIO, name: str, limit: int | None = None) -> bytes:
    """Return all bytes of a file or of a pipe, which can be endless. Raises UsageError if there are too many
    bytes."""
    limit = MAX_FILE_BYTES if limit is None else limit
    data = file.read(limit + 1)
    if len(data) > limit:
        raise UsageError(f"{name} is over {size(limit)}, which is too long to read. Shorten it.")
    return data


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a new file that only the user can read. The file appears when it is complete. Raises UsageError
    if the file exists or its path cannot be used, and RuvmlxError if the disk fails or is full."""
    name = one_line(str(path))
    try:
        with file_beside(path) as fresh:
            with open(fresh, "wb") as file:
                yield file
                file.flush()
                flush_to_disk(file.fileno())
            publish(fresh, path)
    except FileExistsError as e:
        raise UsageError(f"{name} exists already; give another name.") from e
    except OSError as e:
        kind = RuvmlxError if e.errno in _OF_THE_DISK else UsageError
        raise kind(f"cannot write {name}: {e.strerror}.") from e


def write_new(path: Path, text: str | Iterable[str]) -> int:
    """Write a new text file that only the user can read; the file appears when it is complete. text: the
    whole text, or its lines. Returns the number of lines in `text` (1 for a whole text)."""
    lines = 0
    with new_file(path) as file:
        for line in [text] if isinstance(text, str) else text:
            lines += 1
            file.write(line.encode())
    return lines

"""This module has the roles for the command /as. A role is a system prompt with a name. Some roles are built
in. Each role that the user saved is a file `roles/NAME.md` in the data folder."""

import contextlib
import os
import re
from pathlib import Path

from ruvmlx import settings
from ruvmlx.chats.chat_file import read_bytes
from ruvmlx.errors import NotFound, StoreError, UsageError, unreadable
from ruvmlx.platform.files import make_folder, replacing
from ruvmlx.text import did_you_mean, one_line, sanitize

MAX_BYTES = 1 << 20  # the maximum size of a role's file in bytes
SHOWN = 60  # the maximum number of characters of a role's system prompt that the list shows
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")

BUILT_IN = {
    "brief": "Answer in one or two short sentences. Leave out everything that was not asked for.",
    "teacher": "Explain step by step in plain words, with one small example. End with one question that "
    "checks whether the reader understood.",
    "reviewer": "You review what you are given. Name each problem with its place, why it is one, and a "
    "change that mends it; the worst first. Praise nothing that needs no change.",
    "editor": "You edit texts. Return the text with better wording and the same meaning, tone and length, "
    "and nothing else.",
    "translator": "You translate. Return the translation into English, or of an English text into German, "
    "and nothing else.",
}


def folder() -> Path:
    return settings.home() / "roles"


def names() -> list[str]:
    """Return the names of the roles that the user saved and of the built-in roles."""
    files = sorted(file for file in folder().glob("*.md") if os.path.isfile(file))
    own = [file.stem for file in files if _NAME.fullmatch(file.stem)]
    return [*own, *(name for name in BUILT_IN if name not in own)]


def text(name: str) -> str:
    """Return the system prompt of a role. Raise NotFound if no role has this name, and UsageError if the
    role's file is empty or cannot be read as UTF-8."""
    name = name.lower()
    file = folder() / f"{name}.md"
    if _NAME.fullmatch(name) and file.is_file():
        try:
            found = sanitize(read_bytes(file, MAX_BYTES).decode("utf-8")).strip()
        except UnicodeDecodeError as e:
            raise unreadable(f"the role {name} ({file})", e) from e
        if not found:
            raise UsageError(f"the role {name} is empty; write its system prompt into {file}")
        return found
    if name not in BUILT_IN:
        raise NotFound(f"there is no role {name[:40]!r}.{did_you_mean(name, names())} /as lists them")
    return BUILT_IN[name]


def save(name: str, prompt: str) -> Path:
    """Save a system prompt as a role of the user, and return the path of the role's file. The file replaces
    an earlier role of the same name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"a role's name has small letters, digits, - and _, got {name[:40]!r}")
    if name in ("none", "save"):
        raise UsageError(f"{name!r} is a word of /as and cannot be a role's name; choose another name")
    if not prompt.strip():
        raise UsageError("this chat has no system prompt to keep; /system TEXT sets one")
    file = folder() / f"{name}.md"
    try:
        make_folder(file.parent)
        with replacing(file) as fresh:
            fresh.write(prompt.strip().encode() + b"\n")
    except OSError as e:
        raise StoreError(f"cannot write the role {name} ({file}): {e.strerror}.") from e
    return file


def in_use(prompt: str | None) -> str:
    """Return the name of the role with this system prompt, or "" if no role has it."""
    for name in names() if prompt else ():
        with contextlib.suppress(UsageError):
            if text(name) == prompt:
                return name
    return ""


def beginning(name: str) -> str:
    """Return the first words of a role's system prompt. If the prompt cannot be read, return the reason."""
    try:
        begin = one_line(text(name))
    except UsageError as e:
        return f"({e})"
    return f"{begin[:SHOWN].rstrip()}{'…' if len(begin) > SHOWN else ''}"


def lines(prompt: str | None = None) -> list[str]:
    """Return the lines that /as prints: each role with the first words of its system prompt. prompt: the
    system prompt of the open chat; a mark shows the role that has it."""
    known, used = names(), in_use(prompt)
    width = max(map(len, known))
    rows = [f"{name:<{width}}  {'(in use) ' if name == used else ''}{beginning(name)}" for name in known]
    return [
        *rows,
        "/as NAME answers as one, /as none ends that; /as save NAME keeps this chat's system prompt.",
    ]

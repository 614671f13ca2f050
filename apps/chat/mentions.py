"""`@path` in a message: the text of that file stands below the message, for the model and in the store.

    What does @sort.py do?

    ````file sort.py
    def sort(items): ...
    ````

The screen shows a line instead of the text. Of a PDF, the text of its pages stands there (pdf_text.py).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ruvmlx.chats.chat_file import read_bytes
from ruvmlx.errors import UsageError
from ruvmlx.text import one_line, sanitize

from .pdf_text import pdf_text
from .user_files import UserFiles

_MENTION = re.compile(r'(?<!\S)@(?:"(?P<quoted>[^"\n]+)"|(?P<plain>[^\s"]\S*))')
MAX_FILE_BYTES = 8 << 20  # bytes of a file, as of a text that is piped to `generate`; no context is that long
_PUNCTUATION = ".,;:!?)]}'"  # may follow a name
_OPEN = re.compile(r"\n\n(`{4,})file ([^\n]+)\n")


@dataclass(frozen=True)
class Mentioned:
    """A message with its files. notes: a line for each file, with its size, and for each name without one."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileText:
    name: str
    text: str

    @property
    def line(self) -> str:
        """What the screen shows instead of the text."""
        count = len(self.text.splitlines())
        return f"▸ {one_line(self.name)}, {count:,} line{'' if count == 1 else 's'}"


def has_mention(text: str) -> bool:
    return _MENTION.search(text) is not None


def with_files(text: str, files: UserFiles, tokens: Callable[[str], int]) -> Mentioned:
    """The message with the text of each file that it names. tokens: counts those of a text.

    UsageError for a file that has no text. A name without a file stays as it was typed, and is told.
    """
    blocks, notes = dict[str, str](), list[str]()
    for match in _MENTION.finditer(text):
        name, path = _file_of(match, files)
        if path is None:
            notes.append(f"@{one_line(name)} matches no file; it is sent as text.")
        elif name not in blocks:
            body = sanitize(pdf_text(path, name) if _is_pdf(path) else _read_text(path, name)).strip("\n")
            blocks[name] = _block(name, body)
            notes.append(f"{one_line(name)}: {tokens(body):,} tokens")
    return Mentioned(text + "".join(blocks.values()), tuple(dict.fromkeys(notes)))


def _file_of(match: re.Match[str], files: UserFiles) -> tuple[str, Path | None]:
    """The name, without the punctuation that follows it, and its file; None if there is none."""
    typed = match["quoted"] or match["plain"]
    names = [typed] if match["quoted"] else [typed, typed.rstrip(_PUNCTUATION)]
    if files.folder is not None:
        for name in filter(None, names):
            with suppress(OSError, RuntimeError, ValueError):  # too long, no such user, a null character
                path = files.path(name)
                if path.is_file():
                    return name, path
    return names[-1] or typed, None


def _is_pdf(path: Path) -> bool:
    return path.suffix.lower() == ".pdf"


def _read_text(path: Path, name: str) -> str:
    try:
        return read_bytes(path, MAX_FILE_BYTES).decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(
            f"@{one_line(name)} is no text (byte {e.start} is not UTF-8), so the model cannot read it. "
            "Name a text file or a PDF, or write the name without @."
        ) from e


def _block(name: str, text: str) -> str:
    """The text between fences that it does not contain."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"\n\n{fence}file {one_line(name)}\n{text}\n{fence}"


def without_files(text: str) -> tuple[str, list[FileText]]:
    """A message as it was typed, and its files."""
    begin = _OPEN.search(text)
    if begin is None:
        return text, []
    at, found = begin.start(), list[FileText]()
    while at < len(text):
        opened = _OPEN.match(text, at)
        if opened is None:
            return text, []  # more words follow: the user typed this
        end = text.find(f"\n{opened[1]}", opened.end() - 1)
        if end < 0:
            return text, []
        found.append(FileText(opened[2], text[opened.end() : max(end, opened.end())]))
        at = end + 1 + len(opened[1])
    return text[: begin.start()], found


def as_shown(text: str) -> str:
    """A message as the screen shows it: a line for each file."""
    typed, files = without_files(text)
    return "\n".join([typed, *(file.line for file in files)])

"""This module adds the text of files to a message. If the user mentions a file as `@path`, the module adds
the file's text below the message. The model reads, and the store keeps, the message with the file's text in
this form:

    What does @sort.py do?

    ````file sort.py
    def sort(items): ...
    ````

The screen shows one line in place of the file's text. If the file is a PDF, the module adds the text of the
PDF's pages (pdf_text.py).
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ruvmlx.chats.chat_file import read_bytes
from ruvmlx.errors import UsageError
from ruvmlx.text import count, one_line, sanitize

from .pdf_text import pdf_text
from .user_files import UserFiles

# A space after a backslash does not end the name. A terminal writes this backslash into the name of a dropped
# file.
_MENTION = re.compile(r'(?<!\S)@(?:"(?P<quoted>[^"\n]+)"|(?P<plain>(?!")(?:\\[ \t]|\S)+))')
# the maximum size of a mentioned file in bytes; a larger text does not fit into the context of usual models;
# the command `generate` has the same limit
MAX_FILE_BYTES = 8 << 20
_PUNCTUATION = ".,;:!?)]}'"  # characters that can follow a file name as punctuation of the sentence
_OPEN = re.compile(r"\n\n(`{4,})file ([^\n]+)\n")


@dataclass(frozen=True)
class Mentioned:
    """A message with the text of its files. notes: a line for each file with the number of its tokens, and a
    line for each mention that matches no file."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileText:
    name: str
    text: str

    @property
    def line(self) -> str:
        """The line that the screen shows in place of the file's text."""
        count = len(self.text.splitlines())
        return f"▸ {one_line(self.name)}, {count:,} line{'' if count == 1 else 's'}"


def has_mention(text: str) -> bool:
    return _MENTION.search(text) is not None


def with_files(text: str, files: UserFiles, tokens: Callable[[str], int]) -> Mentioned:
    """Return the message with the text of each file that it mentions. tokens: a function that counts the
    tokens of a text.

    Raise UsageError for a file that is not text and no PDF with text, is too large, or cannot be read. If a
    mention matches no file, the mention stays as the user typed it, and a note says that no file matches.
    """
    blocks, notes = dict[str, str](), list[str]()
    for match in _MENTION.finditer(text):
        name, path = _file_of(match, files)
        if path is None:
            notes.append(f"@{one_line(name)} matches no file; it is sent as text.")
        elif name not in blocks:
            body = sanitize(pdf_text(path, name) if _is_pdf(path) else _read_text(path, name)).strip("\n")
            blocks[name] = _block(name, body)
            notes.append(f"{one_line(name)}: {count(tokens(body), 'token')}")
    return Mentioned(text + "".join(blocks.values()), tuple(dict.fromkeys(notes)))


def _file_of(match: re.Match[str], files: UserFiles) -> tuple[str, Path | None]:
    """Return the file name of a mention, without the punctuation after it, and the path of the file. The path
    is None if the app finds no such file."""
    typed = match["quoted"] or match["plain"]
    names = [typed] if match["quoted"] else [typed, typed.rstrip(_PUNCTUATION)]
    if files.folder is not None:
        for name in filter(None, names):
            # These errors mean that the file cannot be reached, for example because the name is too long,
            # begins with an unknown user (~name), or has a null character.
            with suppress(OSError, RuntimeError, ValueError):
                path = files.path(name)
                if path.is_file():
                    return files.real_name(name), path
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
    """Return the text of a file between two fences of backquotes. The fences are longer than the longest run
    of backquotes in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(4, longest + 1)
    return f"\n\n{fence}file {one_line(name)}\n{text}\n{fence}"


def without_files(text: str) -> tuple[str, list[FileText]]:
    """Split a stored message into the text that the user typed and the files that this module added below
    it."""
    begin = _OPEN.search(text)
    if begin is None:
        return text, []
    at, found = begin.start(), list[FileText]()
    while at < len(text):
        opened = _OPEN.match(text, at)
        if opened is None:
            return text, []  # other words follow the fence, so the user typed the fence
        end = text.find(f"\n{opened[1]}", opened.end() - 1)
        if end < 0:
            return text, []
        found.append(FileText(opened[2], text[opened.end() : max(end, opened.end())]))
        at = end + 1 + len(opened[1])
    return text[: begin.start()], found


def as_shown(text: str) -> str:
    """Return a message as the screen shows it: the text that the user typed, and a line for each file."""
    typed, files = without_files(text)
    return "\n".join([typed, *(file.line for file in files)])

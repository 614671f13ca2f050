"""This module reads the prompts of `generate --prompts`. Each line of the file is a JSON object.

{"id": "a", "prompt": "...", "adapter": "work"}
{"id": "b", "messages": [{"role": "user", "content": "..."}], "max_tokens": 40}
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from ruvmlx.errors import UsageError, unreadable
from ruvmlx.platform.files import open_ordinary
from ruvmlx.sampling import NO_SAMPLING, ReplyOptions, Sampling
from ruvmlx.text import one_line

MAX_LINE_BYTES = 8 << 20  # the maximum number of bytes of a line; usual contexts hold less text
NUMBERS = {field.name for field in fields(Sampling)} - {"logit_bias"}
WHOLE = {name for name, kind in ReplyOptions.__annotations__.items() if kind is int}
HALF = re.compile("[\ud800-\udfff]")  # a lone surrogate, which no text has
FIELDS = {"id", "prompt", "messages", *NUMBERS, *NO_SAMPLING}


@dataclass(frozen=True)
class PromptLine:
    """A line of the file of prompts. number: the line's number in the file. error: the reason why the line
    cannot be answered, or "" if the line has no error."""

    number: int
    id: str | int | None
    fields: Mapping[str, Any]
    error: str = ""


@contextmanager
def opened_prompts(name: str, out: Path | None) -> Iterator[BinaryIO]:
    """Open the file of prompts; "-" means standard input. Raise UsageError if the file cannot be read, or if
    it is the same file as `out`, the file for the results."""
    if name == "-":
        if sys.stdin is None:
            raise UsageError("standard input is closed; name a file of prompts.")
        yield sys.stdin.buffer
        return
    if out is not None and out.exists() and Path(name).exists() and out.samefile(name):
        raise UsageError(f"{one_line(name)} is the file of prompts; give the results another name.")
    try:
        file = open_ordinary(Path(name))
    except OSError as e:
        raise unreadable(name, e) from e
    with file:
        yield file


def count_prompts(file: BinaryIO) -> int:
    """Return the number of prompts after the file's present position. Return 0 if the file is a pipe or a
    terminal, which cannot be read twice."""
    if not file.seekable():
        return 0
    start = file.tell()
    total = sum(1 for _ in prompt_lines(file))
    file.seek(start)
    return total


def prompt_lines(file: BinaryIO) -> Iterator[PromptLine]:
    """Yield the lines of a file of prompts, without empty lines."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        is_too_long = len(raw) > MAX_LINE_BYTES
        while not raw.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            raw = rest
        if is_too_long:
            yield PromptLine(number, None, {}, f"the line is over {MAX_LINE_BYTES >> 20} MB.")
        elif raw.strip():
            yield _parse_line(raw, number)


def _parse_line(raw: bytes, number: int) -> PromptLine:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return PromptLine(number, None, {}, 'the line is no JSON object such as {"id": 1, "prompt": "..."}.')
    if HALF.search(json.dumps(given, ensure_ascii=False)):
        return PromptLine(number, None, {}, "the line has half of a character (a lone surrogate).")
    id_ = given.get("id", number)
    if not isinstance(id_, str | int) or isinstance(id_, bool):
        return PromptLine(number, None, {}, f"id is {one_line(repr(id_))}; it must be a text or a number.")
    return PromptLine(number, id_, given, _fault(given))


def _fault(given: Mapping[str, Any]) -> str:
    """Return the error in the fields of a line, as words. Return "" if the fields have no error."""
    if unknown := sorted(given.keys() - FIELDS):
        return f"no field {one_line(unknown[0])!r}; there are: {', '.join(sorted(FIELDS))}."
    if ("prompt" in given) == ("messages" in given):
        return "give either prompt or messages."
    if not isinstance(given.get("prompt", ""), str):
        return "prompt must be a text."
    if not _are_messages(given.get("messages", [{"role": "user", "content": ""}])):
        return 'messages must be a list of {"role": ..., "content": ...}, both texts.'
    for name in sorted((NUMBERS | {"max_tokens"}) & given.keys()):
        kinds, word = (int, "a whole number") if name in WHOLE else (int | float, "a number")
        if isinstance(given[name], bool) or not isinstance(given[name], kinds):
            return f"{name} is {one_line(repr(given[name]))}; it must be {word}."
    return "" if isinstance(given.get("adapter", ""), str) else "adapter must be a name."


def _are_messages(given: Any) -> bool:
    return isinstance(given, list) and all(
        isinstance(turn, dict)
        and turn.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in turn.values())
        for turn in given
    )

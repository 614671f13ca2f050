"""This module parses JSON of which the text arrives in pieces: JSONSpan finds the end of a JSON value, and
CallObject reads the JSON object of a tool call."""

import json

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JSONSpan:
    """A scanner that finds the end of one JSON value in a stream of characters."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self._plain = 0, False, False, False
        self.over = False

    def feed(self, text: str) -> int:
        """Add the next text. Return the number of characters at the start of `text` that belong to the JSON
        value."""
        for i, c in enumerate(text):
            # a value without quotes or brackets (a number, true, false or null) has ended
            if self._plain and c in ",]}" + SPACE:
                self.over = True
                return i
            self._step(c)
            if self.over:
                return i + 1
        return len(text)

    def _step(self, c: str) -> None:
        if self._in_string:
            if self._escaped or c == "\\":
                self._escaped = not self._escaped
            elif c == '"':
                self._in_string = False
        elif c == '"':
            self._in_string = True
        elif c in "{[":
            self._depth += 1
        elif c in "}]":
            self._depth -= 1
        elif not self._depth and c not in SPACE:
            self._plain = True
        self.over = not self._plain and not self._in_string and self._depth <= 0 and c in '"}]'


class CallObject:
    """A parser of the object {"name": ..., "arguments": {...}} that arrives in pieces. The keys can have any
    order. If the object has the arguments twice, under either key, the first ones that are not empty count,
    because the caller may have reported them.

    name: the function's name; None until the parser has read the name
    bad: True if the object is not a tool call
    begun: a flag of the caller: True if the caller has reported the call
    raw: all text of the object that the parser has received
    """

    def __init__(self) -> None:
        self._whole = JSONSpan()
        self._value: JSONSpan | None = None  # the scanner of the current key's value
        self._pending = ""  # text that the parser has not read yet
        self._key = self._read = ""  # the current key, and the text of its value that was read
        self._arguments = self._held = ""  # _held: the text of arguments that have no key so far
        self._had_arguments = self._read_arguments = False
        self.name: str | None = None
        self.raw = ""
        self.bad = self.begun = False

    @property
    def is_over(self) -> bool:
        return self._whole.over

    def arguments(self, is_cut: bool = False) -> str:
        """Return the text of the arguments object that the parser has read since the last call of this
        method. If the object ends without arguments, return "{}". is_cut: True if no more text follows."""
        found, self._arguments = self._arguments, ""
        if not found and not self._had_arguments and (self.is_over or is_cut):
            found = self._held or ("{}" if self.is_over else "")
        self._had_arguments = self._had_arguments or bool(found)
        return found

    def feed(self, text: str) -> str:
        """Add the next text. Return the part of `text` that comes after the end of the object; "" if the
        object has not ended."""
        n = self._whole.feed(text)
        self.raw += text[:n]
        self._pending += text[:n]
        while not self.bad and self._progress():
            pass
        self.bad = self.bad or (self.is_over and self.name is None)
        return text[n:]

    def _progress(self) -> bool:
        """Read the next key, or the next part of a key's value. Return False if the parser needs more text
        before it can go on."""
        if self._value is not None:
            return self._read_value(self._value)
        self._pending = self._pending.lstrip(SPACE + "{,")
        if not self._pending or self._pending[0] == "}":
            return False
        key = JSONSpan()
        n = key.feed(self._pending)
        rest = self._pending[n:].lstrip(SPACE)
        self.bad = self._pending[0] != '"' or (key.over and rest[:1] not in ("", ":"))
        value = rest[1:].lstrip(SPACE)
        if self.bad or not key.over or not value:
            return False
        self._key, self._pending = _string(self._pending[:n]) or "", value
        self._value, self._read = JSONSpan(), ""
        if self._key in _ARGUMENTS:
            self._held = ""
        return True

    def _read_value(self, value: JSONSpan) -> bool:
        n = value.feed(self._pending)
        piece, self._pending = self._pending[:n], self._pending[n:]
        self._read += piece
        is_arguments = self._key in _ARGUMENTS and not self._read_arguments
        is_object = self._read.startswith("{")
        if is_arguments and is_object:
            self._add_arguments(piece, self._read)
        if not value.over:
            return False
        text = _string(self._read) or ""
        if self._key == "name":
            self.name = text or None
            self.bad = not text
        elif is_arguments and not is_object:  # some models write the arguments object as a JSON string
            self._add_arguments(text, text)
        self._read_arguments |= is_arguments and _has_key(self._read if is_object else text)
        self._value = None
        return True

    def _add_arguments(self, piece: str, whole: str) -> None:
        """Add the next piece of the arguments. whole: the text of the arguments so far. Hold the text back
        until it has a key, because the arguments can follow under the other key."""
        self._held += piece
        if _has_key(whole):
            self._arguments, self._held = self._arguments + self._held, ""


def _has_key(text: str) -> bool:
    """Return False for the text of an object that has no key so far."""
    return bool(text.strip(SPACE + "{}"))


def _string(text: str) -> str | None:
    """Return the string in a JSON text, or None if the JSON text is not a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None

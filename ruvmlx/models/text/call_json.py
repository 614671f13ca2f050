"""JSON that arrives in pieces: finds where a value ends, and reads an object that calls a function."""

import json

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JSONSpan:
    """Finds the end of one JSON value in a stream of characters."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self._plain = 0, False, False, False
        self.over = False

    def feed(self, text: str) -> int:
        """Return how many characters of `text` belong to the value."""
        for i, c in enumerate(text):
            if self._plain and c in ",]}" + SPACE:  # a number, true, false or null has ended
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
    """Reads {"name": ..., "arguments": {...}} while it arrives. The keys may have any order.

    name: the function's name, as soon as it is known
    bad: whether this is not a call
    begun: for the caller's own use
    raw: all text that was read
    """

    def __init__(self) -> None:
        self._whole = JSONSpan()
        self._value: JSONSpan | None = None  # the value of the key that is being read
        self._pending = ""  # text that is not read yet
        self._key = self._read = ""  # the key, and the part of its value that was read
        self._arguments = ""
        self._had_arguments = False
        self.name: str | None = None
        self.raw = ""
        self.bad = self.begun = False

    @property
    def over(self) -> bool:
        return self._whole.over

    def arguments(self) -> str:
        """Return the JSON of the arguments since the last call. At the end, return {} if there were none."""
        found, self._arguments = self._arguments, ""
        if self.over and not found and not self._had_arguments:
            found = "{}"
        self._had_arguments = self._had_arguments or bool(found)
        return found

    def feed(self, text: str) -> str:
        """Read more text. Returns the text after the object."""
        n = self._whole.feed(text)
        self.raw += text[:n]
        self._pending += text[:n]
        while not self.bad and self._progress():
            pass
        self.bad = self.bad or (self.over and self.name is None)
        return text[n:]

    def _progress(self) -> bool:
        """Read a key, or more of a value. Returns False if more text is needed."""
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
        return True

    def _read_value(self, value: JSONSpan) -> bool:
        n = value.feed(self._pending)
        self._read += self._pending[:n]
        is_arguments, is_object = self._key in _ARGUMENTS, self._read.startswith("{")
        if is_arguments and is_object:
            self._arguments += self._pending[:n]
        self._pending = self._pending[n:]
        if not value.over:
            return False
        if self._key == "name":
            self.name = _string(self._read)
            self.bad = not self.name
        elif is_arguments and not is_object:  # some models write the object as a string
            self._arguments += _string(self._read) or ""
        self._value = None
        return True


def _string(text: str) -> str | None:
    """Return the string that a JSON text contains; None if it is not a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None

"""This module removes dangerous characters from text that the program prints to a terminal.

A terminal executes control sequences. Text from a model or a file can contain escape sequences (which move
the cursor, set the clipboard or the window's title), direction overrides (which show code in another order
than it runs) and invisible characters. `sanitize` removes:

* whole escape sequences in 7-bit (ESC [) and 8-bit (U+009B) form, also sequences without an end;
* control characters: C0 except tab and newline, DEL, C1; CR LF, CR, U+2028 and U+2029 become a newline;
* direction marks, overrides and isolates; zero-width spaces, soft hyphens, tags, annotations;
* lone surrogates and noncharacters, which UTF-8 cannot or should not carry.

`sanitize` keeps ZWJ and ZWNJ (emoji, Persian, Indic scripts) and the variation selectors of emoji. `sanitize`
does not detect homoglyphs (different characters with the same look) and does not remove combining marks.
"""

import re
from collections.abc import Iterable
from enum import Enum, auto

_DROPPED = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u00ad\u061c\u180e\u200b\u200e\u200f"  # soft hyphen, direction marks, zero-width space
    "\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # overrides, isolates, joiners, annotations
    "\ud800-\udfff\ufdd0-\ufdef"  # surrogates, noncharacters
    "\U000e0000-\U000e0fff"  # tags, and variation selectors that can hide bytes in a text
    + "".join(chr(plane << 16 | 0xFFFE) + chr(plane << 16 | 0xFFFF) for plane in range(17))
)
# the characters that `sanitize` removes or replaces, because a terminal must not get them
SUSPECT = re.compile(f"[{_DROPPED}\u2028\u2029]")
_DROP = re.compile(f"[{_DROPPED}]")

# An escape sequence without an end ends after _CSI_LIMIT characters (a control string: after _STRING_LIMIT),
# so that the sequence cannot remove a whole reply.
_CSI_LIMIT = 64
_STRING_LIMIT = 4096


class _State(Enum):
    TEXT = auto()
    ESCAPE = auto()  # the last characters are ESC, or ESC and intermediate bytes
    CSI = auto()  # a control sequence (ESC [ and parameters) continues up to its final byte
    STRING = auto()  # a control string (OSC, DCS, SOS, PM, APC) continues up to BEL or the terminator ST
    STRING_ESCAPE = auto()  # ESC in a control string; ESC and a backslash are the terminator ST


_INTRODUCERS = {"\x9b": _State.CSI} | dict.fromkeys("\x90\x98\x9d\x9e\x9f", _State.STRING)
_AFTER_ESCAPE = {"[": _State.CSI} | dict.fromkeys("]PX^_", _State.STRING)


class Sanitizer:
    """A sanitiser of text that arrives in pieces. The joined output does not depend on the borders of the
    pieces."""

    def __init__(self) -> None:
        self._state = _State.TEXT
        self._length = 0  # the number of characters of the escape sequence so far
        self._after_cr = False

    def feed(self, text: str) -> str:
        """Sanitise the next piece. The sanitiser keeps no text for later calls, so the caller need not flush
        the sanitiser at the end."""
        if self._state is _State.TEXT and not self._after_cr and not SUSPECT.search(text):
            return text
        return "".join(map(self._one, text))

    def _one(self, char: str) -> str:
        if self._state is _State.TEXT:
            return self._text(char)
        self._length += 1
        return _HANDLERS[self._state](self, char)

    def _text(self, char: str) -> str:
        after_cr, self._after_cr = self._after_cr, char == "\r"
        if char == "\n":
            return "" if after_cr else "\n"
        if char in "\r\u2028\u2029":
            return "\n"
        if char == "\x1b" or char in _INTRODUCERS:
            return self._enter(_INTRODUCERS.get(char, _State.ESCAPE))
        return _DROP.sub("", char)

    def _enter(self, state: _State) -> str:
        self._state, self._length = state, 0
        return ""

    def _again(self, char: str) -> str:
        """End the current escape sequence before the character `char`, and handle `char` as if no sequence
        had begun."""
        self._state = _State.TEXT
        return self._text(char)

    def _escape(self, char: str) -> str:
        if char in _AFTER_ESCAPE and self._length == 1:
            return self._enter(_AFTER_ESCAPE[char])
        if " " <= char <= "/" and self._length < _CSI_LIMIT:
            return ""
        if "0" <= char <= "~":
            return self._enter(_State.TEXT)
        return self._again(char)

    def _csi(self, char: str) -> str:
        if "@" <= char <= "~":
            return self._enter(_State.TEXT)
        if " " <= char <= "?" and self._length < _CSI_LIMIT:
            return ""
        return self._again(char)

    def _string(self, char: str) -> str:
        if char in "\x07\x9c":
            return self._enter(_State.TEXT)
        if char == "\x1b":
            self._state = _State.STRING_ESCAPE
            return ""
        if char in "\r\n" or self._length >= _STRING_LIMIT:
            return self._again(char)
        return ""

    def _string_escape(self, char: str) -> str:
        if char == "\\":
            return self._enter(_State.TEXT)
        self._enter(_State.ESCAPE)
        self._length = 1
        return self._escape(char)


_HANDLERS = {
    _State.ESCAPE: Sanitizer._escape,
    _State.CSI: Sanitizer._csi,
    _State.STRING: Sanitizer._string,
    _State.STRING_ESCAPE: Sanitizer._string_escape,
}


def sanitize(text: str) -> str:
    """Return the text without the characters that the module's docstring lists."""
    return Sanitizer().feed(text)


def one_line(text: str) -> str:
    """Return the sanitised text on one line, for errors, titles and status texts."""
    return " ".join(sanitize(text).split())


def size(nbytes: float) -> str:
    """Return a number of bytes as text in decimal units, such as "900 B", "2.8 MB", "97 MB" or "16.3 GB".

    Texts for people use this function, so that their sizes have the same units. The units are those of macOS
    and of the shops: 1 MB is 1,000,000 bytes.
    """
    for unit, step, tenths in (("GB", 1e9, 100), ("MB", 1e6, 10), ("kB", 1e3, 10)):
        amount = nbytes / step
        if amount >= 0.9995:  # 999.6 MB are 1.0 GB, and not 1000 MB
            return f"{amount:.1f} {unit}" if amount < tenths - 0.05 else f"{amount:,.0f} {unit}"
    return f"{nbytes:.0f} B"


def count(number: int, name: str, plural: str = "") -> str:
    """Return a number with its noun: "1 chat", "1,204 chats". plural: the plural of the noun, if it is not
    the noun with "s"."""
    return f"{number:,} {name if number == 1 else plural or name + 's'}"


NAME = 200  # characters; `did_you_mean` looks for no longer word


def did_you_mean(word: str, known: Iterable[str], least: float = 0.6) -> str:
    """Return " Did you mean 'learn'?" for the end of an error, or "" if no known word is similar. least: the
    least similarity, from 0 to 1."""
    from difflib import get_close_matches

    if len(word) > NAME:  # the comparison of a very long word takes seconds
        return ""
    similar = get_close_matches(word, list(known), 1, least)
    return f" Did you mean {similar[0]!r}?" if similar else ""


PART = 3  # characters; a shorter part of a name is in too many names


def did_you_mean_model(name: str, known: Iterable[str]) -> str:
    """Return what `did_you_mean` returns for the name of a model. If no known name is similar, return the
    shortest name that has `name` as a part, for example the name with its maker or its size."""
    names = list(known)
    whole = [found for found in names if len(name) >= PART and name.casefold() in found.casefold()]
    return did_you_mean(name, names) or did_you_mean(name, sorted(whole, key=len)[:1], 0)


EXCERPT = 60  # the maximum number of characters of an excerpt


def excerpt(text: str, words: list[str]) -> str:
    """Return up to EXCERPT characters of a text around the first place where one of the words is (or from the
    beginning), on one line. An ellipsis marks each end that was cut."""
    line = one_line(text)
    low = line.lower()
    at = min((p for p in (low.find(word.lower()) for word in words) if p >= 0), default=0)
    start = max(0, min(at - EXCERPT // 3, len(line) - EXCERPT))
    cut = line[start : start + EXCERPT]
    return ("…" if start else "") + cut + ("…" if start + EXCERPT < len(line) else "")


def backend_words(backend: str, kernels: str) -> str:
    """Return the names of the backend and of its kernels, as text for people: "native avx2, 2 threads" or
    "mlx, metal"."""
    return kernels if kernels.startswith(backend) else f"{backend}, {kernels}"


def backend_in_words(backend: str, kernels: str) -> str:
    """Return what computes, for people who do not know the names: "C code on the CPU (native avx2)"."""
    return f"{_COMPUTES.get(backend, 'a backend')} ({backend_words(backend, kernels)})"


_COMPUTES = {
    "native": "C code on the CPU",
    "mlx": "Apple's library MLX",
    "hybrid": "two sides that share the work",
    "reference": "NumPy, slow, to compare with",
}

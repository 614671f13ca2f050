"""This module defines the rules of one setting: its type, its allowed values and their description in
words."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..text import size

_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?([kMG])B", re.ASCII)
_UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
_LONG = 10_000  # numbers from here on have commas in texts
KINDS = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class SettingSpec:
    """The rules for the values of one setting.

    kind: str, int, float, or bool; the user writes a bool as "on" or "off".
    choices: the allowed texts. pattern: a regular expression that matches the allowed texts.
    check: a second test after the pattern: a function that raises ValueError for a text that is not allowed.
    expected: a description of the allowed texts in words.
    least, most: the smallest and the largest allowed number.
    over: True if the value `least` is not allowed.
    under: True if the value `most` is not allowed.
    word: a text that the user can write instead of a number.
    nothing: a text that the user can write for the empty text.
    unset: a description of what happens if the setting has no value.
    is_size: True for an amount of memory. The value counts units of 1,048,576 bytes. The user may also write
        a size with a unit, such as "500MB" or "2GB".
    flag: the name of the command line flag if it differs from the setting's name.
    sampling: True if `sampling.Sampling` has a field of the same name.
    witnessed: True if the program records changes of the setting in the witness log, an append-only log
        that shows later edits.
    public: True if the values identify no person, so reports can contain the values.
    """

    kind: type
    doc: str
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    check: Callable[[str], object] | None = None
    expected: str = ""
    least: float | None = None
    most: int | None = None
    over: bool = False
    under: bool = False
    word: str = ""
    nothing: str = ""
    unset: str = ""
    flag: str = ""
    is_size: bool = False
    sampling: bool = False
    witnessed: bool = False
    public: bool = False

    def parse(self, value: Any) -> Any:
        """Return the value in the setting's type. Raises ValueError, whose text names the allowed values, for
        a value that is not allowed."""
        if self.kind is bool:
            return self._switch(value)
        if self.word and value == self.word:
            return value
        if self.nothing and value == self.nothing:
            return ""
        if self.is_size and (given := _SIZE.fullmatch(str(value))):
            value = math.ceil(float(given[1]) * _UNITS[given[2]] / (1 << 20))
        try:
            if isinstance(value, bool) or (self.kind is int and isinstance(value, float)):
                raise ValueError
            parsed = self.kind(value)
        except (TypeError, ValueError, OverflowError):
            kind = "" if self.word or self.is_size else KINDS[self.kind]
            raise ValueError(", ".join(filter(None, (kind, self.allowed_values)))) from None
        if not self.allows(parsed):
            raise ValueError(self.allowed_values)
        return parsed

    @staticmethod
    def _switch(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if value not in ("on", "off"):
            raise ValueError("on or off")
        return bool(value == "on")

    def allows(self, value: Any) -> bool:
        """Return True if the setting allows this value, which must have the setting's type."""
        if self.choices:
            return str(value) in self.choices
        if self.pattern is not None:
            return self.pattern.fullmatch(value) is not None and self._passes(value)
        if self.least is None:
            return True
        if (
            not -math.inf < value < math.inf  # also for an integer that no float holds
            or (self.over and value == self.least)
            or (self.under and value == self.most)
        ):
            return False
        return bool(self.least <= value and (self.most is None or value <= self.most))

    def _passes(self, text: str) -> bool:
        try:
            if self.check is not None:
                self.check(text)
        except ValueError:
            return False
        return True

    def display(self, value: Any) -> str:
        """Return a value of this setting as people read it: "on", "0.7", "10" or "1.1 GB"."""
        if self.is_size:
            return size(value << 20) if value else "0"
        if isinstance(value, float):
            return f"{value:.10g}"
        return ("off", "on")[value] if isinstance(value, bool) else str(value)

    @property
    def _range(self) -> str:
        low = f"over {self.least}" if self.over else f"{self.least} or more"
        if self.most is None:
            return low
        if self.over or self.under:
            return f"{low} and {'under' if self.under else 'at most'} {self.most}"
        most = f"{self.most:,}" if self.most >= _LONG else str(self.most)
        return f"from {self.least} to {most}"

    @property
    def allowed_values(self) -> str:
        """Return the allowed values in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.is_size:
            least = f", {size(int(self.least) << 20)} or more" if self.least else ""
            return f"a size, as in 500MB or 2GB{least}"
        if self.least is not None:
            return f"{self.word}, or {self._range}" if self.word else self._range
        return self.expected

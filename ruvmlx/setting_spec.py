"""The rules of one setting: its type, the values that it allows, and their description in words."""

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SettingSpec:
    """What one setting accepts.

    kind: str, int, float, or bool, which is written as on and off. choices, pattern: texts that are allowed;
    expected: the pattern in words. least, most: bounds of a number. word: a text that is allowed instead of
    a number; nothing: one that stands for no text. unset: what applies without a value, in words. flag: the
    flag's name where it is not the setting's own. sampling: a field of
    `sampling.Sampling` by the same name. witnessed: changes go into the witness log. public: values identify
    nobody, so reports may contain them.
    """

    kind: type
    doc: str
    choices: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    expected: str = ""
    least: int | None = None
    most: int | None = None
    word: str = ""
    nothing: str = ""
    unset: str = ""
    flag: str = ""
    sampling: bool = False
    witnessed: bool = False
    public: bool = False

    def parse(self, value: Any) -> Any:
        """The value in the setting's type; ValueError, with what was expected, if it is not allowed."""
        if self.kind is bool:
            return self._switch(value)
        if self.word and value == self.word:
            return value
        if self.nothing and value == self.nothing:
            return ""
        try:
            if isinstance(value, bool) or (self.kind is int and isinstance(value, float)):
                raise ValueError
            parsed = self.kind(value)
        except (TypeError, ValueError):
            raise ValueError(self.allowed if self.word else self.kind.__name__) from None
        if not self._allows(parsed):
            raise ValueError(self.allowed)
        return parsed

    @staticmethod
    def _switch(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if value not in ("on", "off"):
            raise ValueError("on or off")
        return bool(value == "on")

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return str(value) in self.choices
        if self.pattern is not None:
            return self.pattern.fullmatch(value) is not None
        if self.least is None:
            return True
        return bool(self.least <= value and (self.most is None or value <= self.most))

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.least is not None:
            words = f"{self.least} or more" if self.most is None else f"from {self.least} to {self.most}"
            return f"{self.word}, or {words}" if self.word else words
        return self.expected

"""This module reads fields of a JSON object and checks their types. A field with the value null is treated as
a missing field, as in transformers."""

from math import isfinite
from typing import Any

from ...errors import CorruptFile
from .error_text import value_in_words


class Fields:
    """A JSON object whose methods return fields of one type. The methods raise CorruptFile if the value has
    another type. where: the model's name, for error messages."""

    def __init__(self, data: dict[str, Any], where: str):
        self.data, self.where = data, where

    def _bad(self, key: str, value: Any, expected: str) -> CorruptFile:
        return CorruptFile(f"{self.where}: {key} is {value_in_words(value)}; {expected} was expected.")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not int:
            raise self._bad(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value: Any = self.data.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or abs(value) > 1e300 or not isfinite(value):
            raise self._bad(key, value, "a number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        values = self.data.get(key)
        if not isinstance(values, list):
            raise self._bad(key, values, "a list of numbers")
        return tuple(Fields({key: value}, self.where).number(key) for value in values)

    def flag(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self._bad(key, value, "true or false")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(key, value, "an object")
        return value

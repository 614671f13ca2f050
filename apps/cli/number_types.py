"""This module defines the types of flags that take numbers and dates. The library click says "'x' is not a
valid integer range", and names the formats of dates as "%Y-%m-%d"; these types say the same in plain words.
"""

from typing import Any

import click


class WholeNumber(click.IntRange):
    """A whole number between two bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except (TypeError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a whole number.", param, ctx)
        return super().convert(value, param, ctx)


class Date(click.DateTime):
    """A day, with a time or without one."""

    def __init__(self) -> None:
        super().__init__(["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not a date, as in 2026-11-20 or '2026-11-20 18:30'.", param, ctx)


class Number(click.FloatRange):
    """A number between two bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return super().convert(value, param, ctx)

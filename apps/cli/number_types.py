"""This module defines the types of flags that take numbers. The library click says "'x' is not a valid
integer range"; these types say the same in plain words."""

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


class Number(click.FloatRange):
    """A number between two bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return super().convert(value, param, ctx)

"""This module defines the types of arguments and flags that take the path of a file or folder to write. In
other programs, the path "-" is standard output."""

from typing import Any

import click


class NewPath(click.Path):
    """A file or folder that is not a text, or that the command reads again: the path "-" is an error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "-":
            self.fail(
                "standard output (-) cannot take this. Give a name, such as ./- for a file -.", param, ctx
            )
        return super().convert(value, param, ctx)


class OutputFile(click.Path):
    """A file of lines or of text. The path "-" is standard output, as if the flag was not given (None)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return None if value == "-" else super().convert(value, param, ctx)

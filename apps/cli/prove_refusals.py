"""This module refuses options of `ruvmlx prove` that have no effect beside --drawn or --suite."""

import click
from click.core import ParameterSource

from ruvmlx.errors import UsageError

_NOT_DRAWN = ("user", "scorer", "as_chat", "shuffle", "flip", "reverse", "oracle", "examples")
_NOT_SUITE = (
    "scorer", "ratings", "every", "as_chat", "thumbs", "questions", "best_of", "jobs", "examples", "oracle",
    "shuffle", "flip", "reverse", "as_json",
)  # fmt: skip


def refuse_for_drawn() -> None:
    _refuse(_NOT_DRAWN, "drawn users", "--drawn")


def refuse_for_suite() -> None:
    _refuse(_NOT_SUITE, "the suite, whose trials have their own values", "--suite")


def _refuse(names: tuple[str, ...], trials: str, other: str) -> None:
    """Raise UsageError if the command has an option of `names`. trials: words for the trials of the option
    `other`."""
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not ParameterSource.DEFAULT:
            raise UsageError(f"{option.opts[0]} is not for {trials}; leave out that flag or {other}.")

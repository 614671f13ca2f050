"""This module checks the arguments of the public API, so that a wrong type is one line of error."""

from typing import Any

from ..errors import UsageError

NO_ADAPTER = "none"  # in place of an adapter's name: no adapter


def check_text(text: Any, what: str) -> None:
    """Raise UsageError unless `text` is a text that UTF-8 can hold. what: its name in the error."""
    if not isinstance(text, str):
        raise UsageError(f"{what} is a text; got {kind_of(text)}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} has half of a character (a lone surrogate); give whole ones.") from None


def kind_of(value: Any) -> str:
    """Return the name of the value's type, for an error."""
    return type(value).__name__

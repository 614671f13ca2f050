"""This module makes text of unknown origin safe for error messages."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CorruptFile, RuvmlxError


def one_line(value: object, limit: int = 120) -> str:
    """Return the value as short, printable text on one line, because names and messages from files can
    contain any characters."""
    text = " ".join(str(value).split()).rstrip(".") or type(value).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else f"{text[: limit - 40]}...{text[-37:]}"


def value_in_words(value: object) -> str:
    """Return words for a value of a file: the value in quotes, or "missing" for None."""
    return "missing" if value is None else repr(str(value)[:40])


@contextmanager
def library(where: str) -> Iterator[None]:
    """Convert errors in a `with` block to CorruptFile, except RuvmlxError, KeyboardInterrupt, SystemExit and
    GeneratorExit. Use `library` around calls of a Rust library (tokenizers) with data of a file, because a
    panic in Rust raises a Python error that is no subclass of Exception."""
    try:
        yield
    except (RuvmlxError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - also a panic of Rust, which is no Exception
        raise CorruptFile(f"{where}: the library that reads it fails: {one_line(error)}.") from None

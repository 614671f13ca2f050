"""Makes text of unknown origin safe for error messages."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...errors import CorruptFile, RuvmlxError


def one_line(value: object, limit: int = 120) -> str:
    """Return printable, short text on one line, because names and messages from files may contain
    anything."""
    text = " ".join(str(value).split()).rstrip(".") or type(value).__name__
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else f"{text[: limit - 40]}...{text[-37:]}"


@contextmanager
def library(where: str) -> Iterator[None]:
    """For calls of a Rust library that reads a file or uses what it has read. Its panics are not Exceptions;
    they become CorruptFile."""
    try:
        yield
    except (RuvmlxError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001 - neither tokenizers nor Rust has a narrower class
        raise CorruptFile(f"{where}: the library that reads it fails: {one_line(error)}.") from None

"""This module reads the JSON files of strangers with a limit of memory. An error about a JSON file of a
model's folder has one line of text."""

import errno
import json
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, RuvmlxError
from ...platform.files import read_ordinary
from .error_text import one_line

MAX_BYTES = 200_000_000
_VALUE = 72  # bytes that a short value takes in Python: an empty object, and its place in a list
_SPARE = 200_000_000  # bytes that the values of a file can take in addition to twice the size of the file


def parse_json(data: bytes | bytearray, **options: Any) -> Any:
    """Return the value that the JSON text `data` has. options: as for `json.loads`. Raises ValueError if the
    text is no JSON, or if its values would take more memory than twice its size and 200 MB, and
    RecursionError if the values are nested too deeply."""
    # Each value but the first follows one of these characters. Texts have these characters, too, but seldom.
    values = sum(map(data.count, (b",", b":", b"[", b"{")))
    if values * _VALUE > 2 * len(data) + _SPARE:
        raise ValueError(f"it has about {values} values, which take too much memory")
    return json.loads(data, **options)


def read_object(path: Path, missing_ok: bool = True, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. missing_ok: True: return {} for a missing file; False: raise an
    error. limit: the maximum size of the file in bytes; a larger file raises CorruptFile."""
    try:
        value = parse_json(read_ordinary(path, limit))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise CorruptFile(f"{path.name} is missing from {path.parent}. Fetch the model again.") from None
    except OSError as error:
        # odd: True if the file is too large, or if it is a pipe or a device
        odd = error.errno in (errno.EFBIG, errno.EINVAL)
        kind = CorruptFile if odd else RuvmlxError
        raise kind(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"{path.name} is not sound JSON: {one_line(error)}. Fetch the model again."
        ) from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path.name} does not hold a JSON object. Fetch the model again.")
    return value

"""This module reads the JSON files of a model's folder and raises errors with one line of text."""

import errno
import json
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, RuvmlxError
from ...platform.files import read_ordinary
from .error_text import one_line

MAX_BYTES = 200_000_000


def read_object(path: Path, missing_ok: bool = True, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file. missing_ok: True: return {} for a missing file; False: raise an
    error. limit: the maximum size of the file in bytes; a larger file raises CorruptFile."""
    try:
        value = json.loads(read_ordinary(path, limit))
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

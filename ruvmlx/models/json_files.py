"""JSON files of a model folder, read with one-line errors."""

import json
from pathlib import Path
from typing import Any

from ..errors import CorruptFile, RuvmlxError
from .messages import one_line

MAX_BYTES = 200_000_000


def read_object(path: Path, missing_ok: bool = True, limit: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON object; {} for a file that may be missing and is. limit: bytes; a larger file is not read."""
    try:
        if path.stat().st_size > limit:
            raise CorruptFile(f"{path.name} is {path.stat().st_size} bytes; at most {limit} were expected.")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise CorruptFile(f"{path.name} is missing from {path.parent}. Fetch the model again.") from None
    except OSError as error:
        raise RuvmlxError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFile(
            f"{path.name} is not sound JSON: {one_line(error)}. Fetch the model again."
        ) from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path.name} does not hold a JSON object. Fetch the model again.")
    return value

"""This package has the data of models that take minutes to compute, such as the starter's. A user of such a
model need not wait for the data.

Each kind of data has a folder, and each model has a file in the folder. The scripts `write_probe` and
`write_directions` of tests/research and `prove --ship-basis` write the files.
"""

from pathlib import Path
from typing import Literal

Kind = Literal["directions", "probes", "style_bases"]
_FINGERPRINT_LENGTH = 16  # the number of characters of the model's fingerprint in a file name


def shipped_path(kind: Kind, fingerprint: str) -> Path:
    """Return the path of a model's file."""
    return Path(__file__).parent / kind / f"{fingerprint[:_FINGERPRINT_LENGTH]}.npz"


def shipped_bytes(kind: Kind, fingerprint: str) -> bytes | None:
    """Return the contents of a model's file; None if the package has no such file."""
    file = shipped_path(kind, fingerprint)
    return file.read_bytes() if file.is_file() else None

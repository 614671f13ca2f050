"""This package contains data that a learner needs about a model and that take seconds to minutes to compute:
KL probes, directions of measures, style bases and whitenings (embedding.py). The package now has these data
of the starter model only, so that its users need not wait.

Each kind of data has a folder, and the folder has a file for each model. The scripts `write_probe`,
`write_directions`, `style_study` and `gpu` of tests/research write the files.
"""

from pathlib import Path
from typing import Literal

Kind = Literal["directions", "probes", "style_bases", "whitenings"]
_FINGERPRINT_LENGTH = 16  # a file name has this number of characters of the model's fingerprint


def shipped_path(kind: Kind, fingerprint: str) -> Path:
    """Return the path of the file with this kind of data for a model."""
    return Path(__file__).parent / kind / f"{fingerprint[:_FINGERPRINT_LENGTH]}.npz"


def shipped_bytes(kind: Kind, fingerprint: str) -> bytes | None:
    """Return the contents of the file with this kind of data for a model; None if the package has no file for
    the model."""
    file = shipped_path(kind, fingerprint)
    return file.read_bytes() if file.is_file() else None

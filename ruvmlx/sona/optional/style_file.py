"""This module reads and writes the files of style bases (style_basis.py). The package contains the basis of
the starter model. The basis of another model is computed on the user's machine and stored in the data folder.

A basis belongs to a model, not to an adapter. So all adapters and stores of a user share the basis of a
model.
"""

from contextlib import suppress
from pathlib import Path

from ...platform.files import make_folder, remove, replacing
from ...settings import home
from ..shipped import shipped_bytes, shipped_path
from .style_bank import StyleBank
from .style_basis import StyleBasis

_FOLDER = "style"  # the name of the folder, inside the data folder, that has the files
_NAMED = 16  # a file name has this number of characters of the model's fingerprint


class StyleFiles:
    """The style basis of one model, and the unfinished bank from which it will be computed."""

    def __init__(self, fingerprint: str, folder: Path | None = None):
        """folder: the folder that has the files; None for the folder `style` in the data folder."""
        self._fingerprint, self._name = fingerprint, fingerprint[:_NAMED]
        self._folder = home() / _FOLDER if folder is None else folder

    @property
    def has_basis(self) -> bool:
        """True if the package or the folder has a file with the model's style basis. The file can be
        damaged."""
        return shipped_path("style_bases", self._fingerprint).is_file() or self._basis.is_file()

    def basis(self) -> StyleBasis | None:
        """Return the model's style basis; None if neither the package nor the folder has a sound one. With a
        basis, delete the bank that a killed `put_basis` left."""
        data = shipped_bytes("style_bases", self._fingerprint) or self._read(self._basis)
        found = StyleBasis.from_bytes(data) if data else None
        if found is not None:
            with suppress(OSError):
                remove(self._bank)
        return found

    def bank(self) -> StyleBank:
        """Return the stored bank, which has the finished part of the basis's computation; an empty bank if
        none is stored."""
        return StyleBank.from_bytes(self._read(self._bank))

    def put_bank(self, bank: StyleBank) -> None:
        """Store the bank. Raises OSError if the file cannot be written."""
        self._write(self._bank, bank.to_bytes())

    def put_basis(self, basis: StyleBasis) -> None:
        """Store a finished basis and delete the bank. Raises OSError if the file cannot be written."""
        self._write(self._basis, basis.to_bytes())
        remove(self._bank)

    def ship(self, basis: StyleBasis) -> None:
        """Write the basis into ruvmlx's own package, so that users of the model need not compute the basis.
        Raises OSError if the file cannot be written."""
        shipped_path("style_bases", self._fingerprint).write_bytes(basis.to_bytes())

    @property
    def _basis(self) -> Path:
        return self._folder / f"{self._name}.basis.npz"

    @property
    def _bank(self) -> Path:
        return self._folder / f"{self._name}.bank.npz"

    def _read(self, path: Path) -> bytes | None:
        with suppress(OSError):
            return path.read_bytes()
        return None

    def _write(self, path: Path, data: bytes) -> None:
        make_folder(self._folder)
        with replacing(path) as file:
            file.write(data)

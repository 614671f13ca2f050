"""This module finds the files that the user names in a chat. The app can run in another folder than the
user's terminal, or on another machine."""

import contextlib
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ruvmlx.errors import UsageError


@dataclass(frozen=True)
class UserFiles:
    """The files that the user can name. folder: the user's current folder, to which file names are relative.
    The folder is None if the user is on another machine, because the app cannot reach the files of that
    machine."""

    folder: Path | None = Path()

    def path(self, name: str) -> Path:
        """Return the path of a named file. Raise UsageError if the user is on another machine."""
        if self.folder is None:
            raise UsageError(
                f"{name[:40]!r} would be a file of the server's machine, and you are not on it; "
                "use `ruvmlx chat` or `ruvmlx sessions` there."
            )
        return self._at(self.folder, self.real_name(name))

    def real_name(self, name: str) -> str:
        """Return the name of a file without the quotes and backslashes of a shell. A terminal writes them if
        the user drops a file on it. If a file has the given name, return the name unchanged. Without quotes,
        remove backslashes only if the result is the name of a file."""
        if self.folder is None or os.path.exists(self._at(self.folder, name)):
            return name
        if name[:1] in ('"', "'"):
            with contextlib.suppress(ValueError):  # a quote without an end is a part of the name
                words = shlex.split(name)
                if len(words) == 1 and words[0]:
                    return words[0]
        plain = re.sub(r"\\(.)", r"\1", name)
        return plain if os.path.exists(self._at(self.folder, plain)) else name

    @staticmethod
    def _at(folder: Path, name: str) -> Path:
        return folder / os.path.expanduser(name)  # an unknown user causes no error

    def of_command(self, name: str) -> Path:
        """Return the path of a file that a command reads or writes. Raise UsageError as `path` does, and for
        "-", which other programs take as standard input or output."""
        if name == "-":
            raise UsageError(
                "a chat has no standard input or output (-). Give a name, such as ./- for a file -"
            )
        return self.path(name)

    def has(self, name: str) -> bool:
        return self.folder is not None and os.path.exists(self.path(name))

    def model(self, name: str) -> str:
        """Return the name of a model. If the name is the name of a file or a folder of the user, return the
        absolute path of this file or folder."""
        return str(self.path(name).absolute()) if self.has(name) else name


HERE = UserFiles()

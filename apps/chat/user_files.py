"""Files that the user names in a chat. The app may run in another folder, or on another machine."""

from dataclasses import dataclass
from pathlib import Path

from ruvmlx.errors import UsageError


@dataclass(frozen=True)
class UserFiles:
    """folder: where the user is, to which names are relative; None: on another machine, whose files the app
    cannot reach."""

    folder: Path | None = Path()

    def path(self, name: str) -> Path:
        """The file of that name; UsageError if it is out of reach."""
        if self.folder is None:
            raise UsageError(
                f"{name[:40]!r} would be a file of the server's machine, and you are not on it; "
                "use `ruvmlx chat` or `ruvmlx sessions` there."
            )
        return self.folder / Path(name).expanduser()

    def has(self, name: str) -> bool:
        return self.folder is not None and self.path(name).exists()

    def model(self, name: str) -> str:
        """The name of a model; of a file or a folder here, its whole path."""
        return str(self.path(name).absolute()) if self.has(name) else name


HERE = UserFiles()

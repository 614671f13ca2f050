"""This module reads the values of the settings from their sources.

The first source that has a value decides: the flag, the environment variable RUVMLX_*, the project file, the
user file, then the default. The project file is `ruvmlx.toml` in the working folder. The user file is
`config.toml` in the data folder.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import UsageError
from ..platform import files
from .table import SPECS, Settings, parse, spec_of

MAX_FILE_BYTES = 1 << 20  # the maximum size of a settings file


def home() -> Path:
    """Return the data folder, in which ruvmlx keeps the user's data. Raises UsageError if RUVMLX_HOME names
    the home of an unknown user."""
    moved = os.environ.get("RUVMLX_HOME")
    try:
        folder = Path(moved).expanduser() if moved else platformdirs.user_data_path("ruvmlx", appauthor=False)
    except RuntimeError as e:
        raise UsageError(f"RUVMLX_HOME is {moved!r}, and this machine has no such user.") from e
    return folder.absolute()


def user_file() -> Path:
    """Return the path of the user file, whose settings apply in every working folder."""
    return home() / "config.toml"


def project_file() -> Path:
    """Return the path of the project file, whose settings apply only if the program runs in the file's
    folder."""
    return Path("ruvmlx.toml")


def store_file() -> Path:
    """Return the path of the database of chats, ratings and adapters."""
    return home() / "ruvmlx.db"


def variable(name: str) -> str:
    """Return the name of the setting's environment variable."""
    return f"RUVMLX_{name.upper()}"


def load(flags: Mapping[str, Any] | None = None, origin: str = "flag") -> Settings:
    """Return the settings from all sources. A flag with the value None and an empty environment variable are
    treated as not given. origin: the words with which an error names the source of a value in `flags`.
    Raises UsageError for a bad value."""
    return Settings(**{name: found.value for name, found in resolve(flags, origin).items()})


@dataclass(frozen=True)
class Resolved:
    """The value of a setting, and the name of the source from which the value comes."""

    value: Any
    origin: str


def resolve(flags: Mapping[str, Any] | None = None, origin: str = "flag") -> dict[str, Resolved]:
    """Return every setting's value with its source. origin: the `Resolved.origin` of a value in `flags`."""
    sources = _sources(flags or {}, origin)
    return {name: _first(name, sources) for name in SPECS}


def resolve_one(name: str) -> Resolved:
    """Return one setting's value with its source. A bad value of another setting causes no error."""
    return _first(name, _sources({}))


def _sources(flags: Mapping[str, Any], origin: str = "flag") -> list[tuple[str, Mapping[str, Any]]]:
    """Return the sources with their values, the first source first."""
    project, user = read_file(project_file()), read_file(user_file())
    return [
        (origin, {k: v for k, v in flags.items() if v is not None}),
        ("environment", _environment()),
        (str(project_file()), project),
        (str(user_file()), user),
    ]


def _first(name: str, sources: list[tuple[str, Mapping[str, Any]]]) -> Resolved:
    for origin, values in sources:
        if name in values:
            return Resolved(parse(name, values[name], origin), origin)
    return Resolved(getattr(Settings, name), "default")


def _environment() -> dict[str, str]:
    found = {name: os.environ.get(variable(name)) for name in SPECS}
    return {name: value for name, value in found.items() if value}


def read_file(path: Path) -> dict[str, Any]:
    """Return the values in a settings file, or {} if the file does not exist. Raises UsageError if the file
    cannot be read or has an unknown setting."""
    try:
        values = tomllib.loads(files.read_ordinary(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):  # if the folder is unusable, the store reports this later
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot read {path}: {why}. Mend or remove it.") from e
    for name in values:
        spec_of(name, f"{path}: ")
    return values

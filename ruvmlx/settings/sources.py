"""Where the values of settings come from: flag > RUVMLX_* environment > project toml > user toml > default.

The project file is `ruvmlx.toml` in the working folder, the user file `config.toml` in the data folder.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import platformdirs

from ..errors import UsageError
from ..platform import files
from .table import SPECS, Settings, parse, spec_of

MAX_FILE_BYTES = 1 << 20  # bytes of a file of settings


def home() -> Path:
    """The folder that holds all of the user's data."""
    moved = os.environ.get("RUVMLX_HOME")
    folder = Path(moved).expanduser() if moved else platformdirs.user_data_path("ruvmlx", appauthor=False)
    return folder.absolute()


def user_file() -> Path:
    """The settings that hold everywhere."""
    return home() / "config.toml"


def project_file() -> Path:
    """The settings that hold in the working folder."""
    return Path("ruvmlx.toml")


def store_file() -> Path:
    """The database of chats, ratings and adapters."""
    return home() / "ruvmlx.db"


def variable(name: str) -> str:
    """The setting's environment variable."""
    return f"RUVMLX_{name.upper()}"


def load(flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings in force. Flags that are None were not given; UsageError for a value not allowed."""
    return Settings(**{name: found.value for name, found in resolve(flags).items()})


@dataclass(frozen=True)
class Resolved:
    """A value and where it came from."""

    value: Any
    origin: str


def resolve(flags: Mapping[str, Any] | None = None) -> dict[str, Resolved]:
    """Every setting's value, with the source that decided it."""
    project, user = read_file(project_file()), read_file(user_file())
    sources: list[tuple[str, Mapping[str, Any]]] = [
        ("flag", {k: v for k, v in (flags or {}).items() if v is not None}),
        ("environment", _environment()),
        (str(project_file()), project),
        (str(user_file()), user),
    ]
    return {setting.name: _first(setting.name, setting.default, sources) for setting in fields(Settings)}


def _first(name: str, default: Any, sources: list[tuple[str, Mapping[str, Any]]]) -> Resolved:
    for origin, values in sources:
        if name in values:
            return Resolved(parse(name, values[name], origin), origin)
    return Resolved(default, "default")


def _environment() -> dict[str, str]:
    found = {name: os.environ.get(variable(name)) for name in SPECS}
    return {name: value for name, value in found.items() if value}


def read_file(path: Path) -> dict[str, Any]:
    """The values in a file of settings, {} without one. UsageError for a file that cannot be read."""
    try:
        values = tomllib.loads(files.read_ordinary(path, MAX_FILE_BYTES).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # opening the store reports an unusable folder
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        why = getattr(e, "strerror", None) or e
        raise UsageError(f"cannot read {path}: {why}. Mend or remove it.") from e
    for name in values:
        spec_of(name, f"{path}: ")
    return values

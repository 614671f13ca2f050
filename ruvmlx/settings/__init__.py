"""This package defines the settings, checks their values, and reads the values from flags, environment and
files.

The package imports only `platform`, `tiers`, `text` and `errors`; `meanings.py` explains each setting in
plain words, and the code that uses a setting has the details. Start with `table.py`, the list of all
settings, then read `sources.py` (flags, environment, files) and `settings_file.py`, which changes the user's
file.
"""

from .meanings import GROUPS
from .sources import (
    MAX_FILE_BYTES,
    Resolved,
    home,
    load,
    project_file,
    resolve,
    resolve_one,
    store_file,
    user_file,
    variable,
)
from .table import (
    AUTO,
    BASE_TARGETS,
    SAMPLING,
    SPECS,
    TARGETS,
    TARGETS_EXPECTED,
    Settings,
    parse,
    setting_text,
)

__all__ = [
    "AUTO",
    "BASE_TARGETS",
    "GROUPS",
    "MAX_FILE_BYTES",
    "SAMPLING",
    "SPECS",
    "TARGETS",
    "TARGETS_EXPECTED",
    "Resolved",
    "Settings",
    "home",
    "load",
    "parse",
    "project_file",
    "resolve",
    "resolve_one",
    "setting_text",
    "store_file",
    "user_file",
    "variable",
]

"""This module removes personal data from reports: the user's words, names, file paths, host names, tokens.

There are two filters. The first filter takes only chosen facts: from an error, it takes the class and the
place in the code, and the message only if the message has the form of MLX's messages. The second filter
removes paths, addresses and known names from every string of the finished report.
"""

import contextlib
import getpass
import os
import re
import socket
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ruvmlx
from ruvmlx import settings as config
from ruvmlx.errors import RuvmlxError

REMOVED = "<removed>"
_PACKAGE = Path(ruvmlx.__file__).parent
_APPS = Path(__file__).parent
# This pattern matches quoted paths, which can contain spaces, other paths and addresses, e-mail addresses,
# and long runs of letters and digits, for example access tokens.
_PERSONAL = re.compile(
    r"""'[^']*[/\\][^']*'|"[^"]*[/\\][^"]*"|"""
    r"(?:\w+:)?(?:~|\.{1,2})?[/\\](?![\s/\\]|$)\S*|\S+@\S+\.\w+|\b(?=\w*\d)(?=\w*[a-zA-Z])[\w-]{24,}\b"
)
_OURS = re.compile(r"\b(?:ruvmlx|apps)/[\w/]+\.py:\d+")
_SHORT = 3  # letters; shorter names stay in the text, because they can be ordinary words
_MAX_ERROR_CHARACTERS = 600  # the maximum number of characters of an error message


def public_error(error: BaseException) -> str:
    """Return an error without text that can quote the user: "StoreError at ruvmlx/store/database.py:88"."""
    told = f"{type(error).__name__} at {_place(error)}"
    words = " ".join(str(error).split())
    # MLX begins its messages with the operation in brackets. Other messages can quote the user's text.
    if isinstance(error, RuntimeError | ValueError) and words.startswith("["):
        told += f": {words[:_MAX_ERROR_CHARACTERS]}"
    return remove_private(told, known_names())


def _place(error: BaseException) -> str:
    """Return the innermost line of ruvmlx's own code in the error's traceback, as "file:line"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for name, folder in (("apps", _APPS), ("ruvmlx", _PACKAGE)):
            if Path(frame.filename).is_relative_to(folder):
                return f"{name}/{Path(frame.filename).relative_to(folder).as_posix()}:{frame.lineno}"
    return "an unknown place"


def known_names() -> set[str]:
    """Return the names of this machine, of its user and of the user's settings, the paths of the user's
    folders with the names of the folders in them, and the user's Hugging Face token."""
    found: set[str] = {os.environ.get(name, "") for name in ("HOME", "USER", "LOGNAME", "HOSTNAME")}
    with contextlib.suppress(OSError, KeyError, ImportError):
        found.add(getpass.getuser())
    with contextlib.suppress(OSError):
        found |= {socket.gethostname(), socket.gethostname().split(".")[0], os.uname().nodename}
    found |= {str(Path.home()), str(config.home()), os.environ.get("HF_TOKEN", "")}
    with contextlib.suppress(RuvmlxError):
        settings = config.load()
        found |= {settings.model or "", settings.adapter, settings.system or ""}
    return found | {part for name in found if "/" in name for part in Path(name).parts}


def remove_private(text: str, names: Iterable[str]) -> str:
    """Return the text without paths, addresses and these names. Places in ruvmlx's own code stay."""
    kept = _OURS.findall(text)
    pieces = [_clean_piece(piece, names) for piece in _OURS.split(text)]
    return "".join(piece + place for piece, place in zip(pieces, [*kept, ""], strict=True))


def _clean_piece(text: str, names: Iterable[str]) -> str:
    for name in sorted(names, key=len, reverse=True):
        if len(name) >= _SHORT and name not in _COMMON:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", REMOVED, text, flags=re.IGNORECASE)
    return _PERSONAL.sub(REMOVED, text)


# Parts of paths and values of settings that identify nobody. For example, ruvmlx is the data folder's name.
_COMMON = set("home Users root default none auto tmp opt usr local share Library ruvmlx mlx model".split())  # noqa: SIM905


def clean_json(value: Any, names: Iterable[str]) -> Any:
    """Return a JSON value in which `remove_private` has cleaned every string. The keys of objects stay,
    because the program wrote them."""
    if isinstance(value, str):
        return remove_private(value, names)
    if isinstance(value, dict):
        return {key: clean_json(item, names) for key, item in value.items()}
    return [clean_json(item, names) for item in value] if isinstance(value, list | tuple) else value

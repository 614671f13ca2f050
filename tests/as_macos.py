"""A pytest plugin that takes from the tests' own code what macOS does not have: `pytest -p tests.as_macos`.

/proc and /dev/full do not exist, and RLIMIT_AS cannot be set. The code under test keeps them: it asks
`sys.platform` first, and here that says "linux". Programs that a test starts are not changed.
"""

import builtins
import errno
import io
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = str(Path(__file__).parent) + os.sep
MISSING = ("/proc", "/dev/full")
# Modules that open files for others: whoever called them asks.
RELAYS = set("pathlib pathlib._local pathlib._os genericpath posixpath os".split()) | {__name__}  # noqa: SIM905


def pytest_configure() -> None:
    for module, name in (
        (builtins, "open"), (io, "open"), (os, "open"), (os, "listdir"), (os, "scandir"), (os, "readlink"),
        (os, "stat"), (os, "lstat"), (os, "access"),
    ):  # fmt: skip
        setattr(module, name, _without_files(getattr(module, name)))
    resource.setrlimit = _without_address_space(resource.setrlimit)


def _without_files(real: Callable[..., Any]) -> Callable[..., Any]:
    def call_as_macos(path: Any = ".", *more: Any, **named: Any) -> Any:
        if is_missing(path) and _a_test_asks():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *more, **named)

    return call_as_macos


def _without_address_space(real: Callable[..., None]) -> Callable[..., None]:
    def set_limit_as_macos(kind: int, limits: tuple[int, int]) -> None:
        if kind == resource.RLIMIT_AS and _a_test_asks():
            raise ValueError("current limit exceeds maximum limit")  # Python's words for EINVAL
        real(kind, limits)

    return set_limit_as_macos


def is_missing(path: Any) -> bool:
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    name = os.fsdecode(path)
    return any(name == missing or name.startswith(missing + "/") for missing in MISSING)


def _a_test_asks() -> bool:
    """Is the innermost caller outside the standard library's own relays a file of tests/?"""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "") in RELAYS:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(TESTS)

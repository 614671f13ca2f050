"""Which part of the suite a test belongs to.  Every test has exactly one kind, and this file gives it.

    unit     no compiler, no model but tiny random ones, all of them in less than a minute
    model    a backend, the starter model, or learning that runs a tiny model for seconds
    kernels  the C library, the GPU kernels and the wheels: most of them compile
    app      apps/: the chat, the command line, bench and prove

`slow` comes on top: a test that takes more than 5 s, or that --full makes longer.

    pytest -m unit -n 2        pytest -m "model and not slow"
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ruvmlx.models.resolve import starter_path

TESTS = Path(__file__).parent
KINDS = ("unit", "model", "kernels", "app")
FOLDERS = {
    "kernels": "kernels", "metal": "kernels", "wheels": "kernels",
    "chat": "app", "cli": "app", "bench": "app", "prove": "app",
    "backends": "model",
}  # fmt: skip
# Fixtures that read the starter model.
STARTER = {"starter", "starter_file", "starter_backend"}
# Files of other folders that run a tiny model for seconds.
RUN_A_MODEL: set[str] = set()
# Files, or single tests, of more than 5 s on one core.
SLOW: set[str] = set()

COMPILERS = (
    "gcc",
    "g++",
    "clang",
    "clang++",
    "cc",
    "c++",
    "cmake",
    "ninja",
    "make",
    "nvcc",
    "zig",
    "ziglang",
)


def mark(item: pytest.Item) -> None:
    """Give a collected test its kind, and `slow` where it is."""
    item.add_marker(kind(item))
    if is_slow(item):
        item.add_marker("slow")


def kind(item: pytest.Item) -> str:
    if fixtures(item) & STARTER or place(item) in RUN_A_MODEL:
        return "model"
    return FOLDERS.get(place(item).split("/")[0], "unit")


def is_slow(item: pytest.Item) -> bool:
    function = item.name.partition("[")[0]
    return "full" in fixtures(item) or bool({place(item), f"{place(item)}::{function}"} & SLOW)


def place(item: pytest.Item) -> str:
    """sona/test_signal.py"""
    return item.path.relative_to(TESTS).as_posix()


def fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


class _Guard:
    """Fails the unit test that is running as soon as it starts a compiler or opens the starter model."""

    def __init__(self) -> None:
        self.on, self.starter = False, str(starter_path())
        sys.addaudithook(self._heard)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "subprocess.Popen" and (name := compiler(args[0], args[1])):
            pytest.fail(f"a unit test starts {name}; tests/kinds.py says which tests may")
        if event == "open" and str(args[0]) == self.starter:
            pytest.fail("a unit test opens the starter model; take the fixture starter or starter_file")


GUARD = _Guard()


@contextmanager
def guarded(on: bool) -> Iterator[None]:
    """With the rules of unit tests, or without."""
    before, GUARD.on = GUARD.on, on
    try:
        yield
    finally:
        GUARD.on = before


def compiler(program: Any, command: Any) -> str:
    """The compiler that a command line starts, or nothing; `python -m ziglang` and `sh -c 'gcc x.c'`."""
    words = [str(program), *(map(str, command) if isinstance(command, (list, tuple)) else [str(command)])]
    names = [re.sub(r"-[0-9.]+$", "", Path(word).name) for word in " ".join(words[:4]).split()[:4]]
    return next((name for name in names if name in COMPILERS), "")

"""Counts the files that a call passes on its way: from where a user asks to where the work is done.

    with Relays("ruvmlx/engine/scheduler.py") as way:
        ask()
    print(way.files)        # in the order in which they pass the call on

A file counts if one of its functions is on the stack when the work begins. What hands the work to another
thread or task counts, too: the stack of a thread or task begins with the stack of whoever started it.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = f"{Path(__file__).parents[1]}/"
OURS = ("ruvmlx/", "apps/")

_origin: ContextVar[tuple[str, ...]] = ContextVar("_origin", default=())


def place(frame: FrameType) -> str:
    """The file of a frame, relative to the repository."""
    return frame.f_code.co_filename.removeprefix(ROOT)


def without_repeats(files: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(files))


def way_to_here(frame: FrameType | None) -> tuple[str, ...]:
    """Our files from the user to this frame, each once."""
    found = []
    while frame is not None:
        if place(frame).startswith(OURS) and frame.f_code.co_name != "<module>":
            found.append(place(frame))
        frame = frame.f_back
    return without_repeats([*_origin.get(), *reversed(found)])


class Relays:
    """files: those on the way to the first call of `function` in `goal`; empty if there was none.

    Threads count only if they start inside the `with` block.
    """

    def __init__(self, goal: str, function: str = "") -> None:
        self.files: tuple[str, ...] = ()
        self._goal, self._function = goal, function
        self._armed = False

    def begin(self) -> None:
        """Count from now on."""
        self.files, self._armed = (), True

    def __enter__(self) -> "Relays":
        self._submit, self._create_task = ThreadPoolExecutor.submit, asyncio.BaseEventLoop.create_task
        submit, create_task = self._submit, self._create_task

        def submit_with_origin(pool: Any, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            way = way_to_here(sys._getframe(1))

            def run() -> Any:
                token = _origin.set(way)
                try:
                    return work(*args, **kwargs)
                finally:
                    _origin.reset(token)

            return submit(pool, run)

        def create_with_origin(loop: Any, coroutine: Any, *, context: Any = None, **kwargs: Any) -> Any:
            context = copy_context() if context is None else context.copy()
            context.run(_origin.set, way_to_here(sys._getframe(1)))
            return create_task(loop, coroutine, context=context, **kwargs)

        ThreadPoolExecutor.submit = submit_with_origin  # type: ignore[method-assign]
        asyncio.BaseEventLoop.create_task = create_with_origin  # type: ignore[method-assign]
        threading.setprofile(self._watch)
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]
        asyncio.BaseEventLoop.create_task = self._create_task  # type: ignore[method-assign]

    def _watch(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._armed or event != "call" or place(frame) != self._goal:
            return
        if self._function in ("", frame.f_code.co_name):
            self._armed, self.files = False, way_to_here(frame)

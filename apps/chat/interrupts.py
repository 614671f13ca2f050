"""This module handles Ctrl-C and the signals that end the process (SIGHUP, SIGTERM) in plain mode."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Self

from ruvmlx.platform.bounded_process import stop_requests

from . import exit_signals


class Interrupts:
    """Decides the effect of Ctrl-C: it stops the reply, leaves the prompt, or waits until a commit is done.

    Other signals stop the reply and end the chat. `ended_by` is the number of such a signal, or 0.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self._heard = contextlib.ExitStack()
        self._cancel: threading.Event | None = None
        self._raise = False
        self._pending = False

    def __enter__(self) -> Self:
        self._heard.enter_context(exit_signals.heard(self._on_signal, (signal.SIGINT, *exit_signals.SIGNALS)))
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.close()

    def stop(self) -> None:
        """End the reply that is being written, if there is one."""
        if self._cancel is not None:
            self._cancel.set()

    def _on_signal(self, signum: int) -> None:
        if signum != signal.SIGINT:
            self.ended_by, self._pending = signum, True
        stop_requests()
        if self._cancel is not None:
            self._cancel.set()
        elif self._raise:
            raise KeyboardInterrupt
        else:
            self._pending = True

    @contextlib.contextmanager
    def setting(self, cancel: threading.Event) -> Iterator[None]:
        """In the block, Ctrl-C sets `cancel`."""
        self._cancel = cancel
        try:
            yield
        finally:
            self._cancel = None

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """In the block, Ctrl-C raises KeyboardInterrupt. After a Ctrl-C before the block, the block raises
        KeyboardInterrupt at its start."""
        self._raise = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._raise = False

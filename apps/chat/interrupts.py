"""This module handles Ctrl-C and the signals that end the process (SIGHUP, SIGTERM) in plain mode."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from typing import Self, TextIO

from ruvmlx.platform.bounded_process import stop_requests

from . import exit_signals


class Interrupts:
    """The object that decides what Ctrl-C does in plain mode: stop the reply, end the chat at the prompt, or
    wait until the store has saved its data.

    SIGHUP and SIGTERM stop the reply and end the chat. `ended_by` is the number of the signal that ended the
    chat, or 0.
    """

    def __init__(self) -> None:
        self.ended_by = 0
        self._heard = contextlib.ExitStack()
        self._cancel: threading.Event | None = None
        self._raise = False
        self._pending = False
        self._woken: int | None = None  # a pipe that can be read after a signal

    def __enter__(self) -> Self:
        self._woken = self._heard.enter_context(exit_signals.wakeups())
        self._heard.enter_context(exit_signals.heard(self._on_signal, (signal.SIGINT, *exit_signals.SIGNALS)))
        return self

    def __exit__(self, *_: object) -> None:
        self._heard.close()
        self._woken = None

    def wait_for_line(self, terminal: TextIO) -> None:
        """Wait until the terminal has a line of input. Handle the signals that come meanwhile.

        Python calls a signal handler only between two Python instructions. A signal can come immediately
        before a blocking read. Without this wait, Python would call the handler only after the user presses
        Enter.
        """
        keys = terminal.fileno()
        while self._woken is not None:
            ready, _, _ = select.select([keys, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 512)
            if keys in ready:
                return

    def stop(self) -> None:
        """End the reply if the model writes a reply now."""
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
        """Let Ctrl-C, SIGHUP and SIGTERM set the event `cancel` within the `with` block."""
        self._cancel = cancel
        try:
            yield
        finally:
            self._cancel = None

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Let Ctrl-C, SIGHUP and SIGTERM raise KeyboardInterrupt within the `with` block. Raise it at the
        block's start if SIGHUP, SIGTERM or a Ctrl-C that stopped no work came before the block."""
        self._raise = True
        try:
            if self._pending:
                raise KeyboardInterrupt
            yield
        finally:
            self._raise = False

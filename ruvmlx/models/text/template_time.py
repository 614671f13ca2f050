"""This module limits the time that a chat template can use for one conversation."""

import time

from jinja2.sandbox import SecurityError

MAX_SECONDS = 1.5  # of processor time, for all renders of one conversation
# The template can work for this time beyond the limit. A virtual machine counts a pause of the machine as
# processor time, and most templates end within a millisecond after such a pause.
EXTRA_SECONDS = 0.1


class TimeLimit:
    """A time limit of MAX_SECONDS of processor time. The time starts when this object is made."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + MAX_SECONDS
        self._started = time.thread_time()
        self._is_over = False

    def check(self) -> None:
        if time.monotonic() < self._deadline:
            return
        # The limit applies to processor time, because a busy machine slows every template.
        left = MAX_SECONDS - (time.thread_time() - self._started)
        if left <= 0 and self._is_over:
            raise SecurityError(f"it ran for more than {MAX_SECONDS:g} seconds")
        self._is_over = left <= 0
        self._deadline = time.monotonic() + (EXTRA_SECONDS if self._is_over else left)

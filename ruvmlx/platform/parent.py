"""This module ends the current process soon after the end of its parent process, no matter why the parent
process ended."""

import os
import threading
import time

POLL = 0.5  # seconds between two checks of the parent process


def end_with_parent() -> None:
    """Start a thread that ends this process when its parent has ended. Unfinished work of this process is
    lost."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)

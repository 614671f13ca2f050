"""A process that ends soon after the one that started it, however that one ended."""

import os
import threading
import time

POLL = 0.5  # seconds


def end_with_parent() -> None:
    """From now on end this process when its parent has ended. Whatever it does then is lost."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)

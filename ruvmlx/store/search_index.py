"""The full-text index of all messages, and how deleted words leave the index.

FTS5 only marks deleted words. The words leave the file when the parts of the index are merged into one. That
takes seconds in a large store (1 s at 30,000 messages). So the merge runs in steps of some milliseconds, one
transaction each, and other processes can write in between. The table `index_cleaning` records what is left to
do, so the next start continues after a kill.
"""

import math
import time

from .database import Database

_PAGES = 64  # pages of the index that one step writes: about 10 ms
_LONGEST_PAUSE = 0.05  # the maximum number of seconds between two steps


class SearchIndex:
    """Cleans `messages_text`. Triggers fill that index (schema.py)."""

    def __init__(self, db: Database):
        self._db = db

    def mark(self) -> None:
        """Note that messages were deleted, so that `clean` has work. Call inside the transaction that deletes
        them."""
        self._set(deleted=1)

    def is_clean(self) -> bool:
        """Have all deleted words left the index?"""
        row = self._db.row("SELECT deleted, merging FROM index_cleaning")
        return row is None or not (row["deleted"] or row["merging"])

    def clean(self, seconds: float = math.inf) -> bool:
        """Remove deleted words, for about this many seconds. Returns True when none is left.

        After each step it waits as long as the step took. SQLite gives the lock to the first process that
        asks, and waiting processes ask again only after a pause.
        """
        end = time.monotonic() + seconds
        while not self.is_clean():
            began = time.monotonic()
            if began >= end:
                return False
            self._step()
            time.sleep(min(time.monotonic() - began, _LONGEST_PAUSE))
        return True

    def _step(self) -> None:
        """Merge at most _PAGES pages. Other processes may do steps of the same work."""
        with self._db.transaction():
            if self._db.value("SELECT merging FROM index_cleaning"):
                if not self._merge(_PAGES):
                    self._set(merging=0)
            elif self._db.value("SELECT deleted FROM index_cleaning"):
                self._set(deleted=0, merging=1)
                self._merge(-_PAGES)  # negative: from now on, merge all parts into one

    def _merge(self, pages: int) -> bool:
        """Merge some pages. Returns whether there was anything to merge: fewer than two changes mean no.
        (FTS5's documentation, 6.8)"""
        before = self._db.changes
        self._db.execute("INSERT INTO messages_text(messages_text, rank) VALUES ('merge', ?)", pages)
        return self._db.changes - before >= 2

    def _set(self, **columns: int) -> None:
        for column, value in columns.items():
            self._db.execute(f"UPDATE index_cleaning SET {column} = ?", value)

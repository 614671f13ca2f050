"""This module cleans the full-text index of all messages, so that deleted words leave the index.

FTS5 only marks deleted words. The words leave the file when the parts of the index are merged into one part.
The merge takes seconds in a large store (1 s at 30,000 messages). To let other processes write in between,
the merge runs in steps of some milliseconds, each in a transaction. The table `index_cleaning` records the
remaining work, so that the next start continues this work if the process was killed.
"""

import math
import time

from .database import Database

_PAGES = 64  # the number of index pages that one step writes: about 10 ms
_LONGEST_PAUSE = 0.05  # the maximum number of seconds between two steps


class SearchIndex:
    """This class removes deleted words from the full-text index `messages_text`. SQL triggers fill this index
    (schema.py)."""

    def __init__(self, db: Database):
        self._db = db

    def mark(self) -> None:
        """Note that messages were deleted, so that `clean` has work. Call `mark` inside the transaction that
        deletes the messages."""
        self._set(deleted=1)

    def is_clean(self) -> bool:
        """Return True if all deleted words have left the index."""
        row = self._db.row("SELECT deleted, merging FROM index_cleaning")
        return row is None or not (row["deleted"] or row["merging"])

    def clean(self, seconds: float = math.inf) -> bool:
        """Remove deleted words, for about this many seconds. Returns True if no deleted word is left.

        After each step the loop waits as long as the step took (at most _LONGEST_PAUSE), because SQLite gives
        the lock to the first process that asks, and waiting processes ask again only after a pause.
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
        """Merge at most _PAGES pages of the index. Other processes can run steps of the same merge."""
        with self._db.transaction():
            if self._db.value("SELECT merging FROM index_cleaning"):
                if not self._merge(_PAGES):
                    self._set(merging=0)
            elif self._db.value("SELECT deleted FROM index_cleaning"):
                self._set(deleted=0, merging=1)
                # a negative number: from now on, merge all parts of the index into one part
                self._merge(-_PAGES)

    def _merge(self, pages: int) -> bool:
        """Merge some pages. Returns True if there was work: FTS5 then makes two or more changes (FTS5's
        documentation, 6.8)."""
        before = self._db.changes
        self._db.execute("INSERT INTO messages_text(messages_text, rank) VALUES ('merge', ?)", pages)
        return self._db.changes - before >= 2

    def _set(self, **columns: int) -> None:
        for column, value in columns.items():
            self._db.execute(f"UPDATE index_cleaning SET {column} = ?", value)

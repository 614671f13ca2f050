"""The full-text index of all messages, and how deleted words leave it.

FTS5 only marks what is deleted; the words leave the file when the parts of the index are merged to one. That
takes seconds in a large store (1 s at 30,000 messages), so it is done in steps of some milliseconds, a
transaction each; other processes write between them. The table `index_cleaning` says what is left to do, so
the next start continues after a kill.
"""

import math
import time

from .database import Database

_PAGES = 64  # of the index that one step writes: about 10 ms
_LONGEST_PAUSE = 0.05  # seconds between two steps


class SearchIndex:
    """Cleans `messages_text`, which triggers fill (schema.py)."""

    def __init__(self, db: Database):
        self._db = db

    def mark(self) -> None:
        """Note that messages are deleted, so that `clean` has work. Call inside their transaction."""
        self._set(deleted=1)

    def is_clean(self) -> bool:
        """Have all deleted words left the index?"""
        row = self._db.row("SELECT deleted, merging FROM index_cleaning")
        return row is None or not (row["deleted"] or row["merging"])

    def clean(self, seconds: float = math.inf) -> bool:
        """Remove deleted words, for about this long; True when none is left.

        Waits between two steps as long as a step took: SQLite gives the lock to whoever asks first, and the
        others ask again only after a pause.
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
        """One merge of at most _PAGES pages. Other processes may take steps of the same work."""
        with self._db.transaction():
            if self._db.value("SELECT merging FROM index_cleaning"):
                if not self._merge(_PAGES):
                    self._set(merging=0)
            elif self._db.value("SELECT deleted FROM index_cleaning"):
                self._set(deleted=0, merging=1)
                self._merge(-_PAGES)  # negative: from now on merge all parts to one

    def _merge(self, pages: int) -> bool:
        """Was there anything to merge? (FTS5's documentation, 6.8: fewer than two changes mean no.)"""
        before = self._db.changes
        self._db.execute("INSERT INTO messages_text(messages_text, rank) VALUES ('merge', ?)", pages)
        return self._db.changes - before >= 2

    def _set(self, **columns: int) -> None:
        for column, value in columns.items():
            self._db.execute(f"UPDATE index_cleaning SET {column} = ?", value)

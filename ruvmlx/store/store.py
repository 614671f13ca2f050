"""This module holds the store: one open database and its parts.

A part is a plain class that reads and writes a few tables. The constructor of a part takes the database and
the other parts that it uses. `Store.__init__` creates a part after the parts that it needs.

To add a column: add a migration step in schema.py, and a field to the row class in the file of the part.
"""

from contextlib import AbstractContextManager
from pathlib import Path

from .adapters import Adapters
from .anchors import Anchors
from .audit_log import Witness
from .bases import Bases
from .chats import Chats
from .checkpoints import Checkpoints
from .database import Database
from .deep_runs import DeepRuns
from .drafts import Drafts
from .kv import KVRecords
from .messages import Messages
from .model_data import ModelData
from .preferences import Preferences
from .ratings import Ratings
from .replies import Replies
from .responses import Responses
from .routes import ModelChoices, Routes
from .search import Search
from .search_index import SearchIndex
from .signals import Signals
from .traces import Traces
from .tunings import Tunings
from .unshown import UnshownMeasures
from .versions import Versions


class Store:
    """A store opens the file at `path`, or creates it. Use a store only in the thread that opened it.

    Raises StoreError if the file cannot be written or has a newer format, and CorruptFile if it is not a
    database.
    """

    def __init__(self, path: Path, reading: bool = False):
        """reading: True if the caller only reads. Reads work on a disk that is full or read-only, if the file
        has the newest format."""
        self.path = path
        self.db = db = Database(path, reading)
        self.witness = Witness(db)
        self.search_index = SearchIndex(db)
        self.messages = Messages(db, self.search_index)
        self.kv = KVRecords(db, self.witness)
        self.routes = Routes(db, self.witness)
        self.model_choices = ModelChoices(db, self.witness)
        self.traces = Traces(db)
        self.checkpoints = Checkpoints(db)
        self.unshown = UnshownMeasures(db, self.checkpoints)
        of_replies = self.kv, self.routes, self.traces, self.unshown
        self.replies = Replies(db, self.witness, self.messages, *of_replies)
        self.responses = Responses(db)
        self.drafts = Drafts(db, self.replies)
        self.chats = Chats(db, self.messages, self.replies, self.search_index)
        self.search = Search(db, self.chats)
        self.signals = Signals(db)
        self.ratings = Ratings(db, self.witness)
        self.preferences = Preferences(db, self.witness)
        self.bases = Bases(db, self.witness)
        self.versions = Versions(db, self.witness, self.bases, self.ratings, self.preferences)
        feedback = self.ratings, self.preferences
        self.adapters = Adapters(db, self.witness, self.versions, self.bases, *feedback, self.traces)
        self.anchors = Anchors(db, self.witness, self.versions, self.bases)
        self.deep_runs = DeepRuns(db, self.witness, self.checkpoints)
        self.model_data = ModelData(db)
        self.tunings = Tunings(db, self.witness)

    def close(self) -> None:
        self.db.close()

    def transaction(self) -> AbstractContextManager[None]:
        """Take the write lock before the block. After the block, commit everything that the block wrote, or
        nothing if the block raised an error.

        Raises StoreBusy if another process keeps the lock for five seconds, or if many processes pass the
        lock to each other for a minute.
        """
        return self.db.transaction()

    def snapshot(self) -> AbstractContextManager[None]:
        """In the block, show the reader the state of one moment, even while other processes write."""
        return self.db.snapshot()

    def integrity(self) -> str:
        """Return "ok", or else one line about the first fault: text that is not UTF-8, a table of another
        form, a value of a wrong type or size, or damage that SQLite finds."""
        return self.db.integrity()

"""The user's data in one SQLite file: chats, replies, ratings, preferences, adapters, the witness log.

`Store` opens the file. Each of its parts (store.chats, store.replies, ...) reads and writes
a few tables; store.py lists the parts.
"""

from .adapters import NamedRow
from .anchors import AnchorRow
from .bases import Attempt
from .chats import SessionRow
from .deep_runs import DeepRun
from .kv import KVChoiceRow, KVMeasured, KVObservation
from .messages import MessageRow
from .preferences import PreferenceLabel, PreferenceRow
from .ratings import RatedReply, RatingRow
from .replies import ReplyRow, ReplyWords
from .routes import RatedRoute, RouteRow
from .search import ChatHit
from .signals import SignalRow
from .store import Store
from .versions import HeadMoved, VersionRow

__all__ = [
    "AnchorRow",
    "Attempt",
    "ChatHit",
    "DeepRun",
    "HeadMoved",
    "KVChoiceRow",
    "KVMeasured",
    "KVObservation",
    "MessageRow",
    "NamedRow",
    "PreferenceLabel",
    "PreferenceRow",
    "RatedReply",
    "RatedRoute",
    "RatingRow",
    "ReplyRow",
    "ReplyWords",
    "RouteRow",
    "SessionRow",
    "SignalRow",
    "Store",
    "VersionRow",
]

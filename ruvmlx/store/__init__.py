"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each:
Database < Witness < Messages < Chats < Routes < KVRecords < Replies < Bases < Adapters < Anchors < Named
< Signals.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .chats import Found, SessionRow
from .kv import KVChoiceRow, KVMeasured, KVObservation
from .messages import MessageRow
from .named import NamedRow
from .replies import ReplyRow
from .routes import RatedRoute, RouteRow
from .signals import SignalRow
from .signals import Signals as Store

__all__ = [
    "AdapterRow",
    "Found",
    "HeadMoved",
    "KVChoiceRow",
    "KVMeasured",
    "KVObservation",
    "MessageRow",
    "NamedRow",
    "RatedRoute",
    "RatingRow",
    "ReplyRow",
    "RouteRow",
    "SessionRow",
    "SignalRow",
    "Store",
]

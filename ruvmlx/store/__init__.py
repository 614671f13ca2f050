"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each:
Database < Witness < Chats < Routes < KVRecords < Replies < Bases < Adapters < Anchors < Named < Signals.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .kv import KVChoiceRow, KVMeasured, KVObservation
from .named import NamedRow
from .replies import ReplyRow
from .routes import RatedRoute, RouteRow
from .signals import SignalRow
from .signals import Signals as Store

__all__ = [
    "AdapterRow",
    "HeadMoved",
    "KVChoiceRow",
    "KVMeasured",
    "KVObservation",
    "NamedRow",
    "RatedRoute",
    "RatingRow",
    "ReplyRow",
    "RouteRow",
    "SignalRow",
    "Store",
]

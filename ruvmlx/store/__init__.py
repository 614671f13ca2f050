"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each:
Database < Witness < Chats < Replies < Bases < Adapters < Named < Signals.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .named import NamedRow
from .replies import ReplyRow
from .signals import SignalRow
from .signals import Signals as Store

__all__ = ["AdapterRow", "HeadMoved", "NamedRow", "RatingRow", "ReplyRow", "SignalRow", "Store"]

"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each: Database < Chats < Replies < Adapters < Signals.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .replies import ReplyRow
from .signals import SignalRow
from .signals import Signals as Store

__all__ = ["AdapterRow", "HeadMoved", "RatingRow", "ReplyRow", "SignalRow", "Store"]

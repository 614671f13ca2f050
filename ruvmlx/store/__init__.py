"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each: Database < Witness < Chats < Replies < Bases < Adapters < Named.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .named import Named as Store
from .named import NamedRow
from .replies import ReplyRow

__all__ = ["AdapterRow", "HeadMoved", "NamedRow", "RatingRow", "ReplyRow", "Store"]

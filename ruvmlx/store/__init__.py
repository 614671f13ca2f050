"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file.

Store adds the tables up, one file each: Database < Witness < Chats < Replies < Bases < Adapters.
"""

from .adapters import AdapterRow, HeadMoved, RatingRow
from .adapters import Adapters as Store
from .replies import ReplyRow

__all__ = ["AdapterRow", "HeadMoved", "RatingRow", "ReplyRow", "Store"]

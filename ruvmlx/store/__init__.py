"""What the user owns: chats, replies, ratings and adapter versions, in one SQLite file."""

from .store import AdapterRow, RatingRow, ReplyRow, Store

__all__ = ["AdapterRow", "RatingRow", "ReplyRow", "Store"]

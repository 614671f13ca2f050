"""The public Python API: models, chats, replies and ratings, without a terminal. `import ruvmlx` offers it.

Nothing here may know how a reply is computed: each call is one call of `runtime.py`, in a thread of its own.
Start with `model.py`; `aio.py` is the same for asyncio, `notebook.py` for notebooks, `listing.py` says what
is on this machine, and `types.py` has what calls return.
"""

from .model import Chat, LocalModel, Reply, ReplyStream, embed, open

__all__ = ["Chat", "LocalModel", "Reply", "ReplyStream", "embed", "open"]

"""This package is the public Python API: models, chats, replies and ratings. `import ruvmlx` exports the API.

The API itself computes no replies: its methods call the Runtime (runtime.py) in the runtime's own thread
(`call_thread.py`).
Start with `model.py`. `replies.py` has a reply as a whole and while the model writes it. `aio.py` has the
same classes for asyncio, `notebook.py` shows replies in notebooks, `listing.py` lists the models and adapters
of this machine, and `types.py` defines the results of the methods.
"""

from .model import Chat, LocalModel, embed, open
from .replies import Reply, ReplyStream

__all__ = ["Chat", "LocalModel", "Reply", "ReplyStream", "embed", "open"]

"""This package is the public Python API: models, chats, replies and ratings. `import ruvmlx` exports the API.

The API itself computes no replies: its methods call the Runtime (runtime.py) in the runtime's own thread.
Start with `model.py`. `aio.py` has the same classes for asyncio, `notebook.py` shows replies in notebooks,
`listing.py` lists the models and adapters of this machine, and `types.py` defines the results of the methods.
"""

from .model import Chat, LocalModel, Reply, ReplyStream, embed, open

__all__ = ["Chat", "LocalModel", "Reply", "ReplyStream", "embed", "open"]

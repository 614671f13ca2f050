"""The thread that owns an open model: it queues calls, writes replies side by side, and changes the model.

The package knows threads and event loops, but nothing of HTTP, screens or commands; the thread runs whatever
work it is given. Start with `host.py`, then read `serving.py` (replies, step by step), `model_holder.py`
(another model in the place of the first) and `guest.py` (one of several chats on an open model).
"""

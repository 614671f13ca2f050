"""This package runs the thread that owns an open model. The thread runs calls from a queue, writes several
replies at the same time, and switches to another model.

The package handles threads and event loops, but no HTTP, screens or commands. Start with `host.py`, then read
`serving.py` (replies, step by step), `model_holder.py` (the switch to another model) and `guest.py` (one of
several chats on an open model).
"""

"""Chats and their replies: the prompt of a turn, writing a reply, saving it, and what its rating changes.

All words of a chat pass here on their way to the store. Nothing here may know of threads, HTTP or screens.
Start with `conversations.py`, then `reply_writer.py` and `learning.py`.
"""

"""This package runs chats: it builds the prompt of a turn, writes and saves the reply, and learns from the
reply's rating.

The messages of a chat pass through this package on their way to the store. The package starts no threads, and
has no code for HTTP or screens. Start with `conversations.py`, then read `reply_writer.py` and `learning.py`.
"""

"""Deleted chats: out of sight at once, and for good when the chat app that did it ends, or after DAYS."""

import time

from .kv.disk import CacheFolder
from .store import Store

DAYS = 1.0


def delete(store: Store, session_id: str) -> None:
    """For good, with what lies beside the store."""
    store.delete_session(session_id)
    CacheFolder.beside(store.path).remove(session_id)


def delete_older(store: Store) -> None:
    for session_id in store.put_away_before(time.time() - DAYS * 86400):
        delete(store, session_id)

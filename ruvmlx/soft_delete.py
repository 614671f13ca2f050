"""Deleted chats: out of sight at once, and for good when the chat app that did it ends, or after DAYS."""

import time

from .errors import NotFound, RuvmlxError, StoreBusy
from .kv.disk import CacheFolder
from .store import Store

DAYS = 1.0


def delete(store: Store, session_id: str) -> None:
    """For good, with what lies beside the store."""
    store.chats.delete(session_id)
    CacheFolder.beside(store.path).remove(session_id)


def delete_older(store: Store) -> list[str]:
    """Delete the chats whose DAYS are over; returns one line for each chat that cannot be deleted.

    Every start calls this, so a chat that cannot be deleted must not stop the program; `doctor` shows the
    lines. StoreBusy if another process holds the store.
    """
    failed = []
    for session_id in store.chats.soft_deleted_before(time.time() - DAYS * 86400):
        try:
            delete(store, session_id)
        except NotFound:  # another process deleted it first
            continue
        except StoreBusy:
            raise
        except RuvmlxError as e:
            failed.append(f"chat {session_id} cannot be deleted: {e}")
    return failed

"""Deleted chats: out of sight at once, and for good when the chat app that did it ends, or after DAYS."""

import contextlib
import time

from .engine.sessions import SessionManager
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


def tidy(store: Store, folder: CacheFolder | None) -> None:
    """Clear up behind processes that were killed: half-written replies, deleted chats, cache files.

    A store that another process holds is left to the next start.
    """
    with contextlib.suppress(StoreBusy):
        store.drafts.recover()
        delete_older(store)
        if folder is not None:
            folder.tidy(store.chats.ids())


class DeletedChats:
    """Chats that this runtime deleted: `restore` brings one back until `erase`."""

    def __init__(self, store: Store, sessions: SessionManager):
        self._store, self._sessions = store, sessions
        self._ids: set[str] = set()

    def soft_delete(self, session_id: str) -> None:
        """Take a chat out of sight."""
        self._store.chats.soft_delete(session_id)
        self._ids.add(session_id)

    def restore(self, session_id: str) -> None:
        """Undo `soft_delete`."""
        self._store.chats.restore(session_id)
        self._ids.discard(session_id)

    def hand_over(self) -> frozenset[str]:
        """The deleted chats, which are another runtime's from now on: `take_over` there."""
        ids = frozenset(self._ids)
        self._ids.clear()
        return ids

    def take_over(self, ids: frozenset[str]) -> None:
        """Erase these, too, at the end, unless they are restored."""
        self._ids |= ids

    def erase(self) -> None:
        """Delete them for good, unless another process restored them."""
        for session_id in self._ids & {row.id for row in self._store.chats.soft_deleted()}:
            with contextlib.suppress(NotFound):  # another process was quicker
                self._sessions.drop(session_id)
                delete(self._store, session_id)
        self._ids.clear()

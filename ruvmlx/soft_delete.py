"""Deletes chats in two steps: hidden at once, erased when the app that hid them ends, or after DAYS."""

import contextlib
import math
import time
from collections.abc import Iterable

from .engine.sessions import SessionManager
from .errors import NotFound, RuvmlxError, StoreBusy
from .kv.disk import CacheFolder
from .kv.owners import REQUESTS
from .platform import files
from .store import Store

DAYS = 1.0
AT_START = 0.2  # seconds for the search index at each start
AT_END = 0.5  # at each end


def delete(store: Store, *session_ids: str, seconds: float = math.inf) -> bool:
    """Erase chats, all or none, and their KV caches on disk.

    False if the words are not gone from all files: another process still reads the store, and they stay in
    its log until that ends; or the search index needs longer than `seconds`, and the next start continues.
    """
    gone = store.chats.delete(*session_ids, seconds=seconds)
    for session_id in session_ids:
        CacheFolder.beside(store.path).remove(session_id)
    return gone


def forget(store: Store, reply_ids: list[str]) -> bool:
    """Erase the words of replies outside chats, and all KV caches of such replies. Returns as `delete`."""
    gone = store.replies.forget(reply_ids)
    CacheFolder.beside(store.path).remove(REQUESTS)
    return gone


def delete_older(store: Store) -> list[str]:
    """Erase the chats that were hidden over DAYS ago; returns one line for each that cannot be erased.

    This runs at every start, so a chat that cannot be erased must not stop the program; `doctor` shows the
    lines. StoreBusy if another process has locked the store.
    """
    failed, old = [], store.chats.soft_deleted_before(time.time() - DAYS * 86400)
    for session_id in old:
        try:
            delete(store, session_id, seconds=0)
        except NotFound:  # another process deleted it first
            continue
        except StoreBusy:
            raise
        except RuvmlxError as e:
            failed.append(f"chat {session_id} cannot be deleted: {e}")
    clean_index(store, AT_START)
    return failed


def clean_index(store: Store, seconds: float) -> bool:
    """Remove deleted words from the search index, for about this long; True if none is left.

    A later call continues, also if another process has locked the store.
    """
    with contextlib.suppress(StoreBusy):
        if not store.search_index.is_clean():
            store.chats.clean_index(seconds)
        return store.search_index.is_clean()
    return False


def tidy(store: Store, folder: CacheFolder | None) -> None:
    """Clean up after killed processes: recover unfinished replies, erase hidden chats, remove cache files and
    files that were not finished.

    If another process has locked the store, the next start does it.
    """
    with contextlib.suppress(StoreBusy):
        store.drafts.recover()
        delete_older(store)
        if folder is not None:
            folder.tidy(store.chats.ids())
    files.remove_abandoned(store.path.parent)


class DeletedChats:
    """Chats that this runtime deleted: `restore` brings one back until `erase`."""

    def __init__(self, store: Store, sessions: SessionManager):
        self._store, self._sessions = store, sessions
        self._ids: set[str] = set()

    def soft_delete(self, session_id: str) -> None:
        """Hide a chat."""
        self._store.chats.soft_delete(session_id)
        self._ids.add(session_id)

    def restore(self, session_id: str) -> None:
        """Undo `soft_delete`."""
        self._store.chats.restore(session_id)
        self._ids.discard(session_id)

    def hand_over(self) -> frozenset[str]:
        """Give up the hidden chats; returns their ids for another runtime's `take_over`."""
        ids = frozenset(self._ids)
        self._ids.clear()
        return ids

    def take_over(self, ids: frozenset[str]) -> None:
        """Accept hidden chats of another runtime: `erase` will include them."""
        self._ids |= ids

    def erase(self, only: Iterable[str] | None = None) -> None:
        """Erase the hidden chats, unless another process restored them. only: these of them."""
        ids = self._ids if only is None else self._ids & set(only)
        for session_id in ids & {row.id for row in self._store.chats.soft_deleted()}:
            with contextlib.suppress(NotFound):  # another process erased it first
                self._sessions.drop(session_id)
                delete(self._store, session_id, seconds=0)
        self._ids -= ids
        self.clean_index(AT_END)

    def clean_index(self, seconds: float) -> bool:
        """Remove deleted words from the search index: `clean_index`."""
        return clean_index(self._store, seconds)

"""This module deletes chats in two steps: it hides a chat at once, and erases the hidden chat when a program
starts or ends for the first time after DAYS days."""

import contextlib
import math
import threading
import time

from ..errors import NotFound, RuvmlxError, StoreBusy
from ..kv.disk import CacheFolder
from ..kv.owners import REQUESTS
from ..platform import files
from ..store import Store

DAYS = 1.0
_SECONDS = DAYS * 86400  # the time in which the user can bring a chat back
AT_START = 0.2  # seconds: the maximum time that each start and end takes to clean the search index
CLEANING_SECONDS = 0.02  # the seconds of cleaning between two checks of the event `cancel`


def delete(store: Store, *session_ids: str, seconds: float = math.inf) -> bool:
    """Erase chats and their KV caches on disk. If one of the chats does not exist, no chat is erased.

    Returns False if some files still hold the words of the chats. Words of a chat are left in files for one
    of two reasons: another process reads the store, so the store's log keeps the words until that process
    ends; or the search index needs longer than `seconds`, so the next start continues to remove the words.
    """
    gone = store.chats.delete(*session_ids, seconds=seconds)
    for session_id in session_ids:
        CacheFolder.of_store(store.path).remove(session_id)
    return gone


def why_words_are_left(store: Store) -> str:
    """Return a sentence that says which file still holds deleted words, after `delete` or `forget` returned
    False."""
    if not store.search_index.is_clean():
        return "The search index still holds parts of words; ruvmlx removes them while you do nothing."
    return "Another ruvmlx reads the store: copies of the words stay in its log until that program ends."


def forget(store: Store, reply_ids: list[str]) -> bool:
    """Erase the words of replies outside chats, and the KV caches on disk of all requests outside chats.
    Returns False if another process reads the store, so that the store's log still holds the words."""
    gone = store.replies.forget(reply_ids)
    CacheFolder.of_store(store.path).remove(REQUESTS)
    return gone


def delete_older(store: Store) -> list[str]:
    """Erase the chats that were hidden more than DAYS ago. Return one line for each chat that cannot be
    erased.

    This function runs when a runtime starts or ends, so a chat that cannot be erased must not stop the
    program. The command `doctor` shows the returned lines. Raises StoreBusy if another process has locked the
    store.
    """
    failed, old = [], store.chats.soft_deleted_before(time.time() - _SECONDS)
    for session_id in old:
        try:
            delete(store, session_id, seconds=0)
        except NotFound:  # another process has deleted this chat meanwhile
            continue
        except StoreBusy:
            raise
        except RuvmlxError as e:
            failed.append(f"chat {session_id} cannot be deleted: {e}")
    with contextlib.suppress(StoreBusy):  # a later start of ruvmlx continues this work
        if not store.search_index.is_clean():
            store.chats.clean_index(AT_START)
    return failed


def ends(store: Store) -> dict[str, float]:
    """Return the time, in seconds since 1970, until which each hidden chat can be restored, by the chat's
    id."""
    return {session_id: hidden + _SECONDS for session_id, hidden in store.chats.deletion_times().items()}


def clean_in_idle_time(store: Store, cancel: threading.Event) -> None:
    """Remove deleted words from the search index. Stop if no deleted word is left, if the event `cancel` is
    set, or if another process has locked the store."""
    with contextlib.suppress(StoreBusy):
        while not store.search_index.is_clean() and not cancel.is_set():
            store.chats.clean_index(CLEANING_SECONDS)


def tidy(store: Store, folder: CacheFolder | None) -> None:
    """Clean up after killed processes: recover unfinished replies, erase hidden chats, remove old cache files
    and unfinished files.

    If another process has locked the store, the next start of a program cleans up.
    """
    with contextlib.suppress(StoreBusy):
        store.drafts.recover()
        delete_older(store)
        if folder is not None:
            folder.tidy(store.chats.ids())
    files.remove_abandoned_below(store.path.parent)

"""Deleted chats: the cleaning of the search index in idle time."""

import threading
from contextlib import closing

from ruvmlx.chats import soft_delete
from ruvmlx.errors import StoreBusy
from ruvmlx.store import Store

from ..store.deleted_words import leave_words


def test_the_cleaning_stops_if_another_process_has_locked_the_store(home, monkeypatch):
    tries = []

    def clean(seconds):
        tries.append(seconds)
        assert len(tries) == 1, "the cleaning goes on without a pause"
        raise StoreBusy("locked")

    with closing(Store(home / "ruvmlx.db")) as store:
        leave_words(store)
        monkeypatch.setattr(store.chats, "clean_index", clean)
        soft_delete.clean_in_idle_time(store, threading.Event())
    assert tries

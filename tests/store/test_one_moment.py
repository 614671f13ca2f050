"""A method that reads several times sees the store of one moment, whatever another process writes meanwhile."""

from contextlib import closing

import pytest

from ruvmlx.errors import StoreBusy
from ruvmlx.store import Store, database

from .test_branches import branch_texts, exchange, store  # noqa: F401 - a fixture


@pytest.fixture
def chat(store):  # noqa: F811
    chat = store.chats.new("m")
    exchange(store, chat, "q", "a")
    return chat


def test_no_other_process_writes_between_the_read_and_the_copy_of_a_fork(store, chat, monkeypatch):  # noqa: F811
    monkeypatch.setattr(database, "_BUSY_SECONDS", 0.0)
    read = store.messages.branch
    with closing(Store(store.path)) as other:

        def read_and_write(session_id):
            found = read(session_id)
            with pytest.raises(StoreBusy):
                other.messages.add_user(chat, "one more question")
            return found

        monkeypatch.setattr(store.messages, "branch", read_and_write)
        fork = store.chats.fork(chat)
        monkeypatch.undo()
        assert branch_texts(store, fork) == branch_texts(other, chat) == ["q", "a"]

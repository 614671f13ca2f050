"""Some methods of the store run several SELECT statements. All statements of one method see the data of one
moment, even while another process writes."""

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


@pytest.mark.parametrize("method", ["newest", "branch"])
def test_the_messages_of_a_branch_are_those_of_one_moment(store, chat, monkeypatch, method):  # noqa: F811
    """Another process takes the last message back between two reads. The message is read as it was."""
    last, rows = store.messages.add_user(chat, "r"), store.db.rows
    with closing(Store(store.path)) as other:

        def read_and_take_back(sql, *args):
            found = rows(sql, *args)
            other.chats.take_back(chat, last)
            return found

        monkeypatch.setattr(store.db, "rows", read_and_take_back)
        arguments = {"newest": (chat, 2), "branch": (chat,)}[method]
        found = [row.content for row in getattr(store.messages, method)(*arguments)]
        monkeypatch.undo()
        assert found[-2:] == ["a", "r"] and branch_texts(store, chat) == ["q", "a"]

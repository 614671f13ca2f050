"""Errors of the store over HTTP: one line with what to do, without the place of the user's files."""

import errno
import sqlite3

import pytest
from ruvmlx.apps.server.errors import ApiError

from ruvmlx.settings import home
from ruvmlx.store.database import Database

from .conftest import CHAT_KEY


class StoreLocked(sqlite3.OperationalError):
    sqlite_errorcode = sqlite3.SQLITE_BUSY


HI = {"messages": [{"role": "user", "content": "hello"}]}
FAULTS = {
    "full": sqlite3.OperationalError("database or disk is full"),
    "locked": StoreLocked("database is locked"),
    "damaged": sqlite3.DatabaseError("database disk image is malformed"),
    "not writable": PermissionError(errno.EACCES, "Permission denied"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_error_has_the_path_of_the_data_folder(serve, monkeypatch, fault):
    """No error of an API has the path of the data folder. Each error still says what is wrong."""
    running = serve(max_tokens=4)
    reply_id = running.chat().json["id"]

    def fail(self):
        raise FAULTS[fault]

    model = {"model": running.model}
    asked = [
        ("POST", "/v1/chat/completions", {**model, **HI}),
        ("POST", "/v1/chat/completions", {**model, **HI, "stream": True}),
        ("POST", "/v1/completions", {**model, "prompt": "hello"}),
        ("POST", "/v1/messages", {**model, **HI, "max_tokens": 4}),
        ("POST", "/v1/messages", {**model, **HI, "max_tokens": 4, "stream": True}),
        ("POST", "/v1/responses", {**model, "input": "hello"}),
        ("POST", "/api/chat", {**model, **HI, "stream": False}),
        ("POST", "/api/generate", {**model, "prompt": "hello"}),
        ("POST", "/v1/ratings", {"id": reply_id, "rating": "up"}),
        ("POST", "/v1/chats", {**model, "content": "hello"}),
    ]
    with monkeypatch.context() as patched:
        patched.setattr("ruvmlx.chats.stored_replies.COMMIT_ATTEMPTS", 1)
        patched.setattr(Database, "_begin_writing", fail)
        for method, path, body in asked:
            text = running.ask(method, path, body, authorization=f"Bearer {CHAT_KEY}").body.decode()
            assert "ruvmlx.db" in text or "the data folder" in text, (path, text)
            assert str(home()) not in text and str(home().parent) not in text, (path, text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/ruvmlx.db is full", "ruvmlx.db is full"),
        ("'/data/ruvmlx.db' and file:///data/a.db", "'ruvmlx.db' and file://a.db"),
        ("no room in /data.", "no room in the data folder."),
        ("/database/m.gguf, /data-2/m.gguf", "/database/m.gguf, /data-2/m.gguf"),
        ("https://host/data/m.gguf", "https://host/data/m.gguf"),
    ],
)
def test_only_the_data_folder_is_hidden(monkeypatch, text, shown):
    monkeypatch.setenv("RUVMLX_HOME", "/data")
    assert str(ApiError(500, text)) == shown

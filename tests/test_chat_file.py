"""Chats written to files and read again."""

import json

import pytest

from ruvmlx.chat_file import as_json, as_markdown, import_chat
from ruvmlx.errors import CorruptFile
from ruvmlx.store import Store

from .store.test_branches import exchange, said


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


def shape(store, chat):
    """A chat's words and branches without the ids' numbers."""
    messages = store.messages.all(chat)
    place = {m.id: n for n, m in enumerate(messages)}
    return [(m.role, m.content, place.get(m.parent)) for m in messages]


def test_a_chat_comes_back_with_its_branches(store, tmp_path):
    chat = store.chats.new("m", "be brief")
    exchange(store, chat, "q", "one", "two")
    exchange(store, chat, "日本\x1b[2J", "three")
    store.messages.next_sibling(chat, store.messages.branch(chat)[1].id, 1)
    data = json.dumps(as_json(store, chat)).encode()
    other = Store(tmp_path / "other.db")
    back = import_chat(other, data, "f.json")
    assert shape(other, back) == shape(store, chat)
    assert said(other, back) == said(store, chat) == ["q", "one"]
    assert other.chats.get(back).title == "q" and other.chats.get(back).system == "be brief"
    assert all(m.reply_id is None for m in other.messages.branch(back))


@pytest.mark.parametrize("wrapped", [True, False])
def test_messages_of_other_programs(store, wrapped):
    """{"role", "content"} alone, as a list or in an object; a system message is the system prompt."""
    messages = [{"role": r, "content": c} for r, c in [("system", "s"), ("user", "u"), ("assistant", "a")]]
    chat = import_chat(store, json.dumps({"messages": messages} if wrapped else messages).encode(), "f")
    assert said(store, chat) == ["u", "a"] and store.chats.get(chat).system == "s"
    assert store.chats.get(chat).title == "u"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"3",
        b"{}",
        b"[]",
        b'{"messages": {}}',
        b'[{"role": "system", "content": "only"}]',
        b'[{"role": "tool", "content": "x"}]',
        b'[{"role": "user", "content": 3}]',
        b'["user"]',
        b'[{"role": "user", "content": "a", "id": 1, "parent": 2}]',
        b'[{"role": "user", "content": "a", "id": 1}, {"role": "user", "content": "a", "id": 1}]',
        b'[{"role": "user", "content": "a", "id": 1, "parent": [1]}]',
    ],
)
def test_what_is_no_chat_is_refused(store, data):
    """One line, and nothing is left in the store."""
    with pytest.raises(CorruptFile) as caught:
        import_chat(store, data, "f.json")
    assert "\n" not in str(caught.value) and "f.json" in str(caught.value)
    assert store.db.rows("SELECT * FROM sessions") == []


def test_odd_values_are_left_out(store):
    data = b'{"title": 3, "system": [], "head": [1], "messages": [{"role": "user", "content": "a\\ud800b",'
    chat = import_chat(store, data + b' "created": true}]}', "f")
    assert said(store, chat) == ["ab"] and store.chats.get(chat).title == "ab"


def test_markdown_is_for_people(store):
    """Title, system prompt, who said what; no control sequence is left."""
    chat = store.chats.new("m\x1b[1m", "be\nbrief")
    exchange(store, chat, "# q\x1b]0;x\x07", "one", "two")
    lines = as_markdown(store, chat).splitlines()
    assert lines[0] == "# # q" and "> be" in lines and "> brief" in lines
    assert lines[-7:] == ["", "## You", "", "# q", "", "## Assistant", "", "two"][-7:]
    assert "\x1b" not in as_markdown(store, chat) and "one" not in lines

"""Chats written to files and read again."""

import errno
import json
import os
import sqlite3
import time
from contextlib import suppress

import pytest

from ruvmlx.chats import chat_file, soft_delete
from ruvmlx.chats.chat_file import as_json, as_markdown, import_once, parse, read_bytes, write_new
from ruvmlx.errors import CorruptFile, NotFound, RuvmlxError, UsageError
from ruvmlx.store import PreferenceRow, Store, chats

from ..store.test_branches import a_reply, branch_texts, exchange


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
    back = import_once(other, data, "f.json").session_id
    assert shape(other, back) == shape(store, chat)
    assert branch_texts(other, back) == branch_texts(store, chat) == ["q", "one"]
    assert other.chats.get(back).title == "q" and other.chats.get(back).system == "be brief"
    assert all(m.reply_id is None for m in other.messages.branch(back))


def test_all_parts_of_a_file_are_those_of_one_moment(store, monkeypatch):
    """Another process adds a reply, and a preference for it, after the messages were read."""
    chat, read = store.chats.new("m"), store.messages.all
    asked, _ = exchange(store, chat, "q", "one")
    other = Store(store.path)

    def read_and_prefer(session_id):
        found = read(session_id)
        if len(other.messages.all(chat)) == 2:
            other.replies.add(a_reply("two"), chat, question=asked)
            with other.transaction():
                other.preferences.add(
                    "f", "default", 1, PreferenceRow("two", f"{chat}-one", "edit", 1.0, 1.0)
                )
        return found

    before = as_json(store, chat)
    monkeypatch.setattr(store.messages, "all", read_and_prefer)
    assert as_json(store, chat) == before and before["preferences"] == []
    after = as_json(store, chat)
    assert len(after["messages"]) == 3 and len(after["preferences"]) == 1


@pytest.mark.parametrize("to,kept", [(1, 1), (None, None), (99, None), ("1", None)])
def test_the_notes_of_a_chat_come_back(store, tmp_path, to, kept):
    """to: the place of the message in the file; kept: the same after the import. A reference to no message
    leaves the notes out."""
    chat = store.chats.new("m")
    exchange(store, chat, "q", "one")
    exchange(store, chat, "more", "two")
    ids = [m.id for m in store.messages.branch(chat)]
    store.chats.set_summary(chat, "They said one.", ids[1])
    data = as_json(store, chat)
    assert data["summary"] == "They said one." and data["summarized_to"] == ids[1]
    data["summarized_to"] = ids[to] if to == 1 else to
    other = Store(tmp_path / "other.db")
    other.chats.new("m")
    exchange(other, other.chats.new("m"), "another", "chat")  # so that ids differ
    back = import_once(other, json.dumps(data).encode(), "f.json").session_id
    row, messages = other.chats.get(back), other.messages.branch(back)
    assert row.summarized_to == (None if kept is None else messages[kept].id)
    assert row.summary == (None if kept is None else "They said one.")


@pytest.mark.parametrize("wrapped", [True, False])
def test_messages_of_other_programs(store, wrapped):
    """{"role", "content"} alone, as a list or in an object; a system message is the system prompt."""
    messages = [{"role": r, "content": c} for r, c in [("system", "s"), ("user", "u"), ("assistant", "a")]]
    data = json.dumps({"messages": messages} if wrapped else messages).encode()
    chat = import_once(store, data, "f").session_id
    assert branch_texts(store, chat) == ["u", "a"] and store.chats.get(chat).system == "s"
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
        b'[{"role": "user", "content": "a", "created": NaN}]',
        b'[{"role": "user", "content": "a", "created": Infinity}]',
    ],
)
def test_what_is_no_chat_is_refused(store, data):
    """One line, and nothing is left in the store."""
    with pytest.raises(CorruptFile) as caught:
        import_once(store, data, "f.json")
    assert "\n" not in str(caught.value) and "f.json" in str(caught.value)
    assert store.db.rows("SELECT * FROM sessions") == []


def test_deep_tool_calls_are_left_out(store):
    """Python reads JSON that is nested a little deeper than the JSON that Python can write."""
    for depth in range(800, 1001):
        calls = "[" * depth + "]" * depth
        data = f'[{{"role": "user", "content": "a", "calls": {calls}}}]'.encode()
        with suppress(CorruptFile):  # it is too deep to read
            assert [m.calls for m in parse(data, "f.json").messages] == [""]


def test_odd_values_are_left_out(store):
    data = b'{"title": 3, "system": [], "head": [1], "messages": [{"role": "user", "content": "a\\ud800b",'
    chat = import_once(store, data + b' "created": true}]}', "f").session_id
    assert branch_texts(store, chat) == ["ab"] and store.chats.get(chat).title == "ab"


def test_a_message_may_follow_a_system_message(store):
    """Other programs keep the system prompt as the first message, with an id."""
    rows = [
        {"id": 1, "role": "system", "content": "be brief"},
        {"id": 2, "parent": 1, "role": "user", "content": "a"},
        {"id": 3, "parent": 2, "role": "system", "content": "be brief"},
        {"id": 4, "parent": 3, "role": "assistant", "content": "b"},
    ]
    chat = import_once(store, json.dumps(rows).encode(), "f").session_id
    assert [m.content for m in store.messages.branch(chat)] == ["a", "b"]
    assert store.chats.get(chat).system == "be brief"


@pytest.mark.parametrize("created", [b"1e999", b"-1e300", b"253402300000", b'"now"'])
def test_a_time_that_no_calendar_shows_and_one_of_the_future_are_left_out(store, created):
    data = b'[{"role": "user", "content": "a", "created": ' + created + b"}]"
    chat = import_once(store, data, "f").session_id
    json.dumps(as_json(store, chat), allow_nan=False)
    assert store.messages.all(chat)[0].created == pytest.approx(time.time(), abs=60)
    assert store.chats.get(chat).updated == pytest.approx(time.time(), abs=60)


def test_a_time_in_whole_seconds_is_kept(store):
    chat = import_once(store, b'[{"role": "user", "content": "a", "created": 1700000000}]', "f").session_id
    assert store.messages.all(chat)[0].created == 1_700_000_000


def test_an_import_that_stops_leaves_no_chat(store, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.messages, "add_tree", stop)
    with pytest.raises(KeyboardInterrupt):
        import_once(store, b'[{"role": "user", "content": "a"}]', "f")
    assert store.db.rows("SELECT * FROM sessions") == []


def test_others_can_write_while_a_long_chat_is_imported(store, monkeypatch):
    """Between two short transactions; the chat is seen by nobody until it is whole, and a start an hour later
    erases what a killed process has left of it."""
    other, seen = Store(store.path), []
    mine = other.chats.new("m", title="mine")
    monkeypatch.setattr(chats, "_FILLING_SLICE", 0.0)  # each message in a transaction of its own

    def meanwhile(_seconds):
        other.messages.add_user(mine, f"message {len(seen)}")
        seen.append(
            (other.chats.soft_deleted(), [row.id for row in other.chats.all()], other.search.find("xyz"))
        )
        assert soft_delete.delete_older(other) == []

    monkeypatch.setattr(time, "sleep", meanwhile)
    data = json.dumps([{"role": "user", "content": f"xyz {i}"} for i in range(20)]).encode()
    chat = import_once(store, data, "f").session_id
    assert len(seen) >= 19 and all(found == ([], [mine], []) for found in seen)
    assert [row.id for row in other.chats.all()] == [chat, mine] and len(branch_texts(other, chat)) == 20
    with pytest.raises(NotFound):
        other.chats.find_soft_deleted("last")

    def close_and_interrupt(_seconds):
        store.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", close_and_interrupt)
    with pytest.raises(sqlite3.ProgrammingError):
        import_once(store, data.replace(b"xyz", b"abc"), "f")
    assert len(other.chats.ids()) == 3 and soft_delete.delete_older(other) == []
    assert len(other.chats.ids()) == 3
    now = time.time() + 7200
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(time, "time", lambda: now)
    assert soft_delete.delete_older(other) == [] and other.chats.ids() == {chat, mine}


def test_a_copy_that_stops_leaves_no_chat(store, monkeypatch):
    chat = store.chats.new("m")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(store.messages, "add_tree", stop)
    with pytest.raises(KeyboardInterrupt):
        store.chats.fork(chat)
    assert [row["id"] for row in store.db.rows("SELECT id FROM sessions")] == [chat]


def test_a_file_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_file, "MAX_FILE_BYTES", 1000)
    endless = tmp_path / "chat.json"
    endless.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"chat\.json: it is not an ordinary file"):
        read_bytes(endless)
    long = tmp_path / "long.json"
    long.write_text("x" * 1001)
    with pytest.raises(UsageError, match=r"long\.json is over"):
        read_bytes(long)


# -- files that are written ------------------------------------------------------------------------------


def test_a_file_is_written_whole_and_for_its_owner_alone(tmp_path):
    write_new(tmp_path / "a.md", "words")
    assert (tmp_path / "a.md").read_text() == "words" and (tmp_path / "a.md").stat().st_mode & 0o777 == 0o600
    with pytest.raises(UsageError, match="exists already"):
        write_new(tmp_path / "a.md", "other")
    assert (tmp_path / "a.md").read_text() == "words" and [f.name for f in tmp_path.iterdir()] == ["a.md"]


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def raise_no_space(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_no_space)
        with pytest.raises(RuvmlxError, match=r"cannot write .*No space left") as error:
            write_new(tmp_path / "a.md", "words")
    assert error.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []
    write_new(tmp_path / "a.md", "words")


def test_no_link_that_somebody_planted_is_followed(tmp_path):
    """In a folder that others write, too, under every name that could be foreseen."""
    treasure = tmp_path / "treasure"
    treasure.write_text("mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    planted = [f".ruvmlx-{os.getpid()}.part", ".a.md.new", f".a.md.{os.getpid()}.new"]
    for name in planted:
        (folder / name).symlink_to(treasure)
    write_new(folder / "a.md", "words")
    assert treasure.read_text() == "mine" and (folder / "a.md").read_text() == "words"
    assert not (folder / "a.md").is_symlink() and {p.name for p in folder.iterdir()} == {*planted, "a.md"}


@pytest.mark.parametrize("there", [True, False])
def test_a_file_is_written_where_links_are_unknown(tmp_path, monkeypatch, there):
    def unknown(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unknown)
    if there:
        (tmp_path / "a.md").write_text("old")
        with pytest.raises(UsageError, match="exists already"):
            write_new(tmp_path / "a.md", "words")
    else:
        write_new(tmp_path / "a.md", "words")
    assert (tmp_path / "a.md").read_text() == ("old" if there else "words")
    assert len(list(tmp_path.iterdir())) == 1


def test_markdown_is_for_people(store):
    """Title, system prompt, who said what; no control sequence is left."""
    chat = store.chats.new("m\x1b[1m", "be\nbrief")
    exchange(store, chat, "# q\x1b]0;x\x07", "one", "two")
    lines = as_markdown(store, chat).splitlines()
    assert lines[0] == "# # q" and "> be" in lines and "> brief" in lines
    assert lines[-7:] == ["", "## You", "", "# q", "", "## Assistant", "", "two"][-7:]
    assert "\x1b" not in as_markdown(store, chat) and "one" not in lines


def test_a_message_with_an_id_and_no_parent_follows_the_one_before(store):
    """So other programs write chats. The parent of a first message can be the system message."""
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"id": n + 7, "role": role, "content": f"{n}"} for n, role in enumerate(roles)]
    chat = import_once(store, json.dumps(messages).encode(), "f").session_id
    assert branch_texts(store, chat) == ["1", "2", "3", "4"]
    messages[1]["parent"], messages[1]["content"] = 7, "one"
    assert branch_texts(store, import_once(store, json.dumps(messages).encode(), "f").session_id)[0] == "one"


def test_a_chat_of_a_clock_that_runs_ahead_is_not_the_last_one_for_ever(store):
    data = {"messages": [{"role": "user", "content": "later"}], "updated": time.time() + 1e6}
    imported = import_once(store, json.dumps(data).encode(), "f").session_id
    chat = store.chats.new("m")
    exchange(store, chat, "q", "a")
    assert store.chats.find("last") == chat and store.chats.get(imported).updated <= time.time()


def test_another_system_prompt_makes_another_chat(store):
    def import_chat(system):
        data = {"system": system, "messages": [{"role": "user", "content": "hello"}]}
        return import_once(store, json.dumps(data).encode(), "f")

    first, second, again = (
        import_chat("You are a pirate"),
        import_chat("You are a lawyer"),
        import_chat("You are a pirate"),
    )
    assert (first.is_new, second.is_new, again.is_new) == (True, True, False)
    assert again.session_id == first.session_id != second.session_id

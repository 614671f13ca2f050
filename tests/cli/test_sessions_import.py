"""`sessions import` of several files and of folders: dates are kept, and nothing is imported twice."""

import json
import time

import pytest

from ruvmlx.chats.chat_file import as_json, import_once
from ruvmlx.store import Store

THEN = 1_600_000_000.5


def messages(*texts):
    """A talk, as other programs write it."""
    return [
        {"role": "assistant" if n % 2 else "user", "content": text, "created": THEN + n}
        for n, text in enumerate(texts)
    ]


@pytest.fixture
def folder(tmp_path):
    """Three chats, one of them twice, and a file that is no chat."""
    (tmp_path / "old" / "deep").mkdir(parents=True)
    for name, talk in {
        "old/a.json": messages("hello", "hi"),
        "old/b.json": messages("hello", "good day"),
        "old/deep/c.json": {"title": "Third", "created": THEN - 5, "updated": THEN + 99}
        | {"messages": messages("?")},
        "old/again.json": messages("hello", "hi"),
        "old/settings.json": {"font": 12},
    }.items():  # fmt: skip
        (tmp_path / name).write_text(json.dumps(talk))
    (tmp_path / "old" / "._a.json").write_bytes(b"\0\5\x16\7")  # of macOS, on an exFAT disk
    return tmp_path / "old"


def test_a_folder_is_imported_once_with_its_dates(run, folder, home):
    code, out, err = run("sessions", "import", str(folder))
    assert code == 4 and "3 chats imported, 1 there already, 1 file not." in err
    assert "Not imported" in err and "settings.json" in err and "Third" in out
    rows = json.loads(run("sessions", "ls", "--json")[1])
    assert [(row["title"], row["updated"]) for row in rows] == [
        ("Third", THEN + 99), ("hello", THEN + 1), ("hello", THEN + 1)
    ]  # fmt: skip
    store = Store(home / "ruvmlx.db")
    assert store.chats.get(rows[0]["id"]).created == THEN - 5
    assert [m.created for m in store.messages.all(rows[1]["id"])] == [THEN, THEN + 1]
    code, _, err = run("sessions", "import", str(folder / "a.json"), str(folder / "b.json"))
    assert code == 0 and "0 chats imported, 2 there already." in err
    code, out, err = run("sessions", "import", str(folder))
    assert code == 4 and not out and err.count("\n") == 2  # no table without rows
    assert len(json.loads(run("sessions", "ls", "--json")[1])) == 3


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_chat_that_is_there_already_is_told(run, folder, home, flags):
    """One file: the line names the chat, and the JSON says so, too."""
    known = json.loads(run("sessions", "import", str(folder / "a.json"), "--json")[1])["id"]
    code, out, err = run("sessions", "import", str(folder / "again.json"), *flags)
    assert code == 0 and err == f"Nothing was imported: chat {known} begins with the same messages.\n"
    assert known in out and (not flags or json.loads(out)["is_new"] is False)
    for path in folder.rglob("*.json"):
        if path.name != "settings.json":
            path.unlink()
    code, out, err = run("sessions", "import", str(folder))  # one file, which is no chat
    assert code == 4 and not out and err.startswith("Not imported: ") and err.count("\n") == 1


def test_json_of_one_file_is_an_object_and_of_several_a_list(run, folder, home):
    one = json.loads(run("sessions", "import", str(folder / "a.json"), "--json")[1])
    assert one["is_new"] and one["turns"] == 2
    several = json.loads(run("sessions", "import", *[str(folder / f"{n}.json") for n in "ab"], "--json")[1])
    assert [row["is_new"] for row in several] == [False, True] and several[0]["id"] == one["id"]


@pytest.mark.parametrize(("what", "said"), [("nothing", "cannot read"), ("empty", "has no .json file")])
def test_what_cannot_be_imported_is_one_line(run, tmp_path, what, said):
    (tmp_path / "empty").mkdir()
    code, _, err = run("sessions", "import", str(tmp_path / what))
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_chat_that_went_on_is_there_already_and_a_longer_file_is_not(home):
    """Exported, continued here: not imported again. Continued in the file: another chat."""
    store = Store(home / "ruvmlx.db")

    def imported(*texts):
        return import_once(store, json.dumps(messages(*texts)).encode(), "f")

    first = imported("hello", "hi")
    store.messages.add_user(first.session_id, "and now?")
    assert imported("hello", "hi") == type(first)(first.session_id, False)
    longer = imported("hello", "hi", "and now?", "yes")
    assert longer.is_new
    whole = json.dumps(as_json(store, first.session_id)).encode()
    assert not import_once(store, whole, "f").is_new
    for chat in (first, longer):
        store.chats.soft_delete(chat.session_id)
    assert import_once(store, whole, "f").is_new  # a deleted chat is gone for the user


def test_without_dates_a_chat_is_of_today(home):
    store = Store(home / "ruvmlx.db")
    found = import_once(store, b'[{"role": "user", "content": "undated"}]', "f")
    row = store.chats.get(found.session_id)
    assert time.time() - row.created < 60 and time.time() - row.updated < 60

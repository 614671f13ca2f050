"""Saved chats on the command line."""

import gc
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest

from ruvmlx import settings
from ruvmlx.store import Store

from ..store.test_branches import a_reply, exchange, long_chat


def test_sessions_of_plain_chat(starter_file, process):
    """`chat` without a terminal reads its lines from standard input."""
    done = process("chat", stdin="Say hi.\n/rate up\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().count("Assistant:") == 1 and b"\x1b" not in done.stdout
    (row,) = json.loads(process("sessions", "ls", "--json").stdout)
    assert row["title"] == "Say hi." and row["turns"] == 2
    assert "[up]" in process("sessions", "show", row["id"]).stdout.decode()


def test_a_continued_chat_keeps_its_system_prompt_unless_the_flag_replaces_it(starter_file, process):
    """The setting is for new chats, and the flag --system is for this chat."""
    process("config", "set", "system", "Be kind.")
    typed = "/system Be odd.\nHi\n"
    assert b"System prompt: Be odd." in process("chat", "--max-tokens", "1", stdin=typed).stdout
    for flags, said in (((), b"odd"), (("--system", "Be brief."), b"brief"), ((), b"brief")):
        assert b"System prompt: Be %s." % said in process("chat", "-c", *flags, stdin="/system\n").stdout


def test_without_a_chat_the_last_one_is_told_to_be_missing(run):
    code, _, err = run("sessions", "show", "last")
    assert code == 1 and err == "ruvmlx: there is no chat yet; `ruvmlx chat` begins one.\n"


def test_without_a_reply_there_is_none_to_forget(run):
    """Nobody who forgets a reply reads of ratings."""
    code, _, err = run("sessions", "forget", "last")
    assert code == 1 and err.startswith("ruvmlx: there is no reply to forget yet;")
    code, _, err = run("sessions", "forget", "unknown")
    assert code == 1 and err.startswith("ruvmlx: no reply 'unknown' to forget;")


def test_the_last_reply_to_forget_is_outside_of_chats(home, run):
    """`last` means the newest reply of `generate` or the server, even if a chat has a newer reply."""
    store = Store(home / "ruvmlx.db")
    for reply_id in ("one", "two"):
        store.replies.add(a_reply(reply_id), None)
    exchange(store, store.chats.new("m"), "And of lions?", "roar")
    for reply_id in ("two", "one"):
        code, out, _ = run("sessions", "forget", "last", "--json")
        assert code == 0 and json.loads(out) == {"forgotten": [reply_id]}
    code, _, err = run("sessions", "forget", "last")
    assert code == 2 and "belongs to a chat" in err


@pytest.fixture
def chats(home):
    """A store with two chats; the second one has two alternative replies."""
    store = Store(home / "ruvmlx.db")
    first, second = store.chats.new("m"), store.chats.new("m", "be brief")
    store.messages.add_user(first, "Tell me of zebras\x1b]0;x\x07")
    exchange(store, second, "And of lions?", "roar", "A lion roars at night.")
    return first, second


def test_sessions_ls_show_search(run, chats):
    """The fields that scripts rely on; text for people has no control sequence."""
    first, second = chats
    rows = json.loads(run("sessions", "ls", "--json")[1])
    assert [set(row) for row in rows] == [{"id", "title", "turns", "updated", "pinned", "folder"}] * 2
    assert [row["id"] for row in rows] == [second, first]
    assert "\x1b" not in run("sessions", "ls")[1] and "\x1b" not in run("sessions", "show", first)[1]
    shown = json.loads(run("sessions", "show", "last", "--json")[1])
    assert shown["system"] == "be brief" and [m["branch"] for m in shown["messages"]] == [1, 2]
    assert "(2 of 2): A lion" in run("sessions", "show", second[:9])[1]
    (hit,) = json.loads(run("sessions", "search", "NIGHT", "lion", "--json")[1])
    assert {"id", "title", "turns", "updated", "pinned", "folder", "message_id", "role", "text"} == set(hit)
    assert hit["id"] == second and hit["role"] == "assistant"
    assert "Assistant: A lion roars" in run("sessions", "search", "roars")[1]
    assert run("sessions", "search", "unicorn") == (0, "", "No chat has 'unicorn'.\n")
    code, out, err = run("sessions", "search", " ", "--json")
    assert code == 2 and not out and "give words" in err


def test_sessions_are_renamed_copied_and_deleted(run, chats):
    """Renamed, copied, deleted; an id that is none is one line."""
    first, second = chats
    assert run("sessions", "rename", first, "Stripes")[2].startswith("Renamed: Stripes (before: ")
    fork = json.loads(run("sessions", "fork", second, "--json")[1])
    assert fork["turns"] == 2 and fork["title"] == "And of lions? (fork)"
    assert run("sessions", "rm", second)[0] == 0
    assert [row["title"] for row in json.loads(run("sessions", "ls", "--json")[1])] == [
        "And of lions? (fork)",
        "Stripes",
    ]
    code, out, err = run("sessions", "rm", second)
    assert (code, out) == (1, "") and err.count("\n") == 1


def test_each_change_prints_the_chat_as_json(run, chats):
    first = chats[0]
    for args, wanted in (
        (("rename", first, "Stripes"), {"title": "Stripes"}),
        (("pin", first), {"pinned": True}),
        (("pin", first, "--off"), {"pinned": False}),
        (("folder", first, "Work"), {"folder": "Work"}),
        (("folder", first), {"folder": ""}),
        (("rm", first), {"title": "Stripes", "for_good": False}),
        (("rm", first, "--now"), {"for_good": True}),
    ):
        code, out, err = run("sessions", *args, "--json")
        said = json.loads(out)
        assert code == 0 and not err and said["id"] == first and wanted.items() <= said.items()
    assert len(json.loads(run("sessions", "ls", "--json")[1])) == 1


def test_a_title_has_words_and_no_folder_is_called_none(run, chats):
    """As in the chat, the name none takes a chat out of its folder."""
    code, _, err = run("sessions", "rename", chats[0], " ")
    assert code == 2 and "the title is empty" in err
    for name, kept in (("Work", "Work"), ("My  work ", "My work"), ("none", "")):
        assert run("sessions", "folder", chats[0], name)[0] == 0
        rows = json.loads(run("sessions", "ls", "--json")[1])
        assert next(row["folder"] for row in rows if row["id"] == chats[0]) == kept
        listed = json.loads(run("sessions", "ls", "--folder", name, "--json")[1])
        assert [row["id"] for row in listed] == ([chats[0]] if kept else [])


def test_a_pinned_chat_is_listed_first_and_is_not_the_last_used(run, chats):
    first, second = chats
    assert run("sessions", "pin", first)[0] == 0
    rows = json.loads(run("sessions", "ls", "--json")[1])
    assert [(row["id"], row["pinned"]) for row in rows] == [(first, True), (second, False)]
    assert "★ " in run("sessions", "ls")[1].splitlines()[1]
    assert json.loads(run("sessions", "show", "last", "--json")[1])["id"] == second
    assert run("sessions", "pin", first, "--off")[0] == 0
    assert [row["id"] for row in json.loads(run("sessions", "ls", "--json")[1])] == [second, first]


def test_sessions_rm_can_be_undone(run, chats, home):
    """rm says how, restore lists what can come back and brings it; --now and a day later it is gone."""
    first, second = chats
    _, out, err = run("sessions", "rm", first)
    assert out == "" and f"`ruvmlx sessions restore {first}`" in err and "\x1b" not in err
    assert run("sessions", "rm", "last")[0] == 0
    assert json.loads(run("sessions", "ls", "--json")[1]) == []
    assert [row["id"] for row in json.loads(run("sessions", "restore", "--json")[1])] == [second, first]
    assert "\x1b" not in run("sessions", "restore")[1]
    (back,) = json.loads(run("sessions", "restore", "last", "--json")[1])
    assert back["id"] == second and back["turns"] == 2
    assert run("sessions", "restore", first[:8])[1].splitlines()[2].startswith(first)
    assert run("sessions", "restore") == (0, "", "No deleted chat can be restored.\n")
    code, _, err = run("sessions", "restore", "unknown")
    assert code == 1 and err.count("\n") == 1 and "sessions restore" in err
    assert "for good" in run("sessions", "rm", first, "--now")[2]
    assert run("sessions", "restore", first)[0] == 1
    assert run("sessions", "rm", second)[0] == 0
    store = Store(home / "ruvmlx.db")
    with store.transaction():
        store.db.execute("UPDATE sessions SET deleted = deleted - 90000")
    assert json.loads(run("sessions", "restore", "--json")[1]) == []
    assert run("sessions", "restore", second)[0] == 1 and store.chats.ids() == set()


def test_replies_outside_chats_can_be_forgotten(run, chats, home, tiny_folder):
    """One by its id, or all; what was learned from them stays, and chats are not touched."""
    model = ("--model", str(tiny_folder))
    ids = []
    for word in ("zanzibar77", "zanzibar78"):
        said = run("generate", word, "--max-tokens", "4", "--ignore-eos", "--json", *model)[1]
        ids.append(json.loads(said)["reply_id"])
        assert run("rate", "last", "up", *model)[0] == 0
    store = Store(home / "ruvmlx.db")
    in_chat = store.db.value("SELECT reply_id FROM messages WHERE reply_id IS NOT NULL")
    for wrong in ((), ("last", "--all"), (in_chat,), ("nothing",)):
        code, _, err = run("sessions", "forget", *wrong)
        assert code in (1, 2) and err.count("\n") == 1 and "to rate" not in err
    before = store.replies.get(in_chat).text
    assert json.loads(run("sessions", "forget", ids[0], "--json")[1]) == {"forgotten": [ids[0]]}
    assert run("sessions", "forget", "--all")[2].startswith("Deleted the words of 1 reply outside chats.")
    assert run("sessions", "forget", "--all")[2].startswith("Nothing was deleted: at the moment")
    assert store.replies.get(in_chat).text == before
    assert json.loads(run("learn", "status", "--json", *model)[1])["ratings"] == 2
    store.close()
    gc.collect()
    Store(home / "ruvmlx.db").close()
    assert b"zanzibar7" not in (home / "ruvmlx.db").read_bytes()


def test_sessions_to_files_and_back(run, chats, tmp_path):
    """JSON keeps every branch, Markdown the one in use; files are never overwritten."""
    _, second = chats
    target = tmp_path / "chat.json"
    assert run("sessions", "export", second, "-o", str(target))[0] == 0
    assert json.loads(run("sessions", "export", second, "--json")[1]) == json.loads(target.read_text())
    assert target.stat().st_mode & 0o777 == 0o600
    code, _, err = run("sessions", "export", second, "-o", str(target))
    assert code == 2 and "exists already" in err
    copy = tmp_path / "copy"
    code, out, err = run("sessions", "export", second, "--json", "-o", str(copy))
    facts = {"id": second, "file": str(copy), "bytes": target.stat().st_size}
    assert code == 0 and json.loads(out) == facts and not err
    assert copy.read_bytes() == target.read_bytes()
    back = json.loads(run("sessions", "import", str(target), "--json")[1])
    assert back["turns"] == 2 and back["title"] == "And of lions?"
    markdown = run("sessions", "export", "last")[1]
    for name, more in (("a.md", ()), ("b.json", ("--format", "md")), ("c", ("--format", "md"))):
        told = json.loads(run("sessions", "export", "last", "--json", "-o", str(tmp_path / name), *more)[1])
        assert told["file"] == str(tmp_path / name) and (tmp_path / name).read_text() == markdown
    assert "## Assistant\n\nA lion roars at night.\n" in markdown and "\nroar\n" not in markdown
    assert run("sessions", "import", str(tmp_path / "none"))[0] == 2
    target.write_text("[]")
    assert run("sessions", "import", str(target))[0] == 4


def test_doctor_tells_of_a_deleted_chat_that_cannot_be_erased(run, home):
    """And of none where all can be."""
    store = Store(home / "ruvmlx.db")
    assert deleted_chats(run) == {"name": "deleted chats", "ok": True, "detail": "none waits to be erased"}
    chat = long_chat(store, 1200)
    store.db.execute(
        "CREATE TRIGGER stuck BEFORE DELETE ON messages BEGIN SELECT RAISE(ABORT, 'planted'); END"
    )
    found = deleted_chats(run)
    assert not found["ok"] and chat in found["detail"] and "planted" in found["detail"]
    store.db.execute("DROP TRIGGER stuck")
    assert deleted_chats(run)["ok"] and store.chats.ids() == set()


def deleted_chats(run):
    checks = json.loads(run("doctor", "--json")[1])["checks"]
    return next(check for check in checks if check["name"] == "deleted chats")


@pytest.mark.parametrize("verb", ["show", "export"])
def test_the_words_of_a_killed_chat_are_shown(run, chats, verb):
    """They were missing until a chat was opened."""
    store = Store(settings.store_file())
    store.drafts.put(chats[0], a_reply("d1", text="A zebra has"))
    store.db.execute("UPDATE drafts SET process = '999999999:x'")
    assert "A zebra has" in run("sessions", verb, chats[0])[1]


@pytest.mark.parametrize("log", ["empty", "full"])
def test_reading_on_a_full_disk(home, tmp_path, log):
    """Chats can be listed, shown, searched and exported when nothing can be written."""
    store = Store(home / "ruvmlx.db")
    chat = store.chats.new("tiny", title="rivers")
    store.messages.add_user(chat, "where is the Danube?")
    store.drafts.put(chat, a_reply("d1", text="In the east of"))
    store.db.execute("UPDATE drafts SET process = '999999999:x'")
    if log == "full":  # as after a kill: a copy of the files while they are open
        shutil.copytree(home, tmp_path / "killed")
        assert (tmp_path / "killed" / "ruvmlx.db-wal").stat().st_size
    store.close()
    folder = tmp_path / "killed" if log == "full" else home
    for leftover in folder.glob("*-shm"):
        leftover.unlink()

    def run(*args: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "ruvmlx", *args],
            capture_output=True, text=True, check=False, env={**os.environ, "RUVMLX_HOME": str(folder)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)),
        )  # fmt: skip

    for args in (("ls",), ("show", "last"), ("search", "Danube"), ("export", "last")):
        done = run("sessions", *args)
        assert done.returncode == 0 and "anube" in done.stdout + "anube" * (args == ("ls",)), done.stderr
    done = run("sessions", "rename", "last", "streams")
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    shown = run("sessions", "ls").stdout
    assert "rivers" in shown and "streams" not in shown


def test_a_chat_is_put_into_a_folder_and_out_of_it(run, chats):
    first = chats[0]
    assert run("sessions", "folder", first, "Work \x1b[31mnow")[0] == 0
    assert "Work now › " in run("sessions", "ls")[1]
    [row] = json.loads(run("sessions", "ls", "--folder", "Work now", "--json")[1])
    assert row["id"] == first and row["folder"] == "Work now"
    said = run("sessions", "ls", "--folder", "Play")[1]
    assert "No chat is in folder Play. The only folder is Work now." in said
    run("sessions", "folder", first)
    assert [row["folder"] for row in json.loads(run("sessions", "ls", "--json")[1])] == ["", ""]

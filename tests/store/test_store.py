import sqlite3
import stat
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, NotFound, StoreBusy, StoreError
from ruvmlx.store import ReplyRow, Store, schema


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


def a_reply(reply_id="r1", **fields) -> ReplyRow:
    known = dict(
        id=reply_id, model="m", fingerprint="f", adapter="default", adapter_version=0, prompt_ids=[1, 2],
        sampled_ids=[3, 70000], prompt="hi", text="yo", finish_reason="stop",
        query=np.array([0.5, -1], np.float32), logprob=-1.5,
    )  # fmt: skip
    return ReplyRow(**(known | fields))


def test_every_commit_is_on_disk_before_the_call_returns(store):
    """WAL with synchronous=FULL (2)."""
    assert store.db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert store.db.execute("PRAGMA synchronous").fetchone()[0] == 2


def test_replies_come_back_as_they_were(store):
    store.replies.add(a_reply(), None)
    back = store.replies.get("r1")
    assert (back.prompt_ids, back.sampled_ids, back.text) == ([1, 2], [3, 70000], "yo")
    np.testing.assert_array_equal(back.query, [0.5, -1])


def test_a_row_takes_named_values_then_the_first_fact_of_a_columns_name_then_the_default():
    """None is a fact that knows nothing; an attribute that is no column is left out."""
    known = vars(a_reply("named", text="named"))
    del known["model"], known["fingerprint"], known["logprob"]
    first = SimpleNamespace(text="first", model="first", seconds=1)
    second = SimpleNamespace(model="second", fingerprint="second")
    row = ReplyRow.of(None, first, second, **known)
    assert (row.id, row.text, row.model, row.fingerprint) == ("named", "named", "first", "second")
    assert row.logprob is None


def test_last_is_the_newest_and_a_beginning_is_enough(store):
    for reply_id in ("abc1", "abd2", "xyz3"):
        store.replies.add(a_reply(reply_id), None)
    assert store.replies.get("last").id == "xyz3"
    assert store.replies.get("abd").id == "abd2"
    with pytest.raises(NotFound, match="more than one"):
        store.replies.get("ab")
    store.replies.add(a_reply("ab"), None)
    assert store.replies.get("ab").id == "ab"  # a whole id, though others begin with it
    with pytest.raises(NotFound, match="no reply"):
        store.replies.get("")
    with pytest.raises(NotFound, match="no reply"):
        store.replies.get("%")


def test_a_chat_is_kept_turn_by_turn(store):
    chat = store.chats.new("m", system="be brief")
    store.messages.add_user(chat, "hello\nthere")
    store.replies.add(a_reply(), chat)
    messages = store.messages.branch(chat)
    assert [(m.role, m.content, m.reply_id) for m in messages] == [
        ("user", "hello\nthere", None),
        ("assistant", "yo", "r1"),
    ]
    assert store.chats.get(chat).title == "hello" and store.chats.get(chat).system == "be brief"
    assert [s.id for s in store.chats.all()] == [chat]


def test_empty_chats_are_not_listed_and_deleted_ones_are_gone(store):
    empty, used = store.chats.new("m"), store.chats.new("m")
    store.messages.add_user(used, "x")
    assert [s.id for s in store.chats.all()] == [used]
    store.chats.delete(used)
    assert store.chats.all() == [] and store.messages.branch(used) == []
    with pytest.raises(NotFound):
        store.chats.get(used)
    assert store.chats.get(empty).turns == 0


def test_a_deleted_chat_leaves_no_words_behind(store, home):
    """Neither in the tables nor in the bytes of the files; that a reply was rated stays known."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "my secret zanzibar77")
    store.replies.add(a_reply("unrated", prompt="zanzibar77", text="zanzibar77"), chat)
    told = a_reply("rated", prompt="zanzibar77", text="zanzibar77", features=b"zanzibar77")
    store.replies.add(told, chat)
    store.traces.put("rated", b"zanzibar77")
    with store.transaction():
        version = store.versions.add("f", "default", 0, b"state", 0.0, 0.0)
        store.ratings.add("f", "default", version, "rated", "up", "why zanzibar77?", 1.0)
    store.chats.delete(chat)
    store.close()
    assert all(b"zanzibar77" not in path.read_bytes() for path in home.iterdir())
    store = Store(home / "ruvmlx.db")
    with pytest.raises(NotFound):
        store.replies.get("unrated")
    assert store.traces.get("rated") is None and len(store.ratings.in_force("f", "default")) == 1
    assert store.ratings.texts("f", "default") == []


def test_words_that_were_shown_as_examples_are_gone_too(store, home):
    """A reply whose prompt showed the deleted one keeps its own words and rating, and trains no more."""
    chat, secret = store.chats.new("m"), [90210, 90211, 90212]
    store.replies.add(a_reply("told", text="zanzibar77", prompt_ids=[1], sampled_ids=secret), chat)
    for name, examples in (("shown", ("other", "told")), ("not shown", ("other",)), ("toldx", ("toldx",))):
        store.replies.add(a_reply(name, prompt_ids=[5, *secret], sampled_ids=[6], examples=examples), None)
        store.traces.put(name, b"hidden")
        with store.transaction():
            version = store.versions.add("f", "default", store.versions.head("f", "default"), b"s", 0.0, 0.0)
            store.ratings.add("f", "default", version, name, "up", "", 1.0)
    assert store.chats.delete(chat)
    assert store.replies.get("shown").prompt_ids == [] and store.traces.get("shown") is None
    assert store.replies.get("shown").sampled_ids == [6] and store.traces.get("not shown") == b"hidden"
    assert len(store.ratings.in_force("f", "default")) == 3
    assert [r.reply_id for r in store.ratings.replies("f", "default", 9)] == ["not shown", "toldx"]


def test_a_reader_keeps_the_log(store, home):
    """What is deleted is still in the log while another process reads an older state; the caller is told."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "my secret zanzibar77")
    reader = Store(home / "ruvmlx.db")
    with reader.snapshot():
        assert reader.chats.all()
        assert not store.chats.delete(chat)
    assert store.db.truncate_log()
    assert all(b"zanzibar77" not in path.read_bytes() for path in home.iterdir())


def test_only_the_user_may_read_the_store(store, home):
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "ruvmlx.db").stat().st_mode) == 0o600


def test_many_processes_may_be_the_first(home):
    """Eight processes open an empty store at the same moment."""
    code = "import sys; from pathlib import Path; from ruvmlx.store import Store; sys.stdin.read(1);"
    code += "Store(Path(sys.argv[1])).chats.all()"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(home / "ruvmlx.db")],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(8)
    ]
    for child in children:
        child.stdin.write(b"x")
        child.stdin.flush()
    assert [child.communicate()[1].decode()[-200:] for child in children] == [""] * 8


def test_a_failed_transaction_leaves_no_trace(store):
    with pytest.raises(RuntimeError), store.transaction():
        store.db.execute("INSERT INTO neutral VALUES ('f', x'00')")
        raise RuntimeError
    assert store.model_data.reference_text("f") is None


def test_a_locked_store_is_busy_not_broken(store, home):
    store.db.execute("PRAGMA busy_timeout = 30")
    other = Store(home / "ruvmlx.db")
    with other.transaction(), pytest.raises(StoreBusy) as e:
        store.model_data.put_reference_text("f", b"x")
    assert e.value.exit_code == 5
    store.model_data.put_reference_text("f", b"x")


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    """A file stands where the data folder should be (works for root too, who can write anywhere)."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="RUVMLX_HOME") as e:
        Store(tmp_path / "file" / "home" / "ruvmlx.db")
    assert "\n" not in str(e.value)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_damaged_store_is_said_and_not_touched(tmp_path):
    path = tmp_path / "ruvmlx.db"
    path.write_bytes(b"this is no database, " * 99)
    before = path.read_bytes()
    with pytest.raises(CorruptFile, match="damaged") as e:
        Store(path)
    assert e.value.exit_code == 4
    assert path.read_bytes() == before


def of_an_older_format(path, version):
    """A store in an older format, with one chat of four messages."""
    db = sqlite3.connect(path)
    for step in schema._STEPS[:version]:
        db.executescript(step)
    db.execute(f"PRAGMA user_version = {version}")
    db.execute("INSERT INTO sessions VALUES ('c1', 'old talk', NULL, 'm', 1.0, 2.0)")
    for message in [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]:
        db.execute(
            "INSERT INTO messages (session_id, role, content, created) VALUES ('c1', ?, ?, 1)", message
        )
    db.commit()
    db.close()


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_store_gets_what_came_later(tmp_path, version):
    """Tables, branches (the conversation is one) and the words of old messages in the index."""
    path = tmp_path / "ruvmlx.db"
    of_an_older_format(path, version)
    for _ in range(2):
        store = Store(path)
        assert store.routes.counts("f", "default") == {} and store.routes.cell("f", "default") == (None, {})
        assert [m.content for m in store.messages.branch("c1")] == ["one", "two", "three", "four"]
        assert [f.content for f in store.search.find("THRE")] == ["three"]
        store.close()
    store = Store(path)
    store.messages.add_user("c1", "five")
    assert [m.content for m in store.messages.branch("c1")][-2:] == ["four", "five"]


def test_a_newer_store_is_refused(tmp_path):
    path = tmp_path / "ruvmlx.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="newer ruvmlx"):
        Store(path)
    assert stat.S_ISREG(path.stat().st_mode)


def test_the_newest_50_replies_keep_their_traces(store):
    for i in range(53):
        store.replies.add(a_reply(f"{i:02}"), None)
        store.traces.put(f"{i:02}", b"a trace")
    assert [i for i in range(53) if store.traces.get(f"{i:02}") is None] == [0, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 1 << 16, (1 << 16) + 1, 300_001])
def test_a_long_value_is_stored_whole_but_no_statement_keeps_it(store, size):
    """SQLite and Python keep what a statement was given, until it runs again."""
    value, run = np.random.default_rng(size).bytes(size), []
    store.db._connection.set_trace_callback(run.append)
    for name in ("probe", "other", "probe"):
        store.checkpoints.put_measurement("f", name, b"before")
        store.checkpoints.put_measurement("f", name, value)
    store.db._connection.set_trace_callback(None)
    assert store.checkpoints.measurement("f", "probe") == value
    assert store.checkpoints.measurement("f", "other") == value
    assert run and max(map(len, run)) < 2 * (1 << 16) + 200  # a byte is two digits there


def test_a_title_is_the_beginning_of_the_first_message(store):
    chat = store.chats.new("m")
    store.messages.add_user(chat, "\n" + "many  words " * 20 + "\nthe text of a file")
    assert store.chats.get(chat).title.strip() == ("many words " * 20)[:60].strip()


def test_a_rating_again_does_not_walk_all_versions(home):
    """After two years, a walk over 6,000 versions took 20 ms, of 15 ms that a rating may take."""
    store, key, steps = Store(home / "ruvmlx.db"), ("f" * 64, "default"), 0

    def count_step():
        nonlocal steps
        steps += 1

    def cost(call):
        nonlocal steps
        steps = 0
        store.db._connection.set_progress_handler(count_step, 1)
        found = call()
        store.db._connection.set_progress_handler(None, 0)
        return found, steps

    for n in range(300):
        store.replies.add(a_reply(f"r{n}"), None)
        with store.transaction():
            version = store.versions.add(*key, n, b"weights %d" % n, 0.0, 0.0)
            store.ratings.add(*key, version, f"r{n}", "up", "", 1.0)
    newest, few = cost(lambda: store.ratings.steps_of_reply(*key, 300, "r298"))
    oldest, many = cost(lambda: store.ratings.steps_of_reply(*key, 300, "r0"))
    assert (newest, oldest) == ([(298, 299)], [(0, 1)]) and few < many / 20
    assert store.ratings.steps_of_reply(*key, 298, "r298") == []
    (near, few), (far, many) = (cost(lambda v=v: store.versions.is_ancestor(*key, v, 300)) for v in (299, 1))
    assert near and far and few < many / 20
    assert not store.versions.is_ancestor(*key, 300, 299)
    store.close()

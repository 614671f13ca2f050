"""The message tree, forks, and deleted chats."""

import os
import random
import time
from contextlib import closing

import pytest

from ruvmlx.chats import soft_delete
from ruvmlx.errors import NotFound
from ruvmlx.store import MessageRow, Store, drafts, search_index
from ruvmlx.store.messages import ERASING, MessagePlace
from ruvmlx.store.tree import Tree

from .test_store import a_reply


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


def branch_texts(store, chat):
    return [m.content for m in store.messages.branch(chat)]


def exchange(store, chat, question, *replies):
    """Add a question with several replies, of which the last is shown; return the ids of question and
    replies."""
    store.messages.add_user(chat, question)
    asked, ids = store.messages.branch(chat)[-1].id, []
    for text in replies:
        store.messages.set_head(chat, asked)
        store.replies.add(a_reply(f"{chat}-{text}", text=text), chat)
        ids.append(store.messages.branch(chat)[-1].id)
    return asked, ids


def test_nothing_is_lost_when_a_reply_is_written_again(store):
    """Both replies stay, are numbered, and can be flipped through, round and round."""
    chat = store.chats.new("m")
    asked, (a, b) = exchange(store, chat, "q", "one", "two")
    assert branch_texts(store, chat) == ["q", "two"]
    assert [(m.branch, m.branches) for m in store.messages.branch(chat)] == [(1, 1), (2, 2)]
    assert store.messages.next_sibling(chat, b, 1) == a and branch_texts(store, chat) == ["q", "one"]
    assert store.messages.next_sibling(chat, a, -1) == b and branch_texts(store, chat) == ["q", "two"]
    assert store.messages.next_sibling(chat, asked, 1) == a  # the question stands for the reply that is shown


def test_a_list_counts_the_messages_of_the_branch_in_use(store):
    chat, empty = store.chats.new("m"), store.chats.new("m")
    _, (a, _) = exchange(store, chat, "q", "one", "two")
    exchange(store, chat, "more", "three")
    assert [row.turns for row in store.chats.all()] == [4] and store.chats.get(empty).turns == 0
    store.messages.set_head(chat, a)
    assert store.chats.get(chat).turns == 2 == len(store.messages.branch(chat))
    store.chats.soft_delete(chat)
    assert [row.turns for row in store.chats.soft_deleted()] == [2]


def test_a_branch_that_was_read_before_is_the_branch_of_now(store, home):
    """The last result is kept; a write of this or another process, or a taken-back one, makes it anew."""
    chat, other = store.chats.new("m"), store.chats.new("m")
    exchange(store, chat, "What is the sea?", "Blue.")
    kept = store.messages._db.rows
    reads = []
    store.messages._db.rows = lambda *sql: reads.append(sql) or kept(*sql)
    branch_texts(store, chat)
    before = len(reads)
    branch_texts(store, chat).clear()  # the caller's list is its own
    assert branch_texts(store, chat) == ["What is the sea?", "Blue."] and len(reads) == before
    assert branch_texts(store, other) == []
    with closing(Store(home / "ruvmlx.db")) as second:
        second.messages.add_user(chat, "And the sky?")
    assert branch_texts(store, chat) == ["What is the sea?", "Blue.", "And the sky?"]
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.messages.add_user(chat, "And the sun?")
        assert branch_texts(store, chat)[-1] == "And the sun?"
        raise ZeroDivisionError
    assert branch_texts(store, chat)[-1] == "And the sky?"
    store.messages.add_user(chat, "And the moon?")
    assert branch_texts(store, chat)[-1] == "And the moon?"


def test_a_question_in_other_words_is_an_alternative_with_all_that_followed(store):
    chat = store.chats.new("m")
    exchange(store, chat, "first", "answer")
    _, (old,) = exchange(store, chat, "second", "reply")
    exchange(store, chat, "third", "end")
    store.messages.set_head(chat, store.messages.branch(chat)[1].id)
    _, (new,) = exchange(store, chat, "SECOND", "other")
    assert branch_texts(store, chat) == ["first", "answer", "SECOND", "other"]
    assert store.messages.next_sibling(chat, new, 1) == old
    assert branch_texts(store, chat) == ["first", "answer", "second", "reply", "third", "end"]
    assert [(m.branch, m.branches) for m in store.messages.branch(chat)][2:4] == [(1, 2), (1, 1)]


def test_a_reply_is_counted_among_the_replies_to_its_question_alone(store):
    """Each version of the question counts its own replies. The versions are counted at the question."""
    chat = store.chats.new("m")
    exchange(store, chat, "Which sea is that?", "A", "B", "C")
    store.messages.set_head(chat, None)
    _, (other,) = exchange(store, chat, "Which lake is that?", "D")
    for shown in [(2, 2), (1, 1)], [(1, 2), (3, 3)]:
        assert [(m.branch, m.branches) for m in store.messages.branch(chat)] == shown
        store.messages.next_sibling(chat, other, -1)


def test_a_reply_belongs_to_its_question_whoever_else_writes(store):
    """Two processes in one chat: the second one moves the head while the first one's reply is written."""
    chat = store.chats.new("m")
    _, (last,) = exchange(store, chat, "begin", "begun")
    first = store.messages.add_user(chat, "one", last)
    second = store.messages.add_user(chat, "two", last)
    store.drafts.put(chat, a_reply("r1", text="to o"), first)
    store.replies.add(a_reply("r1", text="to one"), chat, question=first)
    assert branch_texts(store, chat) == ["begin", "begun", "one", "to one"]
    store.replies.add(a_reply("r2", text="to two"), chat, question=second)
    assert branch_texts(store, chat) == ["begin", "begun", "two", "to two"]
    assert [m.parent for m in store.messages.all(chat)][2:] == [last, last, first, second]


def test_a_draft_is_recovered_under_its_question(store):
    chat = store.chats.new("m")
    first, second = store.messages.add_user(chat, "one", None), store.messages.add_user(chat, "two", None)
    store.drafts.put(chat, a_reply("d1", text="half"), first)
    store.db.execute("UPDATE drafts SET process = '4194305:x'")
    assert store.drafts.recover() == [chat] and branch_texts(store, chat) == ["one", "half"]
    assert store.messages.all(chat)[1].id == second


@pytest.mark.parametrize("gone", ["chat", "question"])
def test_a_reply_to_what_is_gone_is_refused(store, gone):
    chat = store.chats.new("m")
    question = store.messages.add_user(chat, "q")
    if gone == "chat":
        store.db.execute("DELETE FROM sessions WHERE id = ?", chat)
    else:
        question += 1
    with pytest.raises(NotFound):
        store.replies.add(a_reply("r1"), chat, question=question)
    assert store.db.rows("SELECT * FROM replies") == []


def test_the_first_question_can_be_put_anew(store):
    chat = store.chats.new("m")
    exchange(store, chat, "one", "a")
    store.messages.set_head(chat, None)
    store.messages.add_user(chat, "two")
    assert branch_texts(store, chat) == ["two"]
    assert [(m.branch, m.branches) for m in store.messages.branch(chat)] == [(2, 2)]
    store.messages.next_sibling(chat, store.messages.branch(chat)[0].id, 1)
    assert branch_texts(store, chat) == ["one", "a"]


def random_nodes(rng, forks):
    """Return a random tree of nineteen messages. forks: the probability that a message gets a random parent.
    All other messages follow the newest message."""
    nodes = [MessagePlace(1, None, "user")]
    for n in range(2, 20):
        parent = rng.choice([None, *nodes]) if rng.random() < forks else nodes[-1]
        role = "user" if parent is None or parent.role == "assistant" else "assistant"
        nodes.append(MessagePlace(n, parent.id if parent else None, role))
    return nodes


@pytest.mark.parametrize("forks", [0, 0.1, 0.5])
def test_the_newest_messages_are_the_end_of_the_branch(store, forks):
    """The newest messages are the last messages of the branch. A message's number of versions is the number
    of messages with the same parent and the same role."""
    rng = random.Random(5)
    for _ in range(10):
        nodes, chat = random_nodes(rng, forks), store.chats.new("m")
        rows = [MessageRow(n.role, f"m{n.id}", None, None, None, n.id, n.parent) for n in nodes]
        store.messages.add_tree(chat, rows, rng.choice(nodes).id)
        branch, everything = store.messages.branch(chat), store.messages.all(chat)
        for row in branch:
            ids = [m.id for m in everything if (m.parent, m.role) == (row.parent, row.role)]
            assert (row.branch, row.branches) == (ids.index(row.id) + 1, len(ids))
        for count in (1, 2, 5, 50):
            assert store.messages.newest(chat, count) == branch[-count:]


def test_every_message_of_a_random_tree_can_be_reached(store):
    """Whatever was said where: by flipping alone each reply comes into view."""
    rng = random.Random(3)
    for _ in range(30):
        nodes = random_nodes(rng, 0.9)
        tree, seen, todo = Tree(nodes), set(), [1]
        while todo:
            for shown in tree.path(tree.newest_leaf(todo.pop())):
                if shown not in seen:
                    seen.add(shown)
                    todo += tree.siblings(shown)
        assert seen == {node.id for node in nodes}


def test_a_head_of_another_chat_is_refused(store):
    one, two = store.chats.new("m"), store.chats.new("m")
    asked, _ = exchange(store, one, "q", "a")
    with pytest.raises(NotFound):
        store.messages.set_head(two, asked)


def test_a_fork_goes_its_own_way(store):
    """It has the words and the ratings up to a message; what is said then stays in one chat."""
    chat = store.chats.new("m", "be brief")
    exchange(store, chat, "q", "a")
    exchange(store, chat, "r", "b")
    fork = store.chats.fork(chat, store.messages.branch(chat)[1].id)
    assert branch_texts(store, fork) == ["q", "a"] and store.chats.get(fork).system == "be brief"
    store.messages.add_user(fork, "more")
    assert branch_texts(store, chat) == ["q", "a", "r", "b"]
    assert store.chats.get(fork).title == "q (fork)"


def test_a_reply_stays_as_long_as_a_chat_shows_it(store):
    chat = store.chats.new("m")
    exchange(store, chat, "q", "kept")
    fork = store.chats.fork(chat)
    store.chats.delete(chat)
    assert store.replies.get(f"{chat}-kept").text == "kept" and branch_texts(store, fork) == ["q", "kept"]
    store.chats.delete(fork)
    with pytest.raises(NotFound):
        store.replies.get(f"{chat}-kept")


def test_the_index_forgets_what_is_deleted(store):
    """Its pages have no letter of the deleted words, though FTS5 itself only marks them."""
    chat, other = store.chats.new("m"), store.chats.new("m")
    store.messages.add_user(
        chat, "Щюф"
    )  # a term is stored without the letters that it shares with the one before
    store.messages.add_user(other, "london")
    assert in_index(store, "щюф") and in_index(store, "lon")
    store.chats.delete(chat, seconds=0)
    assert in_index(store, "щюф") and store.search.find("щюф") == []
    store.chats.clean_index(60)
    assert not in_index(store, "щюф") and in_index(store, "lon")


def in_index(store, letters):
    """Do the pages of the index have these letters anywhere?"""
    pages = store.db.rows("SELECT block FROM messages_text_data")
    return any(letters.encode() in row["block"] for row in pages)


def long_chat(store, messages):
    """A chat with one branch, deleted two days ago."""
    chat = store.chats.new("m")
    roles = ("assistant", "user")
    rows = [
        MessageRow(roles[i % 2], f"long {i}", None, None, None, id=i, parent=i - 1 or None)
        for i in range(1, messages + 1)
    ]
    store.messages.add_tree(chat, rows, messages)
    store.chats.soft_delete(chat)
    store.db.execute("UPDATE sessions SET deleted = deleted - 2 * 86400 WHERE id = ?", chat)
    return chat


@pytest.mark.parametrize("messages", [999, 1200, 5000])
def test_a_chat_of_any_length_can_be_deleted(store, messages):
    """SQLite stops at 1,000 nested triggers: ON DELETE CASCADE must not follow the chain of parents."""
    other = store.chats.new("m")
    store.messages.add_user(other, "short")
    long_chat(store, messages)
    assert soft_delete.delete_older(store) == []
    assert store.db.value("SELECT count(*) FROM messages") == 1 and branch_texts(store, other) == ["short"]
    assert store.search.find("long") == [] and store.integrity() == "ok"


def test_a_chat_that_cannot_be_deleted_stops_nothing_and_is_reported(store):
    """Every start erases what is due: a failure there must not keep the user from the program."""
    stuck, due = long_chat(store, 2), long_chat(store, 2)
    store.db.execute(
        "CREATE TRIGGER stuck BEFORE DELETE ON sessions"
        f" WHEN OLD.id = '{stuck}' BEGIN SELECT RAISE(ABORT, 'planted'); END"
    )
    (line,) = soft_delete.delete_older(store)
    assert stuck in line and "planted" in line
    assert store.chats.ids() == {stuck} and due not in store.chats.ids()


def test_others_write_while_chats_are_erased(store, monkeypatch):
    """Deletion is many short transactions, and nobody holds the lock between them."""
    mine, kept = [long_chat(store, 300) for _ in range(3)], store.chats.new("m")
    other, written = Store(store.path), []

    def write(seconds):
        assert 0 <= seconds <= 0.1
        written.append(other.messages.add_user(kept, f"message {len(written)}"))

    monkeypatch.setattr(time, "sleep", write)
    with closing(other):
        assert soft_delete.delete(store, *mine)
        assert len(written) >= 20 and len(branch_texts(store, kept)) == len(written)
    assert store.chats.ids() == {kept} and store.search.find("long") == [] and store.search_index.is_clean()
    store.db.execute("INSERT INTO messages_text(messages_text) VALUES ('integrity-check')")


def test_a_deletion_that_was_killed_goes_on_at_the_next_start(store, home, monkeypatch):
    """What is half erased is shown nowhere, cannot be restored or written to, and goes at the next start."""
    chat, kept = long_chat(store, 200), store.chats.new("m")
    store.messages.add_user(kept, "words that stay")
    erase_some = store.chats._erase_some
    monkeypatch.setattr(store.chats, "_erase_some", lambda id_: erase_some(id_) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.chats.delete(chat)
    assert 0 < store.db.value("SELECT count(*) FROM messages WHERE session_id = ?", chat) < 200
    assert [row.id for row in store.chats.all()] == [kept] and store.chats.soft_deleted() == []
    assert store.search.find("long") == []
    for change in (
        store.chats.restore,
        store.chats.soft_delete,
        lambda id_: store.messages.add_user(id_, "x"),
    ):
        with pytest.raises(NotFound, match="delete"):
            change(chat)
    with closing(Store(store.path)) as later:
        assert soft_delete.delete_older(later) == [] and later.chats.ids() == {kept}


def test_an_index_that_is_not_clean_is_cleaned_later(store, monkeypatch):
    """In steps, by whoever starts next; words deleted meanwhile go, too."""
    monkeypatch.setattr(search_index, "_PAGES", 1)
    monkeypatch.setattr(soft_delete, "AT_START", 0.001)
    chats = [store.chats.new("m") for _ in range(2)]
    store.messages.add_user(chats[0], "Щюф")  # the oldest is deleted last
    store.messages.add_user(chats[1], "Ыюф")
    for i in range(300):
        store.messages.add_user(chats[i % 2], " ".join(f"word{i}x{j}" for j in range(200)))
    store.messages.add_user(store.chats.new("m"), "london")
    assert store.chats.delete(chats[0], seconds=0) is False and not store.search_index.is_clean()
    store.search_index._step()
    store.chats.delete(chats[1], seconds=0)
    starts = 0
    while not store.search_index.is_clean():
        with closing(Store(store.path)) as later:
            soft_delete.delete_older(later)
        starts += 1
    assert starts > 1 and not in_index(store, "щюф") and not in_index(store, "ыюф")
    assert in_index(store, "lon")


def test_put_away_and_back(store):
    chat = store.chats.new("m")
    store.messages.add_user(chat, "q")
    store.chats.soft_delete(chat)
    assert (
        store.chats.all() == []
        and store.chats.soft_deleted_before(2e12) == [chat]
        and store.messages.user_texts() == []
    )
    with pytest.raises(NotFound):
        store.chats.find(chat)
    store.chats.restore(chat)
    assert [s.id for s in store.chats.all()] == [chat] and store.chats.soft_deleted_before(2e12) == []


def test_a_beginning_of_an_id_is_enough(store):
    chats = [store.chats.new("m") for _ in range(40)]
    store.messages.add_user(chats[7], "q")
    assert store.chats.find("last") == chats[7] and store.chats.find(chats[3]) == chats[3]
    with pytest.raises(NotFound, match="more than one"):
        twice = next(c[0] for c in chats if sum(d[0] == c[0] for d in chats) > 1)
        store.chats.find(twice)
    for wrong in ("", "%", "zz"):
        with pytest.raises(NotFound):
            store.chats.find(wrong)


def test_what_the_user_said(store):
    """The newest first, each text once."""
    chat = store.chats.new("m")
    for text in ("a", "b", "a", "c"):
        store.messages.add_user(chat, text)
    assert store.messages.user_texts() == ["c", "a", "b"] and store.messages.user_texts(limit=1) == ["c"]


def test_a_draft_becomes_a_reply_when_its_writer_has_gone(store):
    """That of a process that lives is left alone; one that was committed leaves no draft."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "q")
    store.drafts.put(chat, a_reply("d1", text="half"))
    store.drafts.put(chat, a_reply("d1", text="half a", finish_reason="cancelled"))
    assert store.drafts.recover() == []  # our own
    store.db.execute("UPDATE drafts SET process = '1:x'")  # init is always there
    assert store.drafts.recover() == [] and branch_texts(store, chat) == ["q"]
    store.db.execute("UPDATE drafts SET process = '4194305:x'")  # above any process number
    assert store.drafts.recover() == [chat] and branch_texts(store, chat) == ["q", "half a"]
    assert store.replies.get("d1").sampled_ids == [3, 70000] and store.drafts.recover() == []
    store.drafts.put(chat, a_reply("d2", text="x"))
    store.replies.add(a_reply("d2", text="xy"), chat)
    assert store.db.rows("SELECT * FROM drafts") == []


def test_a_draft_whose_writers_number_another_program_has_is_recovered_after_an_hour(store, monkeypatch):
    """It stayed a draft as long as that program ran, and the next reply in the chat replaced it."""
    session = store.chats.new("m")
    store.messages.add_user(session, "hello")
    store.drafts.put(session, a_reply("d1", text="half a re"))
    store.db.execute("UPDATE drafts SET process = '1:x'")
    now = time.time()
    for later, found in ((3000, []), (4000, [session])):
        monkeypatch.setattr(drafts, "_now", lambda later=later: now + later)
        assert store.drafts.recover() == found
    assert branch_texts(store, session) == ["hello", "half a re"]


def test_a_writer_that_slept_for_an_hour_still_completes_its_reply(store, monkeypatch):
    """Another start of the program has recovered the writer's draft meanwhile. The reply had the same id, so
    the writer could not commit, and its next draft then stopped every start."""
    session = store.chats.new("m")
    question = store.messages.add_user(session, "hello")
    store.drafts.put(session, a_reply("d1", text="half"), question)
    store.db.execute("UPDATE drafts SET process = '1:x'")
    now = time.time()
    monkeypatch.setattr(drafts, "_now", lambda: now + 4000)
    assert store.drafts.recover() == [session]
    store.drafts.put(session, a_reply("d1", text="half and"), question)
    store.replies.add(a_reply("d1", text="half and half"), session, question=question)
    assert branch_texts(store, session) == ["hello", "half and half"]
    assert store.replies.get("d1").text == "half and half" and store.drafts.recover() == []


@pytest.mark.parametrize("teaches", [True, False])
def test_a_recovered_draft_teaches_only_what_its_reply_would_have_taught(store, teaches):
    """The answer to a tool's result teaches nothing."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "q")
    store.drafts.put(chat, a_reply("d1", text="half", features=None if teaches else b""))
    store.db.execute("UPDATE drafts SET process = '4194305:x'")
    assert store.drafts.recover() == [chat] and store.replies.get("d1").teaches == teaches


def test_a_draft_of_an_earlier_process_with_our_number(store):
    """As in a container, where each start has number 1; two that come at once make one reply of it."""
    chat = store.chats.new("m")
    store.messages.add_user(chat, "q")
    store.drafts.put(chat, a_reply("d1", text="half"))
    store.db.execute(f"UPDATE drafts SET process = '{os.getpid()}:other'")
    assert store.drafts._claim(chat, f"{os.getpid()}:other") and not store.drafts._claim(
        chat, f"{os.getpid()}:other"
    )
    store.db.execute(f"UPDATE drafts SET process = '{os.getpid()}:other'")
    assert store.drafts.recover() == [chat] and branch_texts(store, chat) == ["q", "half"]


def test_a_draft_of_a_chat_that_was_being_erased_is_deleted(store):
    """The deletion and the reply's process were killed: every later start failed with "deleted meanwhile".
    The start erases the chat, and the drafts of other chats still become replies."""
    gone, chat = store.chats.new("m"), store.chats.new("m")
    for session in (gone, chat):
        store.messages.add_user(session, "q")
        store.drafts.put(session, a_reply(f"d-{session}", text="half"))
    store.db.execute("UPDATE drafts SET process = '4194305:x'")
    store.db.execute("UPDATE sessions SET deleted = ? WHERE id = ?", ERASING, gone)
    soft_delete.tidy(store, None)
    assert store.db.rows("SELECT * FROM drafts") == [] and branch_texts(store, chat) == ["q", "half"]
    assert store.chats.ids() == {chat}
    with pytest.raises(NotFound):
        store.replies.get(f"d-{gone}")


@pytest.mark.parametrize("read", [lambda m, chat: m.branch(chat), lambda m, chat: m.newest(chat, 9)])
def test_a_message_that_another_process_adds_meanwhile_does_not_empty_the_branch(store, monkeypatch, read):
    chat = store.chats.new("m")
    exchange(store, chat, "q", "a")
    rows, added = store.db.rows, []

    def rows_and_a_message(sql, *args):
        found = rows(sql, *args)
        if "FROM messages" in sql and not added:
            added.append(True)
            with closing(Store(store.db.path)) as other:
                other.messages.add_user(chat, "new")
        return found

    store.messages._last_branch = None
    monkeypatch.setattr(store.db, "rows", rows_and_a_message)
    assert [message.content for message in read(store.messages, chat)] == ["q", "a"] and added


def test_a_fork_keeps_the_notes_that_stand_for_its_first_messages(store):
    chat = store.chats.new("m")
    exchange(store, chat, "q", "a")
    exchange(store, chat, "r", "b")
    ids = [message.id for message in store.messages.branch(chat)]
    store.chats.set_summary(chat, "The user is Ada.", ids[1])
    fork = store.chats.get(store.chats.fork(chat))
    assert fork.summary == "The user is Ada."
    assert fork.summarized_to == store.messages.branch(fork.id)[1].id
    short = store.chats.get(store.chats.fork(chat, ids[0]))
    assert (short.summary, short.summarized_to) == (None, None)

"""The message tree, search, forks, and chats that are put away."""

import os
import random

import pytest

from ruvmlx import soft_delete
from ruvmlx.errors import NotFound
from ruvmlx.store import MessageRow, Store
from ruvmlx.store.tree import Node, Tree

from .test_store import a_reply


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


def said(store, chat):
    return [m.content for m in store.messages(chat)]


def exchange(store, chat, question, *replies):
    """A question with several replies; the last one is shown. Ids of the question and of its replies."""
    store.add_user_message(chat, question)
    asked, ids = store.messages(chat)[-1].id, []
    for text in replies:
        store.set_head(chat, asked)
        store.add_reply(a_reply(f"{chat}-{text}", text=text), chat)
        ids.append(store.messages(chat)[-1].id)
    return asked, ids


def test_nothing_is_lost_when_a_reply_is_written_again(store):
    """Both replies stay, are numbered, and can be flipped through, round and round."""
    chat = store.new_session("m")
    asked, (a, b) = exchange(store, chat, "q", "one", "two")
    assert said(store, chat) == ["q", "two"]
    assert [(m.branch, m.branches) for m in store.messages(chat)] == [(1, 1), (2, 2)]
    assert store.flip(chat, b, 1) == a and said(store, chat) == ["q", "one"]
    assert store.flip(chat, a, -1) == b and said(store, chat) == ["q", "two"]
    assert store.flip(chat, asked, 1) == a  # the question stands for the reply that is shown


def test_a_question_in_other_words_is_an_alternative_with_all_that_followed(store):
    chat = store.new_session("m")
    exchange(store, chat, "first", "answer")
    _, (old,) = exchange(store, chat, "second", "reply")
    exchange(store, chat, "third", "end")
    store.set_head(chat, store.messages(chat)[1].id)
    _, (new,) = exchange(store, chat, "SECOND", "other")
    assert said(store, chat) == ["first", "answer", "SECOND", "other"]
    assert store.flip(chat, new, 1) == old
    assert said(store, chat) == ["first", "answer", "second", "reply", "third", "end"]
    assert [(m.branch, m.branches) for m in store.messages(chat)][3] == (1, 2)


def test_the_first_question_can_be_put_anew(store):
    chat = store.new_session("m")
    exchange(store, chat, "one", "a")
    store.set_head(chat, None)
    store.add_user_message(chat, "two")
    assert said(store, chat) == ["two"]
    assert [(m.branch, m.branches) for m in store.messages(chat)] == [(2, 2)]
    store.flip(chat, store.messages(chat)[0].id, 1)
    assert said(store, chat) == ["one", "a"]


def test_every_message_of_a_random_tree_can_be_reached(store):
    """Whatever was said where: by flipping alone each reply comes into view."""
    rng = random.Random(3)
    for _ in range(30):
        nodes = [Node(1, None, "user")]
        for n in range(2, 20):
            parent = rng.choice([None, *nodes]) if rng.random() < 0.9 else nodes[-1]
            role = "user" if parent is None or parent.role == "assistant" else "assistant"
            nodes.append(Node(n, parent.id if parent else None, role))
        tree, seen, todo = Tree(nodes), set(), [1]
        while todo:
            for shown in tree.path(tree.newest_leaf(todo.pop())):
                if shown not in seen:
                    seen.add(shown)
                    todo += tree.alternatives(shown)
        assert seen == {node.id for node in nodes}


def test_a_head_of_another_chat_is_refused(store):
    one, two = store.new_session("m"), store.new_session("m")
    asked, _ = exchange(store, one, "q", "a")
    with pytest.raises(NotFound):
        store.set_head(two, asked)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("zebra", ["A Zebra_crossing, 100%"]),
        ("ZEBRA cross", ["A Zebra_crossing, 100%"]),
        ("bra_cr", ["A Zebra_crossing, 100%"]),
        ("0%", ["A Zebra_crossing, 100%"]),
        ("_c zeb", ["A Zebra_crossing, 100%"]),
        ("日本", ["日本語のテスト"]),
        ("本語の", ["日本語のテスト"]),
        ('"quoted" AND', ['say "quoted" AND or NOT(x*']),
        ("NOT(x*", ['say "quoted" AND or NOT(x*']),
        ("b%a", []),
        ("zebra missing", []),
        ("", []),
    ],
)
def test_search_finds_all_words_in_any_script(store, words, found):
    """All words, anywhere, in any script; nothing that is typed is taken for a query's own language."""
    chat = store.new_session("m")
    for text in ("A Zebra_crossing, 100%", "日本語のテスト", 'say "quoted" AND or NOT(x*'):
        store.add_user_message(chat, text)
    store.set_title(chat, "t")
    assert [hit.content for hit in store.search(words)] == found


def test_search_finds_what_a_plain_look_finds(store):
    """The index and a look at every message agree, on pieces of words cut at random."""
    rng, chat = random.Random(5), store.new_session("m", title="-")
    texts = ["".join(rng.choices("abcé_% ", k=rng.randrange(1, 40))) for _ in range(60)]
    for text in texts:
        store.add_user_message(chat, text)
    for _ in range(200):
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        words = text[at : at + rng.randrange(1, 6)].split()
        expected = [t for t in reversed(texts) if words and all(word in t for word in words)]
        assert [hit.content for hit in store.search(" ".join(words))] == expected


def test_search_finds_titles_branches_and_nothing_put_away(store):
    chat, other = store.new_session("m", "sees pelicans"), store.new_session("m")
    exchange(store, chat, "q", "heron", "stork")
    exchange(store, other, "heron", "gone")
    store.set_title(chat, "  My   birds ")
    store.put_away(other)
    assert [(h.role, h.content) for h in store.search("birds")] == [("title", "My birds")]
    assert [h.message_id for h in store.search("pelican")] == [None]
    assert [h.session.id for h in store.search("heron")] == [chat]
    store.bring_back(other)
    assert {h.session.id for h in store.search("heron")} == {chat, other}


def test_a_fork_goes_its_own_way(store):
    """It has the words and the ratings up to a message; what is said then stays in one chat."""
    chat = store.new_session("m", "be brief")
    exchange(store, chat, "q", "a")
    exchange(store, chat, "r", "b")
    fork = store.fork_session(chat, store.messages(chat)[1].id)
    assert said(store, fork) == ["q", "a"] and store.session(fork).system == "be brief"
    store.add_user_message(fork, "more")
    assert said(store, chat) == ["q", "a", "r", "b"]
    assert store.session(fork).title == "q (fork)"


def test_a_reply_stays_as_long_as_a_chat_shows_it(store):
    chat = store.new_session("m")
    exchange(store, chat, "q", "kept")
    fork = store.fork_session(chat)
    store.delete_session(chat)
    assert store.reply(f"{chat}-kept").text == "kept" and said(store, fork) == ["q", "kept"]
    store.delete_session(fork)
    with pytest.raises(NotFound):
        store.reply(f"{chat}-kept")


def test_the_index_forgets_what_is_deleted(store, home):
    """Its own table of word pieces has none of the deleted chat's."""
    chat, other = store.new_session("m"), store.new_session("m")
    store.add_user_message(chat, "zanzibar")
    store.add_user_message(other, "london")
    store._db.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab('main', 'messages_text', 'row')")
    pieces = lambda: {row[0] for row in store._rows("SELECT term FROM temp.terms")}  # noqa: E731
    assert {"zan", "lon"} <= pieces()
    store.delete_session(chat)
    assert "lon" in pieces() and "zan" not in pieces()


def long_chat(store, messages):
    """A chat of one branch, deleted two days ago."""
    chat = store.new_session("m")
    roles = ("assistant", "user")
    rows = [
        MessageRow(roles[i % 2], f"long {i}", None, None, None, id=i, parent=i - 1 or None)
        for i in range(1, messages + 1)
    ]
    store.add_tree(chat, rows, messages)
    store.put_away(chat)
    store._db.execute("UPDATE sessions SET deleted = deleted - 2 * 86400 WHERE id = ?", (chat,))
    return chat


@pytest.mark.parametrize("messages", [999, 1200, 5000])
def test_a_chat_of_any_length_can_be_deleted(store, messages):
    """SQLite stops at 1,000 nested triggers: ON DELETE CASCADE must not follow the chain of parents."""
    other = store.new_session("m")
    store.add_user_message(other, "short")
    long_chat(store, messages)
    assert soft_delete.delete_older(store) == []
    assert store._rows("SELECT count(*) FROM messages") == [(1,)] and said(store, other) == ["short"]
    assert store.search("long") == [] and store.integrity() == "ok"


def test_a_chat_that_cannot_be_deleted_stops_nothing_and_is_reported(store):
    """Every start erases what is due: a failure there must not keep the user from the program."""
    stuck, due = long_chat(store, 2), long_chat(store, 2)
    store._db.execute(
        "CREATE TRIGGER stuck BEFORE DELETE ON sessions"
        f" WHEN OLD.id = '{stuck}' BEGIN SELECT RAISE(ABORT, 'planted'); END"
    )
    (line,) = soft_delete.delete_older(store)
    assert stuck in line and "planted" in line
    assert store.session_ids() == {stuck} and due not in store.session_ids()


def test_put_away_and_back(store):
    chat = store.new_session("m")
    store.add_user_message(chat, "q")
    store.put_away(chat)
    assert store.sessions() == [] and store.put_away_before(2e12) == [chat] and store.said() == []
    with pytest.raises(NotFound):
        store.find_session(chat)
    store.bring_back(chat)
    assert [s.id for s in store.sessions()] == [chat] and store.put_away_before(2e12) == []


def test_a_beginning_of_an_id_is_enough(store):
    chats = [store.new_session("m") for _ in range(40)]
    store.add_user_message(chats[7], "q")
    assert store.find_session("last") == chats[7] and store.find_session(chats[3]) == chats[3]
    with pytest.raises(NotFound, match="more than one"):
        twice = next(c[0] for c in chats if sum(d[0] == c[0] for d in chats) > 1)
        store.find_session(twice)
    for wrong in ("", "%", "zz"):
        with pytest.raises(NotFound):
            store.find_session(wrong)


def test_what_the_user_said(store):
    """The newest first, each text once."""
    chat = store.new_session("m")
    for text in ("a", "b", "a", "c"):
        store.add_user_message(chat, text)
    assert store.said() == ["c", "a", "b"] and store.said(limit=1) == ["c"]


def test_a_draft_becomes_a_reply_when_its_writer_has_gone(store):
    """That of a process that lives is left alone; one that was committed leaves no draft."""
    chat = store.new_session("m")
    store.add_user_message(chat, "q")
    store.put_draft(chat, a_reply("d1", text="half"))
    store.put_draft(chat, a_reply("d1", text="half a", finish_reason="cancelled"))
    assert store.take_up_drafts() == []  # our own
    store._db.execute("UPDATE drafts SET process = '1:x'")  # init is always there
    assert store.take_up_drafts() == [] and said(store, chat) == ["q"]
    store._db.execute("UPDATE drafts SET process = '4194305:x'")  # above any process number
    assert store.take_up_drafts() == [chat] and said(store, chat) == ["q", "half a"]
    assert store.reply("d1").sampled_ids == [3, 70000] and store.take_up_drafts() == []
    store.put_draft(chat, a_reply("d2", text="x"))
    store.add_reply(a_reply("d2", text="xy"), chat)
    assert store._rows("SELECT * FROM drafts") == []


def test_a_draft_of_an_earlier_process_with_our_number(store):
    """As in a container, where each start has number 1; two that come at once make one reply of it."""
    chat = store.new_session("m")
    store.add_user_message(chat, "q")
    store.put_draft(chat, a_reply("d1", text="half"))
    store._db.execute(f"UPDATE drafts SET process = '{os.getpid()}:other'")
    assert store._claim(chat, f"{os.getpid()}:other") and not store._claim(chat, f"{os.getpid()}:other")
    store._db.execute(f"UPDATE drafts SET process = '{os.getpid()}:other'")
    assert store.take_up_drafts() == [chat] and said(store, chat) == ["q", "half"]

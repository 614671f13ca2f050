"""The search in the words of all chats."""

import itertools
import random
import string

import pytest

from ruvmlx.store import Store

from .test_branches import exchange


@pytest.fixture
def store(home):
    return Store(home / "ruvmlx.db")


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
    chat = store.chats.new("m")
    for text in ("A Zebra_crossing, 100%", "日本語のテスト", 'say "quoted" AND or NOT(x*'):
        store.messages.add_user(chat, text)
    store.chats.set_title(chat, "t")
    assert [hit.content for hit in store.search.find(words)] == found


def test_search_takes_a_long_text(store):
    """A user can search for a pasted text, although SQLite refuses a chain of 1,000 conditions."""
    chat, letters = store.chats.new("m", title="-"), string.ascii_lowercase + string.digits
    short = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    long = [f"word{n}" for n in range(1_500)]
    for text in (" ".join([*short, *long]), " ".join(short[:-40])):
        store.messages.add_user(chat, text)
    for words in (short, long, [*short, *long], 40_000 * ["zz"] + ["99"]):
        assert len(store.search.find(" ".join(words))) == 1
    assert store.search.find(" ".join([*short, "é"])) == []


def test_search_finds_what_a_plain_look_finds(store):
    """The index and a look at every message agree, on pieces of words cut at random."""
    rng, chat = random.Random(5), store.chats.new("m", title="-")
    texts = ["".join(rng.choices("abcé_% ", k=rng.randrange(1, 40))) for _ in range(60)]
    for text in texts:
        store.messages.add_user(chat, text)
    for _ in range(200):
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        words = text[at : at + rng.randrange(1, 6)].split()
        expected = [t for t in reversed(texts) if words and all(word in t for word in words)]
        assert [hit.content for hit in store.search.find(" ".join(words))] == expected


def test_search_of_titles_ignores_case_in_every_script(store):
    chat = store.chats.new("m")
    exchange(store, chat, "q", "heron")
    store.chats.set_title(chat, "Über Äpfel und Öl")
    for words in ("ÜBER", "äpfel öl", "über und"):
        assert [hit.session.id for hit in store.search.find(words)] == [chat]


def test_search_finds_titles_branches_and_nothing_put_away(store):
    chat, other = store.chats.new("m", "sees pelicans"), store.chats.new("m")
    exchange(store, chat, "q", "heron", "stork")
    exchange(store, other, "heron", "gone")
    store.chats.set_title(chat, "  My   birds ")
    store.chats.soft_delete(other)
    assert [(h.role, h.content) for h in store.search.find("birds")] == [("title", "My birds")]
    assert [h.message_id for h in store.search.find("pelican")] == [None]
    assert [h.session.id for h in store.search.find("heron")] == [chat]
    store.chats.restore(other)
    assert {h.session.id for h in store.search.find("heron")} == {chat, other}


def test_a_search_for_nul_is_a_search_for_the_words_beside_it(store):
    chat = store.chats.new("m")
    exchange(store, chat, "a question of birds", "a")
    found = store.search.find("question birds")
    assert found and store.search.find("question\0birds") == found
    assert store.search.newest("birds\0") == store.search.newest("birds")
    assert store.search.newest("\0") is None and store.chats.get(chat)

"""The bytes that a terminal receives when a model, its name, titles, notes and pastes are hostile."""

import os
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ruvmlx.store import Store

from .gallery import PLACES
from .hostile import OTHERS, SEQUENCES, hostile, leaks, number, sequences_and_text, word
from .terminal import Terminal

TALL = 150, 110  # columns and rows, in which nearly all places are in sight
IN_SIGHT = 0.7  # of the texts, at least: what is drawn over before a frame is shown is not seen
AT_ONCE = 500  # texts that one process shows

PROGRAM = r"""
import sys
from ruvmlx.apps.chat import run_chat
from tests.chat.scripted import ScriptedRuntime

runtime = ScriptedRuntime([{reply!r}, " the end"])
runtime.model.name = "evil\x1b]52;c;Zm9v\x07 model"
sys.exit(run_chat(lambda: runtime))
"""
HOSTILE = {
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "8-bit clipboard": "\x9d52;c;cm0gLXJm\x9c",
    "title": "\x1b]0;pwned\x07",
    "title in code": "```\n\x1b]0;pwned\x1b\\\n```\n",
    "clear and reset": "\x1b[2J\x1b[3J\x1bc",
    "answerback": "\x05\x1b[6n\x1b[>q",
    "bell and shift": "\x07\x0e\x0f",
    "direction": "\u202epwned\u2066 &#x202e;",
}

FORBIDDEN = ("]52;", "cm0gLXJm", "Zm9v", "]0;pwned", "\x1b[3J", "\x1bc", "\x1b[6n", "\x05", "\x0e", "\u202e")


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_control_sequence_of_hostile_text_reaches_the_terminal(kind):
    """The words arrive; sequences that only the hostile text holds do not."""
    terminal = Terminal([sys.executable, "-c", PROGRAM.format(reply=HOSTILE[kind])])
    terminal.expect("learns from what you think")
    terminal.send("\x1b[200~hi \x9d0;pwned\x9c\u202e\x1b[201~\r")
    terminal.expect("the end")
    terminal.expect("Choose")
    terminal.send("\x11")
    assert terminal.wait() == 0
    raw = terminal.raw.decode(errors="replace")
    for sign in FORBIDDEN:
        assert sign not in raw
    assert not re.search("[\x80-\x9f\u2066]", raw)


def shown_parts(mode, full, few=40):
    """The numbers of the shown texts (few; with --full all 10,000), and the bytes that the terminal
    received."""
    parts = [range(n, n + AT_ONCE) for n in range(0, 10_000, AT_ONCE)] if full else [range(few)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from zip(parts, pool.map(lambda part: run_gallery(mode, part), parts), strict=True)


def run_gallery(mode, numbers):
    terminal = Terminal(
        [sys.executable, "-m", "tests.chat.gallery", mode, str(numbers.start), str(numbers.stop)], TALL
    )
    assert terminal.wait(3600) == 0, terminal.seen[-2000:]
    return terminal.raw


def visible_numbers(raw, places):
    """Place -> numbers of the texts that were visible there."""
    words = sequences_and_text(raw)[1]
    return {place: set(re.findall(rf"{place}(\d{{5}})", words)) for place in places}


@pytest.mark.parametrize("attack", SEQUENCES)
def test_the_check_finds_every_control_sequence(attack):
    """Every sequence, sent as it is, is found; so it can be trusted when it finds nothing."""
    raw = attack(word(7), number(7))
    if "\x1b" in raw or re.search("[\x80-\x9f]", raw):
        assert leaks(raw.encode())


def test_hostile_texts_have_every_kind_and_length():
    """All kinds are among the first few hundred, and the longest have 100 kB."""
    texts = [hostile(n, random.Random(n)) for n in range(1000)]
    assert max(map(len, texts)) >= 90_000
    for attack in [*SEQUENCES, *OTHERS]:
        assert any(attack(word(n), number(n)) in text for n, text in enumerate(texts))


def test_every_widget_shows_hostile_texts_sanitised(full):
    """Replies, messages, titles, names, notes, notices, errors, the panel, the input: 10,000 texts in each
    (--full), and no sequence of theirs, nor any mark in one, nor a control character is sent."""
    for numbers, raw in shown_parts("app", full):
        assert leaks(raw) == []
        for place, texts in visible_numbers(raw, PLACES).items():
            assert len(texts) >= IN_SIGHT * len(numbers), place


def test_plain_mode_shows_hostile_texts_sanitised(full):
    """The same, and it sends no sequence at all."""
    for numbers, raw in shown_parts("plain", full):
        assert sequences_and_text(raw)[0] == [] and leaks(raw) == []
        for place, texts in visible_numbers(
            raw, ("reply", "error", "title", "name", "adapter", "panel", "system")
        ).items():
            assert len(texts) == len(numbers), place


@pytest.fixture
def hostile_store(home, full):
    """Make chats with hostile titles and one chat of hostile messages; return its id."""
    store = Store(home / "ruvmlx.db")
    texts = [hostile(n, random.Random(n)) for n in range(10_000 if full else 200)]
    texts = ["".join(c for c in text if not "\ud800" <= c <= "\udfff") for text in texts]  # no UTF-8 has them
    for text in texts:
        store.chats.set_title(store.chats.new(f"m {text}", text), f"title {text}")
    chat = store.chats.new("m")
    for n, text in enumerate(texts):
        store.messages.add_user(chat, f"words{n:05d} {text}")
    return chat


@pytest.mark.parametrize(
    "verb",
    [
        ("sessions", "ls"),
        ("sessions", "ls", "--json"),
        ("sessions", "show", "last"),
        ("sessions", "search", "words"),
        ("sessions", "export", "last", "--json"),
        ("\x1b]0;Zq00001qZ\x07\x9b31m",),
        ("show", "/tmp/\x1b]0;Zq00001qZ\x07\u202e.gguf"),
        ("sessions", "show", "\x1b[900001m"),
        ("adapters", "use", "\x1b]0;Zq00001qZ\x07"),
    ],
)
def test_the_command_line_shows_hostile_texts_sanitised(verb, hostile_store, home):
    """Tables, search results and error lines; JSON has its own way to write what is not printable."""
    terminal = Terminal([sys.executable, "-m", "ruvmlx", *verb], TALL, RUVMLX_HOME=str(home), NO_COLOR="1")
    terminal.wait(600)
    assert len(terminal.raw) > 30
    assert sequences_and_text(terminal.raw)[0] == []
    directions = [c for c in leaks(terminal.raw) if c not in ("U+202E", "U+202C", "U+2066", "U+2069")]
    assert (directions if "--json" in verb else leaks(terminal.raw)) == []

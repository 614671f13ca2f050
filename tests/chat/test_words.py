"""Words for people: no figures of the inside on the screen; /details and /explain have them."""

import re
import threading

import pytest
from ruvmlx.apps.chat import compare, describe, glossary
from ruvmlx.apps.chat.commands import COMMANDS
from ruvmlx.apps.chat.mentions import with_files
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.state import ChatState
from ruvmlx.apps.chat.status import Meter
from ruvmlx.apps.chat.user_files import UserFiles

from ruvmlx.errors import NotFound
from ruvmlx.models.text.thinking import Thought
from ruvmlx.runtime import RatingResult

from ..test_runtime import say
from .helpers import SMALL, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime
from .test_branches import run_plain

INSIDE = re.compile(r"log-prob|\bKL\b|TTFT|\bctx\b|nats|\bnorm\b|\bhot\b|\bwarm\b|\bcold\b|\d ms\b")


def rating_result(rating="up", before=-1.0, after=-0.9, applied=True):
    return RatingResult("r", rating, applied, 41.0, 800.0, before, after, 0.004, 0.1, 0.2, 1)


async def test_no_figure_of_the_inside_is_on_the_screen():
    """After a reply, a rating, in the choose mode and with the panel."""
    async with chatting(ScriptedRuntime(["One."]), SMALL) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.effect)
        assert "Learned: more like this. Ctrl+R takes it back" in screen_text(app)
        assert not INSIDE.search(screen_text(app)), screen_text(app)
        app.chat.status._flashing._callback()
        await until(pilot, lambda: "first word 0.2 s" in screen_text(app))
        assert "33 of 8,192 tokens" in screen_text(app) and "1 rating" in screen_text(app)
        assert not INSIDE.search(screen_text(app)), screen_text(app)
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply())
        assert not INSIDE.search(screen_text(app)), screen_text(app)
        app.chat.prompt.text = "/details"
        app.chat.prompt.focus()
        await pilot.press("enter")
        await until(pilot, lambda: "KL 0.004 of 0.1 nats per token" in screen_text(app))


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (rating_result(), "Learned: more like this. K takes it back"),
        (rating_result("down", after=-1.1), "Learned: less like this. K takes it back"),
        (
            rating_result("up", after=-1.1),
            "Learned: your ratings ask for less like this. K takes it back",
        ),
        (
            rating_result("down", after=-0.9),
            "Learned: your ratings ask for more like this. K takes it back",
        ),
        (rating_result("3", after=-1.1), "Learned: less like this. K takes it back"),
        (rating_result("up", after=-1.0001), "it changed next to nothing"),
        (rating_result(applied=False), "Kept; it changed nothing"),
    ],
)
def test_a_rating_says_what_it_did(result, said):
    """Not what it was meant to do: near the limit a rating changes next to nothing."""
    assert said in describe.effect(result, "K")
    assert len(describe.effect(result, "Ctrl+R")) <= 76


def test_details_are_those_of_the_newest_reply_and_lesson():
    runtime, state = ScriptedRuntime(["One."]), ChatState(ChatOptions())
    state.session = runtime.chats.new_chat()
    take = lambda name, argument="": COMMANDS[name].step(runtime, state, argument).words  # noqa: E731
    assert "No figures yet" in take("details")
    list(runtime.say(state.session, "Hello", sampling=None, max_new_tokens=4, cancel=threading.Event()))
    state.lesson = runtime.rate("last", "up")
    assert "-1.234 → -1.198" in take("details") and "4% of the allowed change" in take("details")


def test_details_after_an_undo_are_those_of_the_version_in_use(open_tiny):
    """The lesson that was taken back has no figures; what is left of the allowed change is told."""
    with open_tiny() as runtime:
        state = ChatState(ChatOptions())
        state.session = runtime.chats.new_chat()
        take = lambda name, argument="": COMMANDS[name].step(runtime, state, argument).words  # noqa: E731
        for question in ("hello", "again"):
            say(runtime, state.session, question)
            take("rate", "down")
        assert "last lesson" in take("details") and take("details").endswith("version 2")
        before = take("details").splitlines()[-1]
        take("undo")
        assert take("details").splitlines()[-1] != before
        assert take("details").endswith("version 1") and "last lesson" not in take("details")
        kl = runtime.status().kl
        assert f"KL {kl:.3f} of" in take("details")
        runtime.undo()  # as another process would
        state.lesson = rating_result()
        assert "last lesson" not in take("details")


async def test_a_screenshot_that_cannot_be_written_says_why(tmp_path):
    """It goes beside what /export writes, and needs no folder of downloads."""
    files = UserFiles(tmp_path / "nowhere")
    async with chatting(ScriptedRuntime(["One."]), SMALL, files=files) as (app, pilot):
        assert app.deliver_screenshot("a.svg") is None
        await until(pilot, lambda: "No screenshot: " in screen_text(app))
        (tmp_path / "nowhere").mkdir()
        assert app.deliver_screenshot("a.svg") == str(tmp_path / "nowhere" / "a.svg")
        assert "<svg" in (tmp_path / "nowhere" / "a.svg").read_text("utf-8")


def test_the_status_line_has_words():
    assert Meter(42.0, 212.0, 44, 8192).parts() == ["42 tokens/s", "first word 0.2 s", "44 of 8,192 tokens"]


@pytest.mark.parametrize("word", ["adapter", "KL", "tier", "token", "version", "cache", "allowed change"])
def test_a_word_can_be_learned_inside_the_tool(word):
    for typed in (word, word.upper(), f"{word}s"):
        assert glossary.explain(typed).startswith(f"{word}: ")
    assert word in glossary.explain("")


@pytest.mark.parametrize("row", ["topics", "quality", "rest"])
def test_a_row_of_the_side_panel_is_explained(row):
    assert glossary.explain(row).startswith(f"{row}: ")


def test_a_word_that_is_not_explained_brings_a_similar_one():
    with pytest.raises(NotFound, match="Did you mean 'adapter'"):
        glossary.explain("adaptor")


def test_one_is_singular(tmp_path):
    """In each sentence that has a count."""
    (tmp_path / "a.txt").write_text("x")
    said = [
        describe.thought_text(Thought("Hm", "Yes", False), True, False),
        describe.oldest(1),
        compare.lengths("Yes", "No way"),
        *with_files("@a.txt", UserFiles(tmp_path), len).notes,
    ]
    assert said == [
        "▸ thought for 1 word · t shows it",
        "the oldest message",
        "1 word without, 2 with what was learned.",
        "a.txt: 1 token",
    ]


def test_a_chat_of_one_message_is_listed_with_one_message(open_tiny):
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        runtime.store.messages.add_user(chat, "Hello")
        _, said = run_plain(runtime, "/chats", session=chat)
        assert "Hello, 1 message, " in said

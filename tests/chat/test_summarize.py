"""/summarize and F8: the model sums up the oldest messages, in the app and in plain mode."""

import io

import pytest
from ruvmlx.apps.chat import describe
from ruvmlx.apps.chat.messages import READ_NOTES_AND_REST, Notice
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.status import Meter, room_parts

from ruvmlx.chats.conversations import ALL_READ, ChatRoom
from ruvmlx.chats.summaries import ChatSummary
from ruvmlx.engine import Sampling
from ruvmlx.errors import NotFound

from ..chats.test_summaries import QUESTIONS, summary_prompts  # noqa: F401
from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


def test_the_status_line_offers_it_when_the_context_is_nearly_full():
    half, most = Meter(context=4000, max_context=8192), Meter(context=6000, max_context=8192)
    some, three = ChatRoom(frozenset(), 0, True), ChatRoom(frozenset(range(3)), 0, True)
    assert room_parts(half, some, "F8") == [] and room_parts(Meter(context=9), some, "F8") == []
    assert room_parts(most, some, "F8") == ["context nearly full (F8 sums up)"]
    assert room_parts(most, ALL_READ, "F8") == ["context nearly full"]
    assert room_parts(most, three, "F7") == ["oldest 3 not read (F7 sums up)"]
    assert room_parts(half, ChatRoom(frozenset(range(8)), 8, True), "F8") == ["oldest 8 summed up"]


def test_plain_mode_offers_it_prints_the_notes_and_ends_it(open_tiny, summary_prompts, capsys):  # noqa: F811
    lines = [*QUESTIONS, "/summarize", "Next?", "/summarize off", "/summarize off", "/summarize wrong"]
    sink = io.StringIO()
    with open_tiny() as runtime:
        options = ChatOptions(sampling=Sampling(0.0), max_new_tokens=8)
        PlainChat(runtime, options, io.StringIO("".join(f"{line}\n" for line in lines)), sink).run()
    told, said = capsys.readouterr().err.splitlines(), sink.getvalue()
    nearly = [n for n, line in enumerate(told) if "context is nearly full" in line]
    full = [n for n, line in enumerate(told) if "does not read the oldest" in line]
    assert nearly and full and nearly[0] < full[0] and all("/summarize" in told[n] for n in (*nearly, *full))
    assert "Assistant: note\nThe model reads these notes in place of the oldest" in said
    assert said.count("The model reads the messages themselves again") == 1
    assert "There are no notes in this chat" in said
    assert told[-1].endswith("/summarize takes no word, or the word off; got 'wrong'")


class Summing(ScriptedRuntime):
    """Its notes replace the first message. `failure` is raised instead."""

    found, failure = ChatSummary(), None

    def of(self, session_id):
        return self.found

    def left_out(self, session_id, max_new_tokens):
        return frozenset([1]) if self.found.count else frozenset()

    def write(self, session_id, cancel, max_new_tokens):
        if self.failure:
            raise self.failure
        other = ScriptedRuntime(["Notes."])
        yield from other.say(other.new_chat(), "x", sampling=None, max_new_tokens=1, cancel=cancel)
        self.found = ChatSummary("Notes.", 1)

    def forget(self, session_id):
        self.found = ChatSummary()


@pytest.fixture
def summing():
    return Summing(["One."], ["Two."])


async def test_the_app_shows_the_notes_and_marks_what_they_replace(summing):
    async with chatting(summing) as (app, pilot):
        await ask(app, pilot, "First?")
        await pilot.press("f8")
        await until(pilot, lambda: app.query(Notice) and app.phase == "idle")
        screen = " ".join(screen_text(app).split())
        assert "in place of the oldest message, which stays" in screen and "Notes." in screen
        assert "oldest 1 summed up" in screen and "not read" not in screen
        assert app.chat.transcript.messages[0].has_class("left-out") and app.chat.status.background == ""
        await ask(app, pilot, "Second?")
        await until(pilot, lambda: READ_NOTES_AND_REST in screen_text(app))
        app.chat.prompt.text = "/summarize off"
        await pilot.press("enter")
        await until(pilot, lambda: len(app.query(Notice)) == 2 and "summed up" not in screen_text(app))


async def test_the_app_tells_why_nothing_was_summed_up(summing):
    summing.failure = NotFound("there is nothing to sum up yet.")
    async with chatting(summing) as (app, pilot):
        await ask(app, pilot, "First?")
        await pilot.press("f8")
        await until(pilot, lambda: "nothing to sum up yet" in screen_text(app))
        assert app.phase == "idle" and not app.query(Notice)


def test_no_notes_are_told():
    assert describe.summary(ChatSummary()).startswith("The model wrote no notes")

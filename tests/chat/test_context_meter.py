"""What the model no longer reads is marked, in the app and in plain mode."""

import io
import threading

import pytest
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.engine import Sampling
from ruvmlx.engine.context_window import Turn

from ..test_runtime import say
from .helpers import SMALL, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

WORDS = "word " * 20
QUESTIONS = [f"Number {n}: {WORDS}" for n in range(8)]  # 512 tokens of context have no room for all


def test_what_is_left_out_is_what_the_prompt_lacked(open_tiny):
    """Message for message, also while none is left out."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat("Be brief.")
        for place, question in enumerate(QUESTIONS):
            say(runtime, chat, question, n=8)
            gone, read = runtime.chats.left_out(chat, 8), runtime.store.replies.get("last").prompt_ids
            prompt = runtime.model.tokenizer.text_with_specials(read)
            asked = [turn.id for turn in runtime.chats.turns(chat) if turn.role == "user"]
            assert [f"Number {n}:" in prompt for n in range(place + 1)] == [i not in gone for i in asked]
        assert gone and len(gone) < len(runtime.chats.turns(chat))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_neighbours_of_one_role_go_together(open_tiny, system):
    """A stopped reply without words joins its neighbours, so both questions are left out, or none."""
    with open_tiny() as runtime:
        head = [Turn("system", system)] if system else []
        talk = [Turn("user", "a " * 100, id=1), Turn("assistant", "", id=2), Turn("user", "b " * 100, id=3)]
        talk += [Turn("assistant", "c " * 100, id=4), Turn("user", "d " * 100, id=5)]
        gone = runtime.chats._writer.window.left_out([*head, *talk], 8)
        assert [turn.id for turn in gone] in ([1, 3], [1, 3, 4])


def test_plain_mode_says_it_when_it_begins_and_when_it_grows(open_tiny, capsys):
    sink = io.StringIO()
    with open_tiny() as runtime:
        lines = io.StringIO("".join(f"{question}\n" for question in QUESTIONS))
        options = ChatOptions(sampling=Sampling(0.0), max_new_tokens=8)
        PlainChat(runtime, options, lines, sink).run()
    told = [line for line in capsys.readouterr().err.splitlines() if "does not read the oldest" in line]
    assert told and len(told) < len(QUESTIONS) - 1 and len(set(told)) == len(told)


class SmallContextRuntime(ScriptedRuntime):
    """A runtime whose context holds two messages."""

    def left_out(self, session_id, max_new_tokens):
        turns = [turn for turn in self.turns(session_id) if turn.role != "system"]
        return frozenset(turn.id for turn in turns[:-2])


async def test_the_app_draws_a_line_and_counts():
    async with chatting(SmallContextRuntime(["One."], ["Two."], ["Three."]), SMALL) as (app, pilot):
        await ask(app, pilot, "First?")
        await until(pilot, lambda: app.chat.host.holder.opened_runtime.settled == 1)
        assert "reads from here on" not in screen_text(app)
        await ask(app, pilot, "Second?")
        await until(pilot, lambda: "the model reads from here on" in screen_text(app))
        rows = lines_of(app.screen)
        at = next(n for n, line in enumerate(rows) if "reads from here on" in line)
        above, below = "\n".join(rows[:at]), "\n".join(rows[at:])
        assert "One." in above and "Second?" in below and "Second?" not in above
        assert "oldest 2 not read" in screen_text(app)
        await ask(app, pilot, "Third?")
        await until(pilot, lambda: "oldest 4 not read" in screen_text(app))
        assert screen_text(app).count("reads from here on") == 1


async def test_a_chat_that_is_opened_has_its_line_at_once():
    runtime = SmallContextRuntime(["One."], ["Two."])
    session = runtime.new_chat()
    for text in ("First?", "Second?"):
        list(runtime.say(session, text, sampling=None, max_new_tokens=4, cancel=threading.Event()))
    async with chatting(runtime, session=session) as (app, pilot):
        await until(pilot, lambda: "the model reads from here on" in screen_text(app))
        assert "oldest 2 not read" in screen_text(app)

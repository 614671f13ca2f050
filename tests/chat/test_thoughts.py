"""Thoughts in the chat: folded to a line, shown on demand, never copied; plain mode leaves them out."""

import io

from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.stream import wait_until_drawn

from ruvmlx.engine.types import Chunk
from ruvmlx.runtime import Turn

from .helpers import ask, chatting, screen_text
from .scripted import ScriptedRuntime
from .test_plain import chat

THINKS = ["<thi", "nk>\nFirst this, ", "then that.\n</th", "ink>\n\nThe **answer**."]


async def test_a_thought_is_one_line_until_it_is_unfolded():
    async with chatting(ScriptedRuntime(THINKS)) as (app, pilot):
        reply = await ask(app, pilot)
        await wait_until_drawn(reply)
        folded = screen_text(app)
        assert "thought for 4 words" in folded and "The answer." in folded and "First this" not in folded
        reply.focus()
        await pilot.press("t")
        await wait_until_drawn(reply)
        unfolded = screen_text(app)
        assert "First this, then that." in unfolded and "The answer." in unfolded and "think>" not in unfolded
        await pilot.press("t")
        await wait_until_drawn(reply)
        assert "First this" not in screen_text(app)


async def test_a_saved_thought_is_folded_and_never_copied(monkeypatch):
    copied = []
    runtime = ScriptedRuntime(THINKS, ["No thought."])
    async with chatting(runtime) as (app, pilot):
        monkeypatch.setattr(app, "copy_to_clipboard", copied.append)
        await ask(app, pilot)
        plain = await ask(app, pilot)
        await app.chat.transcript.restart(runtime.chats.turns(app.chat.state.session), "model")
        await wait_until_drawn(app.chat.transcript)
        assert "thought for 4 words" in screen_text(app) and "First this" not in screen_text(app)
        assert plain.answer == plain.text == "No thought."
        first = app.chat.transcript.replies[0]
        first.focus()
        await pilot.pause()
        await pilot.press("y")
        await pilot.pause()
    assert copied == ["The **answer**."]


async def test_a_thought_that_was_stopped_says_so_in_past_tense():
    async with chatting(ScriptedRuntime(["<think>on and on"])) as (app, pilot):
        reply = await ask(app, pilot)
        await wait_until_drawn(reply)
        assert "thought for 3 words" in screen_text(app) and reply.answer == ""


def test_plain_mode_reads_the_answer_alone():
    done = chat("Hi\n", THINKS)
    assert done.stdout == "Assistant: The **answer**.\n" and done.stderr.startswith("Thinking ...\n")


def test_plain_mode_continues_a_reply_that_was_cut_within_its_thought(open_tiny, monkeypatch):
    """The rest of the thought is no answer. Only the new words are printed."""
    with open_tiny() as runtime:
        session = runtime.chats.new_chat()
        cut = Turn("assistant", "<think>on", id=1)
        monkeypatch.setattr(runtime.chats, "turns", lambda *_: [cut])
        rest = iter([Chunk(" and on</think>"), Chunk("Paris.")])
        monkeypatch.setattr(runtime.chats, "continue_reply", lambda *_, **__: rest)
        sink = io.StringIO()
        options = ChatOptions(session=session)
        PlainChat(runtime, options, io.StringIO("/more\n"), sink).run()
    assert sink.getvalue() == "Assistant: Paris.\n"

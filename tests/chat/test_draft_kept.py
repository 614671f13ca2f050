"""Words that were typed and not sent: no key of the chat throws them away."""

import asyncio

import pytest
from ruvmlx.apps.chat.actions import leave
from ruvmlx.apps.chat.messages import UserMessage

from ruvmlx.errors import UsageError

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime
from .test_branches import chatting as branching  # noqa: F401


async def palette(app, pilot, words):
    """Run the palette's first entry for some words."""
    await pilot.press("ctrl+p")
    await until(pilot, lambda: len(app.screen_stack) == 2)
    await pilot.press(*words)
    await until(pilot, lambda: app.screen.query_one("CommandList").option_count == 1)
    await pilot.press("enter")
    await until(pilot, lambda: len(app.screen_stack) == 1)


@pytest.mark.parametrize("text", ["a draft", "  \n\n", "a pasted line\n" * 300])
async def test_one_key_clears_the_input_and_the_history_keeps_the_text(text):
    async with chatting(ScriptedRuntime(UsageError("the prompt has 9,000 tokens"))) as (app, pilot):
        app.chat.prompt.text = text
        if text.strip():
            await pilot.press("enter")
            await until(pilot, lambda: "9,000 tokens" in screen_text(app) and app.phase == "idle")
        assert app.chat.prompt.text == text
        await pilot.press("ctrl+c")
        assert app.chat.prompt.text == ""
        assert "Press again to quit" in screen_text(app)
        assert ("The text is kept: ↑ shows it" in screen_text(app)) == bool(text.strip())
        await pilot.press("up")
        assert app.chat.prompt.text == (text if text.strip() else "")


async def test_a_key_that_clears_the_input_gives_one_message_and_quits_while_it_is_shown(monkeypatch):
    """A long message stays longer than a short one. The second Ctrl+C works as long as the message stays."""
    runtime = ScriptedRuntime()
    monkeypatch.setattr(leave, "QUIT_WINDOW", 0.0)
    async with chatting(runtime) as (app, pilot):
        shown, flash = [], app.chat.status.flash
        monkeypatch.setattr(
            app.chat.status, "flash", lambda message, *rest: shown.append(message) or flash(message, *rest)
        )
        app.chat.prompt.text = "a draft"
        await pilot.press("ctrl+c")
        assert shown == ["The text is kept: ↑ shows it. Press again to quit"]
        await pilot.press("ctrl+c")
        await until(pilot, lambda: runtime.closed)


async def test_text_that_came_back_is_cleared_before_the_key_quits():
    runtime = ScriptedRuntime()
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "a draft"
        await pilot.press("ctrl+c", "up", "ctrl+c")
        assert app.chat.prompt.text == "" and app.phase == "idle"
        await pilot.press("ctrl+c")
        await until(pilot, lambda: runtime.closed)


@pytest.mark.parametrize("back", [["escape"], ["down", "escape"]])
@pytest.mark.parametrize("key", ["e", "E"])
async def test_a_draft_outlives_the_history_during_an_edit(branching, key, back):  # noqa: F811
    """The arrow keys show earlier messages while a question is edited, and Esc still shows the draft."""
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", key)
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        app.chat.prompt.move_cursor((0, 0))
        await pilot.press("up", *back)
        assert app.chat.prompt.text == "a draft"
        await pilot.press("down")
        assert app.chat.prompt.text == "a draft"


async def test_a_draft_outlives_two_edits_in_a_row(branching):  # noqa: F811
    async with branching() as (app, pilot):
        await ask(app, pilot, "One")
        await ask(app, pilot, "Two")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", "e")
        await until(pilot, lambda: app.chat.prompt.text == "Two")
        await pilot.press("tab", "up", "e")
        await until(pilot, lambda: app.chat.prompt.text == "One")
        await pilot.press("escape")
        assert app.chat.prompt.text == "a draft"


async def test_a_changed_earlier_message_and_the_draft_both_stay_in_the_history():
    async with chatting(ScriptedRuntime(["A."], ["B."])) as (app, pilot):
        await ask(app, pilot, "One")
        await ask(app, pilot, "Two")
        app.chat.prompt.text = "a draft"
        await pilot.press("up", "X", "up")
        assert app.chat.prompt.text == "One"
        await pilot.press("down")
        assert app.chat.prompt.text == "TwoX"
        await pilot.press("down")
        assert app.chat.prompt.text == "a draft"


async def test_the_draft_comes_back_after_an_earlier_message_was_sent_again():
    async with chatting(ScriptedRuntime(["A."], ["B."])) as (app, pilot):
        await ask(app, pilot, "One")
        app.chat.prompt.text = "a draft"
        await pilot.press("up", "enter")
        await until(pilot, lambda: len(app.chat.transcript.replies) == 2 and app.phase == "idle")
        assert app.chat.prompt.text == "a draft" and app.chat.transcript.messages[2].text == "One"


async def test_a_draft_outlives_a_change_of_the_chat_within_the_history(branching):  # noqa: F811
    """The history is that of all chats, and is read again for the next chat."""
    async with branching() as (app, pilot):
        for text in ("One", "Two", "Three"):
            await ask(app, pilot, text)
        app.chat.prompt.text = "a draft"
        await pilot.press("up", "up", "up")
        assert app.chat.prompt.text == "One"
        await app.actions.library.open("new")
        assert app.chat.prompt.text == "a draft"
        await pilot.press("up")
        assert app.chat.prompt.text == "Three"
        await pilot.press("down")
        assert app.chat.prompt.text == "a draft"


async def test_a_command_of_the_palette_keeps_the_draft():
    """The input shows the command. The up arrow key shows the draft."""
    async with chatting(ScriptedRuntime(["A."])) as (app, pilot):
        app.chat.prompt.text = "a long draft"
        await palette(app, pilot, "renamethischat")
        await until(pilot, lambda: app.chat.prompt.text == "/title ")
        assert "kept: ↑ shows it" in screen_text(app)
        await pilot.press("up")
        assert app.chat.prompt.text == "a long draft"


async def test_a_command_of_the_palette_is_no_version_of_a_reply(branching):  # noqa: F811
    """While a user rewrites a reply, Enter saves the input as the reply. The palette ends the rewriting."""
    async with branching() as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        await pilot.press("tab", "E")
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        await pilot.press("X")
        await palette(app, pilot, "renamethischat")
        await until(pilot, lambda: app.chat.prompt.text == "/title ")
        assert app.chat.editing is None and "Rewriting" not in screen_text(app)
        await pilot.press("Y", "enter")
        await until(pilot, lambda: "Renamed" in screen_text(app) or app.chat.prompt.text == "")
        assert app.chat.transcript.replies[-1].text == reply.text
        await pilot.press("up", "up")
        assert app.chat.prompt.text == f"{reply.text}X"


@pytest.mark.parametrize("key", ["e", "E"])
async def test_an_edit_ends_when_another_branch_hides_its_message(branching, key):  # noqa: F811
    """The second question is edited; the first reply is written again, and the second question is gone."""
    async with branching() as (app, pilot):
        await ask(app, pilot, "One")
        await ask(app, pilot, "Two")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", key)
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        await pilot.press("X")
        edited = app.chat.prompt.text
        await pilot.press("tab", "up", "r")
        await until(pilot, lambda: app.phase == "idle" and len(app.chat.transcript.replies) == 1)
        assert app.chat.editing is None and app.chat.prompt.text == "a draft"
        await pilot.press("up")
        assert app.chat.prompt.text == edited


async def block_work(app, monkeypatch, work):
    """Replace `host.call_between` or `host.call`: a call waits until the test sets the event that this
    function returns."""
    go, call = asyncio.Event(), getattr(app.host, work)

    async def call_late(*arguments):
        await go.wait()
        return await call(*arguments)

    monkeypatch.setattr(app.host, work, call_late)
    return go


@pytest.mark.parametrize("work", ["call_between", "call"])
async def test_a_message_that_is_sent_while_a_new_chat_opens_goes_to_the_new_chat(
    branching,  # noqa: F811
    monkeypatch,
    work,
):
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        old = app.chat.state.session
        go = await block_work(app, monkeypatch, work)
        await palette(app, pilot, "newchat")
        await until(pilot, lambda: app.phase != "idle")
        await pilot.press(*"Hi", "enter")
        await until(pilot, lambda: "Sent in a moment" in screen_text(app))
        assert app.chat.prompt.text == "Hi"
        go.set()
        await until(pilot, lambda: app.chat.transcript.replies and app.phase == "idle")
        session = app.chat.state.session
        assert session != old
        turns = await app.host.call(lambda runtime: runtime.chats.turns(session))
        assert [turn.content for turn in turns][:1] == ["Hi"]


async def test_a_message_that_is_sent_while_another_chat_fails_to_open_stays_in_the_input(
    branching,  # noqa: F811
    monkeypatch,
):
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        old, go = app.chat.state.session, await block_work(app, monkeypatch, "call")
        app.chat.start(lambda: app.actions.library.open("nowhere"))
        await until(pilot, lambda: app.phase != "idle")
        await pilot.press(*"Hi", "enter")
        await until(pilot, lambda: "Sent in a moment" in screen_text(app))
        go.set()
        await until(pilot, lambda: app.phase == "idle" and "no chat" in screen_text(app))
        assert app.chat.state.session == old and app.chat.prompt.text == "Hi"


@pytest.mark.parametrize("key", ["e", "E"])
async def test_letters_that_are_typed_while_an_edit_is_stored_stay(branching, monkeypatch, key):  # noqa: F811
    """Enter ends the edit and shows the draft, so the letters belong to the draft."""
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", key)
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        go = await block_work(app, monkeypatch, "call_between")
        app.chat.prompt.text = "Mine"
        await pilot.press("enter", *" 2")
        assert app.chat.prompt.text == "a draft 2" and app.chat.editing is None
        go.set()
        await until(pilot, lambda: "Mine" in [m.text for m in app.chat.transcript.messages])
        await until(pilot, lambda: app.phase == "idle")
        assert app.chat.prompt.text == "a draft 2"


@pytest.mark.parametrize("begins", ["chat", "model", "edit", "rewrite"])
@pytest.mark.parametrize("key", ["e", "E"])
async def test_the_text_of_an_edit_stays_in_the_history_when_something_else_begins(
    branching,  # noqa: F811
    key,
    begins,
):
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", key)
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        await pilot.press("X")
        edited = app.chat.prompt.text
        if begins == "chat":
            await app.actions.library.open("new")
        elif begins == "model":
            await app.actions.models._switch("no/model")
        else:
            await pilot.press("tab", "e" if begins == "edit" else "E")
            await until(pilot, lambda: app.chat.prompt.text in ("Hello", app.chat.transcript.replies[0].text))
            await pilot.press("escape")
        assert app.chat.prompt.text == "a draft" and app.chat.editing is None
        await pilot.press("up")
        assert app.chat.prompt.text == edited


async def test_a_command_ends_an_edit(branching):  # noqa: F811
    """The next message replaces no earlier message."""
    async with branching() as (app, pilot):
        await ask(app, pilot, "Hello")
        await pilot.press("tab", "e")
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        app.chat.prompt.text = "/details"
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.editing is None)
        await ask(app, pilot, "Next")
        assert [m.text for m in app.query(UserMessage)] == ["Hello", "Next"]


async def test_an_edit_ends_when_a_comparison_hides_its_message(branching):  # noqa: F811
    """The chat shows the other reply, so the user can no longer see the reply that the edit rewrites."""
    async with branching() as (app, pilot):
        first = await ask(app, pilot, "Hello")
        old = first.text
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app) and app.phase == "idle")
        await pilot.press("tab", "E")
        await until(pilot, lambda: app.chat.editing and app.chat.prompt.has_focus)
        await pilot.press("X")
        edited, session = app.chat.prompt.text, app.chat.state.session
        await app.host.call(lambda runtime: runtime.chats.next_sibling(session, 1))
        await app.actions.write.show_turns()
        assert app.chat.transcript.replies[0].text == old
        assert app.chat.editing is None and app.chat.prompt.text == ""
        await pilot.press("up")
        assert app.chat.prompt.text == edited

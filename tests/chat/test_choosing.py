"""The choose mode (Tab): it is visible, and what no key of it takes is typed into the input."""

import threading

import pytest
from ruvmlx.apps.chat.prompt import CHOOSING
from textual.events import Paste

from .helpers import SMALL, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime

WITH_CODE = "Look:\n\n```python\nprint(1)\n```\n"


@pytest.mark.parametrize("typed", ["thanks 5 times", "hello 1 2 3 + 4", "what? 3 more!", "ok, listen: 4 u"])
async def test_a_message_is_typed_and_rates_nothing(typed):
    """Every letter of it arrives in the input, the first one, too."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply())
        for letter in typed:
            await pilot.press("space" if letter == " " else letter)
        await until(pilot, lambda: app.chat.prompt.text == typed)
        assert runtime.ratings == [] and app.chat.editing is None and app.chat.selected_reply() is None


async def test_the_mode_is_on_the_screen_and_leaves_it():
    """The input's heading says it; a number rates only while it does."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        assert CHOOSING not in screen_text(app)
        await pilot.press("tab")
        await until(pilot, lambda: CHOOSING in screen_text(app))
        await pilot.press("5")
        await until(pilot, lambda: len(runtime.ratings) == 1)
        await pilot.press("escape")
        await until(pilot, lambda: CHOOSING not in screen_text(app))
        await pilot.press("5")
        await until(pilot, lambda: app.chat.prompt.text == "5")
        assert len(runtime.ratings) == 1


@pytest.mark.parametrize("opened", ["ctrl+o", "f3", "ctrl+p", "f6"])
async def test_keys_of_the_chat_do_nothing_behind_another_screen(opened):
    """Ctrl+N is the next row in many lists. Here, it rated the reply behind the list."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        shown = app.screen
        await pilot.press(opened)
        await until(pilot, lambda: app.screen is not shown)
        top = app.screen
        await pilot.press("ctrl+y", "ctrl+n", "ctrl+r", "ctrl+g", "f6")
        await pilot.pause(0.1)
        assert app.screen is top and runtime.ratings == [] and app.phase == "idle"
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is shown)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: len(runtime.ratings) == 1)


@pytest.mark.parametrize("then", ["escape", "ctrl+c", "ctrl+o"])
@pytest.mark.parametrize("opened", ["f3", "f4"])
async def test_a_list_that_waits_for_the_model_can_be_cancelled(opened, then):
    """The runtime is busy when the user asks for the list. Ctrl+O opens the list of chats in its place."""
    runtime, busy, go_on = ScriptedRuntime(["One."]), threading.Event(), threading.Event()

    def work(_):
        busy.set()
        go_on.wait(60)

    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        app.chat.start(lambda: app.host.call_between(work))
        await until(pilot, busy.is_set)
        await pilot.press(opened, then)
        await pilot.pause(0.1)
        done = app.chat.start(lambda: app.host.call_between(lambda _: None))
        go_on.set()
        await until(pilot, lambda: done.is_finished)
        await pilot.pause(0.2)
        assert len(app.screen_stack) == (2 if then == "ctrl+o" else 1) and app.phase == "idle"
        assert "Press again to quit" not in screen_text(app)


async def test_m_on_a_complete_reply_says_that_it_is_complete():
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", "m")
        await until(pilot, lambda: "That reply is complete" in screen_text(app) and app.phase == "idle")
        assert app.chat.prompt.text == "a draft" and app.chat.selected_reply() is reply


@pytest.mark.parametrize("key", ["greater_than_sign", "less_than_sign", "exclamation_mark", "question_mark"])
@pytest.mark.parametrize("rated", [[], ["plus"]], ids=["not rated", "good"])
async def test_the_key_of_a_reason_without_a_bad_rating_types_nothing(key, rated):
    """The app says what the reason needs, and the reply stays selected."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("tab", *rated)
        await until(pilot, lambda: len(runtime.ratings) == len(rated) and not reply.coming_rating)
        await pilot.press(key)
        await until(pilot, lambda: "A reason goes with a bad rating" in screen_text(app))
        assert app.chat.prompt.text == "" and app.chat.selected_reply() is reply
        await pilot.press("minus", key)
        await until(pilot, lambda: reply.rating == "down")


async def test_an_edit_goes_on_after_choosing():
    """Its heading comes back."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("tab", "e")
        await until(pilot, lambda: "Editing your question" in screen_text(app))
        await pilot.press("tab")
        await until(pilot, lambda: CHOOSING in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: "Editing your question" in screen_text(app))


async def test_the_keys_that_work_are_in_the_footer_at_80_columns():
    """At 80 columns the keys Esc, y, t, u and F1 are visible. A key that would do nothing is hidden."""
    async with chatting(ScriptedRuntime(["<think>So.</think>One."]), SMALL) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("tab")
        await until(pilot, lambda: "esc Back" in footer(app))
        assert "u Undo" not in footer(app)
        await pilot.press("5")
        await until(pilot, lambda: "u Undo" in footer(app))
        for hint in ("esc Back", "y Copy", "t Thought", "1-5 Stars", "F1 Help"):
            assert hint in footer(app), hint


@pytest.mark.parametrize("size", [(40, 12), SMALL, (160, 50)])
async def test_help_is_always_in_the_footer(size):
    async with chatting(ScriptedRuntime(["One."]), size) as (app, pilot):
        assert footer(app).endswith("F1 Help")
        await ask(app, pilot)
        assert footer(app).endswith("F1 Help")
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply())
        assert footer(app).endswith("F1 Help")


def footer(app):
    return app.chat.key_hints.render().plain.rstrip()


async def test_a_paste_goes_into_the_input_as_typed_letters_do():
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply())
        app.post_message(Paste("pasted words"))
        await until(pilot, lambda: app.chat.prompt.text == "pasted words", seconds=5)
        assert app.chat.prompt.has_focus

"""Keys that arrive at once, as over a slow connection: each acts before the next."""

import time

import pytest
from ruvmlx.apps.chat.ordered_keys import OrderedInput
from textual import events
from textual._xterm_parser import XTermParser

from .helpers import ask, chatting, until
from .scripted import ScriptedRuntime

LEFT, HOME, BACK = "left", "home", "backspace"


def send_at_once(app, keys):
    """Send keys as the terminal's driver does: none waits until the app has handled the last one."""
    for key in keys:
        app.post_message(events.Key(key, key if len(key) == 1 else None))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([*"teh", BACK, BACK, *"he "], "the "),
        ([*"one", "ctrl+u", *"two"], "two"),
        ([*"bc", HOME, *"a"], "abc"),
        ([*"ac", LEFT, "b"], "abc"),
        ([*"a b", "ctrl+w", *"c"], "a c"),
        ([*"/titl", "tab", *"x"], "/title x"),
        ([*"a", "ctrl+j", *"b", BACK, *"c"], "a\nc"),
    ],
)
async def test_a_key_acts_before_the_letters_that_follow(keys, text):
    async with chatting(ScriptedRuntime()) as (app, pilot):
        send_at_once(app, [*keys, "end"])
        await until(pilot, lambda: not app.message_queue_size and not app.chat.prompt.message_queue_size)
        await pilot.pause(0.1)
        assert app.chat.prompt.text == text


JOINED = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \U0001f469\u200d\U0001f4bb"


def send_typed(app, text):
    """Send the keys that Textual reads from the bytes of a terminal."""
    for event in XTermParser().feed(text):
        app.post_message(event)


@pytest.mark.parametrize(
    "typed",
    [JOINED, "\u65e5\u672c\u3000\u8a9e!", "Quoi\xa0?", "a \U0001faea b"],
    ids=["joiners", "ideographic space", "no-break space", "new emoji"],
)
async def test_every_typed_character_reaches_the_message_and_the_lists(typed):
    """Persian words and many emoji have characters without a width: U+200C and U+200D. Japanese and French
    keyboards type other spaces. An emoji can be newer than this Python."""
    async with chatting(ScriptedRuntime()) as (app, pilot):
        send_typed(app, typed)
        await until(pilot, lambda: app.chat.prompt.text.endswith(typed[-1]))
        assert app.chat.prompt.text == typed
        await pilot.press("ctrl+o")
        await until(pilot, lambda: app.screen.query(OrderedInput) and app.screen.focused)
        field = app.screen.query_one(OrderedInput)
        send_typed(app, typed)
        await until(pilot, lambda: field.value.endswith(typed[-1]))
        assert field.value == typed


async def test_a_key_of_the_numeric_keypad_types_no_private_character():
    """The key 5 without Num Lock, in a terminal with the kitty protocol."""
    async with chatting(ScriptedRuntime()) as (app, pilot):
        send_typed(app, "a\x1b[57427ub")
        await until(pilot, lambda: app.chat.prompt.text.endswith("b"))
        assert app.chat.prompt.text == "ab"


async def test_a_space_of_japanese_keyboards_leaves_the_choice_of_a_reply():
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply())
        send_typed(app, "\u3000\u8a9e")
        await until(pilot, lambda: "\u8a9e" in app.chat.prompt.text)
        assert app.chat.prompt.text == "\u3000\u8a9e"


@pytest.mark.parametrize("key", ["ctrl+o", "f3"])
async def test_the_keys_of_a_list_keep_their_order(key):
    """The field above the list of chats, and of models."""
    async with chatting(ScriptedRuntime()) as (app, pilot):
        await pilot.press(key)
        await until(pilot, lambda: app.screen.query(OrderedInput) and app.screen.focused)
        field = app.screen.query_one(OrderedInput)
        send_at_once(app, [*"teh", BACK, BACK, *"he", HOME, *"a"])
        await until(pilot, lambda: len(field.value) >= 4)
        await pilot.pause(0.1)
        assert field.value == "athe"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["tab", *"save"], "save"),
        (["tab", *"please tell me more"], "please tell me more"),
        (["tab", "up", *"what"], "what"),
        (["tab", "escape", *"rule"], "rule"),
    ],
)
async def test_letters_after_the_first_one_are_text(keys, text):
    """A letter without a binding leaves the choice of a reply; the keys that follow at once do not act."""
    async with chatting(ScriptedRuntime(["One."], ["Two."])) as (app, pilot):
        replies = [await ask(app, pilot), await ask(app, pilot)]
        send_at_once(app, keys)
        await until(pilot, lambda: app.chat.prompt.text == text)
        await pilot.pause(0.1)
        assert app.chat.prompt.text == text and app.chat.editing is None and app.focused is app.chat.prompt
        assert len(app.chat.transcript.replies) == 2 and not any(reply.rating for reply in replies)


async def test_keys_after_tab_rate_the_reply_that_they_chose():
    async with chatting(ScriptedRuntime(["One."], ["Two."])) as (app, pilot):
        first, second = await ask(app, pilot), await ask(app, pilot)
        send_at_once(app, ["tab", "up", "2"])
        await until(pilot, lambda: first.rating == "2")
        assert second.rating is None and app.chat.prompt.text == ""


async def test_a_reason_waits_for_its_rating(monkeypatch):
    """The keys - and > at once, or while the rating is being stored."""
    runtime = ScriptedRuntime(["One."])
    rate, given = runtime.rate, []

    def rate_slowly(*arguments, **options):
        time.sleep(0.3)
        return rate(*arguments, **options)

    runtime.rate = rate_slowly
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        monkeypatch.setattr(
            runtime.choices, "give_reason", lambda *said: given.append(said) or rate(said[0], "down")
        )
        send_at_once(app, ["tab", "minus", "greater_than_sign"])
        await until(pilot, lambda: given)
        assert given == [(reply.reply_id, "long")] and app.chat.prompt.text == ""


async def test_letters_after_enter_begin_the_next_message():
    """Commands that come at once, as from a paste of a slow terminal: each is one command."""
    async with chatting(ScriptedRuntime()) as (app, pilot):
        send_at_once(
            app, [*"/nonsense 1", "enter", *"/set temperature 0.5", "enter", *"/title Rain", "enter", *"so"]
        )
        await until(pilot, lambda: not app.message_queue_size and not app.chat.prompt.message_queue_size)
        await pilot.pause(0.3)
        assert not app.chat.transcript.replies
        assert app.chat.prompt.text == "/nonsense 1\n\nso"
        assert app.chat.prompt.earlier[:2] == ["/title Rain", "/set temperature 0.5"]

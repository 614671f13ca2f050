"""Keys that arrive at once, as over a slow connection: each acts before the next."""

import pytest
from ruvmlx.apps.chat.ordered_keys import OrderedInput
from textual import events

from .helpers import chatting, until
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

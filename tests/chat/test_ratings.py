"""Ratings in the chat app: keys, commands, what they did, and taking them back."""

import pytest

from ruvmlx.errors import NotFound

from .helpers import SMALL, WIDE, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

BOTH_SIZES = pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])


@BOTH_SIZES
@pytest.mark.parametrize(
    ("keys", "mark", "after"),
    [
        (["ctrl+y"], "▲ up", "-1.198"),
        (["ctrl+n"], "▼ down", "-1.270"),
        (["tab", "plus"], "▲ up", "-1.198"),
        (["tab", "minus"], "▼ down", "-1.270"),
        (["tab", "1"], "★☆☆☆☆", "-1.270"),
        (["tab", "4"], "★★★★☆", "-1.198"),
        ([*"/5", "enter"], "★★★★★", "-1.198"),
        ([*"/rate", "space", *"down", "enter"], "▼ down", "-1.270"),
    ],
)
async def test_rating_shows_its_effect_on_one_line(size, keys, mark, after):
    """Keys and commands rate the newest reply; the mark and what it did stand below it, unwrapped."""
    async with chatting(ScriptedRuntime(["Hi."]), size) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press(*keys)
        await until(pilot, lambda: reply.effect)
        wanted = f"{mark} · log-prob -1.234 → {after} per token · KL 0.004 of 0.1 · 0.04 ms · v1"
        await until(pilot, lambda: any(wanted in line for line in lines_of(app.screen)))
        assert "v1" in lines_of(app.screen)[-2]


async def test_an_earlier_reply_can_be_chosen():
    """Tab takes the newest reply, the arrows an earlier one; Esc goes back to the input."""
    runtime = ScriptedRuntime(["One."], ["Two."])
    async with chatting(runtime) as (app, pilot):
        first, second = await ask(app, pilot), await ask(app, pilot)
        await pilot.press("tab", "up", "2")
        await until(pilot, lambda: first.effect)
        assert second.rating is None
        assert runtime.ratings == [(first.reply_id, None, "2")]
        await pilot.press("escape", "x")
        assert app.prompt.text == "x"


async def test_undo():
    """Ctrl+R takes ratings back, the last first, until there is none."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        for key in ("ctrl+y", "ctrl+n"):
            await pilot.press(key)
        await until(pilot, lambda: reply.rating == "down" and "v2" in lines_of(app.screen)[-2])
        await pilot.press("ctrl+r")
        await until(pilot, lambda: reply.rating == "up")
        assert "taken back" in screen_text(app)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: reply.rating is None)
        assert "log-prob" not in screen_text(app)
        app.prompt.text = "/undo"
        await pilot.press("enter")
        await until(pilot, lambda: "no rating to take back" in screen_text(app))


async def test_rating_before_any_reply():
    """Nothing happens, and a word says why."""
    runtime = ScriptedRuntime()
    async with chatting(runtime) as (app, pilot):
        app.prompt.text = "/up"
        await pilot.press("enter")
        await until(pilot, lambda: "no reply to rate yet" in screen_text(app))
        await pilot.press("ctrl+y")
        assert runtime.ratings == []


async def test_without_an_adapter():
    """A runtime that does not learn chats all the same."""
    runtime = ScriptedRuntime(["Hi."])

    def none(*_):
        raise NotFound("no adapter is loaded")

    runtime.status = runtime.rate = none
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "no adapter is loaded" in screen_text(app))
        assert reply.rating is None


async def test_a_rating_while_a_reply_comes_does_not_hit_the_one_before():
    """Keys and commands wait for the reply; a reply that is selected can be rated all the same."""
    runtime = ScriptedRuntime(["One."], ["Two ", "is ", "long."], gate=True)
    runtime.free = 1
    async with chatting(runtime) as (app, pilot):
        first = await ask(app, pilot)
        app.prompt.text = "More"
        await pilot.press("enter")
        await until(pilot, lambda: "Two" in screen_text(app))
        await pilot.press("ctrl+y", *"/up", "enter")
        await until(pilot, lambda: "no reply to rate yet" in screen_text(app))
        await pilot.press("tab", "plus", "escape", "escape")
        await until(pilot, lambda: first.effect)
        assert len(runtime.ratings) == 1

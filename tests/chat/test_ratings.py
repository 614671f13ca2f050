"""Ratings in the chat app: keys, commands, their effect, and undo."""

import time

import pytest
from ruvmlx.apps.chat import idle
from textual.events import AppFocus

from ruvmlx.errors import NotFound, StoreBusy

from .helpers import SMALL, WIDE, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

BOTH_SIZES = pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])


@BOTH_SIZES
@pytest.mark.parametrize(
    ("keys", "mark", "after"),
    [
        (["ctrl+y"], "▲ good", "more"),
        (["ctrl+n"], "▼ bad", "less"),
        (["tab", "plus"], "▲ good", "more"),
        (["tab", "minus"], "▼ bad", "less"),
        (["tab", "1"], "★☆☆☆☆", "less"),
        (["tab", "4"], "★★★★☆", "more"),
        ([*"/5", "enter"], "★★★★★", "more"),
        ([*"/rate", "space", *"down", "enter"], "▼ bad", "less"),
    ],
)
async def test_rating_shows_its_effect_on_one_line(size, keys, mark, after):
    """Keys and commands rate the newest reply; the mark and what it did stand below it, unwrapped."""
    async with chatting(ScriptedRuntime(["Hi."]), size) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press(*keys)
        await until(pilot, lambda: reply.effect)
        wanted = f"{mark} · Learned: {after} like this. Ctrl+R takes it back"
        await until(pilot, lambda: any(wanted in line for line in lines_of(app.screen)))
        assert wanted in lines_of(app.screen)[-2]


async def test_the_question_why_names_the_keys_that_work_now():
    """In the choose mode the keys of the reasons work at once; Tab would leave the mode."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: "Why? Tab, then > too long" in screen_text(app))
        await pilot.press("tab")
        await until(pilot, lambda: "Why? > too long" in screen_text(app))
        assert app.focused is reply
        await pilot.press("escape")
        await until(pilot, lambda: "Why? Tab, then > too long" in screen_text(app))


async def test_a_chosen_reply_keeps_the_mark_of_its_rating():
    """The mark is the same before and after the chat is opened again."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.rating)
        reply.effect = "◆ preferred · Learned"
        await until(pilot, lambda: "▲ good · ◆ preferred · Learned" in screen_text(app))


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
        assert app.chat.prompt.text == "x"


async def test_undo_takes_ratings_back_newest_first():
    """Ctrl+R takes ratings back, the last first, until there is none."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        for key in ("ctrl+y", "ctrl+n"):
            await pilot.press(key)
        await until(pilot, lambda: reply.rating == "down" and reply._effect_of == 2)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: reply.rating == "up")
        assert "taken back" in screen_text(app)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: reply.rating is None)
        assert "Learned" not in screen_text(app)
        app.chat.prompt.text = "/undo"
        await pilot.press("enter")
        await until(pilot, lambda: "no rating or preference to take back" in screen_text(app))


async def test_rating_before_any_reply_does_nothing_and_says_why():
    """Nothing happens, and a word says why."""
    runtime = ScriptedRuntime()
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "/up"
        await pilot.press("enter")
        await until(pilot, lambda: "no reply to rate yet" in screen_text(app))
        await pilot.press("ctrl+y")
        assert runtime.ratings == []


async def test_without_an_adapter_the_chat_works_and_does_not_learn():
    """A runtime that does not learn chats all the same."""
    runtime = ScriptedRuntime(["Hi."])

    def none(*_, **__):
        raise NotFound("no adapter is loaded")

    runtime.status = runtime.rate = none
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "no adapter is loaded" in screen_text(app))
        assert reply.rating is None


async def test_a_rating_during_a_reply_does_not_rate_the_one_before():
    """Keys and commands wait for the reply; a reply that is selected can be rated all the same."""
    runtime = ScriptedRuntime(["One."], ["Two ", "is ", "long."], gate=True)
    runtime.free = 1
    async with chatting(runtime) as (app, pilot):
        first = await ask(app, pilot)
        app.chat.prompt.text = "More"
        await pilot.press("enter")
        await until(pilot, lambda: "Two" in screen_text(app))
        await pilot.press("ctrl+y", *"/up", "enter")
        await until(pilot, lambda: "reply is still being written" in screen_text(app))
        await pilot.press("tab", "plus", "escape", "escape")
        await until(pilot, lambda: first.effect)
        assert len(runtime.ratings) == 1


async def test_a_rating_does_not_wait_for_the_reply_that_streams():
    """A selected reply is rated, and the rating taken back, between two chunks of another one."""
    runtime = ScriptedRuntime(["One."], ["Two ", "is ", "very ", "long."], gate=True, free=1)
    async with chatting(runtime) as (app, pilot):
        first = await ask(app, pilot)
        app.chat.prompt.text = "More"
        await pilot.press("enter")
        await until(pilot, lambda: "Two" in screen_text(app))
        await pilot.press("tab", "plus")
        await until(pilot, lambda: first.progress == "rating")
        runtime.released.release()
        await until(pilot, lambda: first.effect)
        assert app.phase == "replying"
        await pilot.press("ctrl+r")
        runtime.released.release()
        await until(pilot, lambda: first.rating is None)
        assert app.phase == "replying"
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")
        assert app.chat.transcript.replies[-1].text == "Two is very long."
        assert len(runtime.threads) == 1


async def test_a_rating_that_fails_during_a_reply_leaves_the_reply_alone():
    """Its error is the rating's own."""
    runtime = ScriptedRuntime(["One."], ["Two ", "is ", "long."], gate=True, free=1)

    def fail(*_, **__):
        raise NotFound("no such reply any more")

    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        runtime.rate = fail
        app.chat.prompt.text = "More"
        await pilot.press("enter")
        await until(pilot, lambda: "Two" in screen_text(app))
        await pilot.press("tab", "plus")
        runtime.released.release()
        await until(pilot, lambda: "no such reply any more" in screen_text(app))
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")
        assert app.chat.transcript.replies[-1].text == "Two is long."


async def test_the_effect_of_rating_a_reply_out_of_sight_is_in_the_status_line():
    """A rating of a reply that is scrolled away: the status line says what it did, for a while."""
    async with chatting(ScriptedRuntime(["line\n\n" * 40])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: app.chat.transcript.scroll_y == 0)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.effect)
        assert "Learned: more like this" in lines_of(app.screen)[-2]
        app.chat.status._flashing._callback()
        await until(pilot, lambda: "tokens/s" in lines_of(app.screen)[-2])


async def test_a_rating_by_another_process_is_shown():
    """It shows when the app has the focus again, when a key is pressed after a while, after a reply."""
    runtime = ScriptedRuntime(["One."], ["Two."])
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)

        def shows(mark, version):
            screen = lines_of(app.screen)
            return any(mark in line for line in screen[:-2]) and version in screen[-2]

        await until(pilot, lambda: runtime.settled == 1 and time.monotonic() > app.actions.rate.looked_at)
        runtime.rated_elsewhere(reply.reply_id, "up")
        app.post_message(AppFocus())
        await until(pilot, lambda: shows("▲ good", "1 rating"))
        runtime.rated_elsewhere(reply.reply_id, "down")
        app.actions.rate.looked_at -= 60
        await pilot.press("x")
        await until(pilot, lambda: shows("▼ bad", "2 ratings"))
        runtime.rated_elsewhere(reply.reply_id, "5")
        await ask(app, pilot)
        await until(pilot, lambda: shows("★★★★★", "3 ratings"))
        assert "Take back" in lines_of(app.screen)[-1]


async def test_a_window_that_nobody_uses_shows_a_rating_by_another_process(monkeypatch):
    """Without a key and without the focus, in the next idle time."""
    monkeypatch.setattr(idle, "IDLE_AFTER", 0.05)
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await until(pilot, lambda: runtime.settled == 1)
        await pilot.pause(0.2)
        runtime.rated_elsewhere(reply.reply_id, "up")
        await until(pilot, lambda: reply.rating == "up" and "1 rating" in lines_of(app.screen)[-2])


async def test_undo_takes_back_what_another_process_rated():
    """The key works though the app has seen no rating, and says so when there is none."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await until(pilot, lambda: runtime.settled == 1)
        runtime.rated_elsewhere(reply.reply_id, "up")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "”; 0 left, version 0" in screen_text(app))
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "no rating or preference to take back" in screen_text(app))


async def test_a_busy_store_while_refreshing_is_not_reported():
    """A busy store is no news as long as nothing was asked of it."""
    runtime = ScriptedRuntime(["One."])
    async with chatting(runtime) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.effect)
        looked = []

        def raise_busy(_):
            looked.append(1)
            raise StoreBusy("another process holds the store")

        runtime.chats.turns = raise_busy
        app.post_message(AppFocus())
        await until(pilot, lambda: looked)
        await pilot.pause()
        assert "holds the store" not in screen_text(app)
        assert reply.rating == "up"


async def test_undo_to_an_equal_rating_removes_the_shown_effect():
    """Rated up twice and taken back once it is up still, but what the second rating did holds no more."""
    async with chatting(ScriptedRuntime(["One."])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply._effect_of == 1)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply._effect_of == 2)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "taken back" in screen_text(app))
        assert (reply.rating, reply.effect) == ("up", "")
        assert any(line.strip() == "▲ good" for line in lines_of(app.screen))


async def test_undo_leaves_the_shown_effects_of_other_replies():
    """What a rating did to one reply stands while another reply's rating is taken back."""
    async with chatting(ScriptedRuntime(["One."], ["Two."])) as (app, pilot):
        first = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: first.effect)
        second = await ask(app, pilot)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: second.effect)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: second.rating is None)
        assert "Learned: more" in first.effect


@BOTH_SIZES
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["ctrl+n", "tab", "greater_than_sign"], "▼ bad, too long · Learned: less like this"),
        (["ctrl+n", "tab", "less_than_sign"], "▼ bad, too short · Learned"),
        (["tab", "minus", "exclamation_mark"], "▼ bad, wrong tone · Learned"),
        (
            ["tab", "2", "question_mark"],
            "★★☆☆☆, wrong facts · Kept; facts teach nothing. Ctrl+R takes it back",
        ),
        (["ctrl+n", *"/why", "space", *"long", "enter"], "▼ bad, too long"),
    ],
)
async def test_a_bad_rating_gets_its_reason_by_one_key(size, keys, said):
    """The line below a reply that was rated bad names the keys, until a reason is given."""
    async with chatting(ScriptedRuntime(["Hi."]), size) as (app, pilot):
        reply = await ask(app, pilot)
        *before, last = keys
        for key in before:
            await pilot.press(key)
            await pilot.pause()
        await until(pilot, lambda: reply.effect and "> too long · < too short" in screen_text(app))
        await pilot.press(last)
        await until(pilot, lambda: any(said in line for line in lines_of(app.screen)))
        assert "> too long" not in screen_text(app)


async def test_why_goes_with_the_next_message():
    """Nobody is asked about a reply that they have left."""
    async with chatting(ScriptedRuntime(["One."], ["Two."])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: "Why?" in screen_text(app))
        await ask(app, pilot)
        assert "Why?" not in screen_text(app) and "▼ bad" in screen_text(app)
        assert reply.rating == "down"


async def test_the_keys_rate_the_reply_that_the_user_sees():
    """A user who scrolls up to an earlier reply rates this reply, and not one below the screen."""
    long = "\n\n".join(f"Line {n}" for n in range(20))
    async with chatting(ScriptedRuntime(["One."], [long], [long])) as (app, pilot):
        first = await ask(app, pilot)
        second, third = [await ask(app, pilot) for _ in range(2)]
        app.chat.transcript.scroll_home(animate=False)
        await until(
            pilot, lambda: "One." in screen_text(app) and not third.region.overlaps(app.screen.region)
        )
        await pilot.press("ctrl+y")
        await until(pilot, lambda: (first if second.region.y > 20 else second).rating == "up")
        assert third.rating is None
        app.chat.transcript.scroll_end(animate=False)
        await until(pilot, lambda: third.region.overlaps(app.chat.transcript.region))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: third.rating == "down")


async def test_a_long_error_is_readable_at_80_columns():
    """The status line has one row, so a longer line goes into the conversation."""
    runtime = ScriptedRuntime(["One."])
    line = (
        "no adapter is in use, so nothing can be learned. Choose an adapter: `/adapter default` in a chat, "
        * 2
    )

    def refuse(*_, **__):
        raise NotFound(line)

    runtime.rate = refuse
    async with chatting(runtime, SMALL) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: screen_text(app).count("`/adapter default`") == 2)

"""A chat of many messages: the newest are shown; scrolling up loads earlier ones."""

import asyncio

import pytest
from ruvmlx.apps.chat import transcript, view_model
from ruvmlx.apps.chat.messages import ReplyMessage, UserMessage

from ruvmlx.runtime import Turn

from .helpers import SMALL, WIDE, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

MAX_SHOWN_MESSAGES, EARLIER = 60, 20  # more than the app's: the numbers below are of these


@pytest.fixture(autouse=True)
def more_messages(monkeypatch):
    monkeypatch.setattr(transcript, "MAX_SHOWN_MESSAGES", MAX_SHOWN_MESSAGES)
    monkeypatch.setattr(transcript, "EARLIER", EARLIER)
    monkeypatch.setattr(transcript, "SCREENS", 1000)
    monkeypatch.setattr(view_model, "OPENED_MESSAGES", MAX_SHOWN_MESSAGES + 3)


def long_chat(exchanges):
    runtime = ScriptedRuntime(["New."])
    turns = runtime.spoken["s0"] = [Turn("system", "Be brief.")]
    for n in range(exchanges):
        answer = f"answer {n}\n\n- a\n- b"
        turns += [Turn("user", f"question {n}", id=2 * n), Turn("assistant", answer, f"a{n}", id=2 * n + 1)]
    return runtime


def shown_count(app):
    return len(app.query(UserMessage)) + len(app.query(ReplyMessage))


def words(app):
    """The text lines of the screen, without the scrollbar."""
    return [line[:60].rstrip() for line in lines_of(app.screen)]


async def test_a_long_chat_opens_at_its_newest_turns():
    """Opening costs the same however long the chat is, and ends at its end."""
    async with chatting(long_chat(200), session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 199" in screen_text(app))
        assert shown_count(app) == MAX_SHOWN_MESSAGES
        assert (await ask(app, pilot)).text == "New."
        assert shown_count(app) == MAX_SHOWN_MESSAGES + 2


@pytest.mark.parametrize("size", [SMALL, WIDE, (100, 120)], ids=["80x24", "160x50", "100x120"])
async def test_an_opened_chat_has_about_as_many_turns_as_fill_the_screen(monkeypatch, size):
    """Each message costs time. The rest is there when the user scrolls up, which must be possible."""
    monkeypatch.setattr(transcript, "SCREENS", 1.3)
    async with chatting(long_chat(200), size, session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 199" in screen_text(app) and app.chat.transcript.max_scroll_y > 0)
        assert size[1] / 8 < shown_count(app) < size[1] / 2


async def test_a_chat_opened_at_a_message_has_at_most_as_many_turns(monkeypatch):
    """The turns before the message and those after it together are bounded, however tall the screen is."""
    monkeypatch.setattr(transcript, "MAX_SHOWN_MESSAGES", 6)
    runtime = long_chat(40)
    async with chatting(runtime, session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 39" in screen_text(app))
        shown = app.chat.transcript
        for at in (0, 30, 77):
            await shown.restart(runtime.turns(app.chat.state.session), "model", at)
            assert shown_count(app) == 6
            assert at in [message.message_id for message in shown.messages]


async def test_the_older_messages_of_a_long_chat_arrive_after_the_newest(monkeypatch):
    """The app opens a chat with its newest messages, and the user can scroll to all others soon after."""
    read = []
    runtime = long_chat(200)
    turns = runtime.turns
    runtime.turns = lambda session, newest=None: read.append(newest) or turns(session, newest)
    async with chatting(runtime, session="continue") as (app, pilot):
        await until(pilot, lambda: not app.chat.transcript._lacks_earlier)
        assert read[:2] == [MAX_SHOWN_MESSAGES + 3, None]
        for _ in range(20):
            await app.chat.transcript.load_earlier()
        assert shown_count(app) == 400 and not app.chat.transcript.has_earlier


async def test_a_screen_that_is_not_full_gets_earlier_turns(monkeypatch):
    """Texts that are shorter on the screen than they look, and a terminal that becomes taller."""
    monkeypatch.setattr(transcript, "SCREENS", 0.2)
    monkeypatch.setattr(transcript, "EARLIER", 8)
    async with chatting(long_chat(200), session="continue") as (app, pilot):
        await until(pilot, lambda: app.chat.transcript.max_scroll_y > 0)
        before = shown_count(app)
        await pilot.resize_terminal(80, 90)
        await until(pilot, lambda: shown_count(app) > before and app.chat.transcript.max_scroll_y > 0)


@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])
async def test_scrolling_to_the_top_loads_earlier_turns(size):
    """Some at a time, with what is on the screen staying where it is, until there are no more."""
    async with chatting(long_chat(70), size, session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 69" in screen_text(app))
        for count, first in ((80, "answer 40"), (100, "answer 30")):
            app.chat.transcript.scroll_to(y=1, animate=False, immediate=True)
            await until(
                pilot, lambda first=first: app.chat.transcript.scroll_y == 1 and first in screen_text(app)
            )
            before = words(app)[1:9]
            app.chat.transcript.scroll_up(animate=False)
            await until(
                pilot, lambda count=count: shown_count(app) == count and app.chat.transcript.scroll_y > 9
            )
            await until(pilot, lambda before=before: words(app)[2:10] == before)
        while app.chat.transcript.has_earlier:
            before = shown_count(app)
            await pilot.press("ctrl+home")
            await until(
                pilot, lambda before=before: shown_count(app) > before and not app.chat.transcript._held
            )
        await pilot.press("ctrl+home")
        await until(pilot, lambda: "question 0" in screen_text(app))
        assert shown_count(app) == 140


async def test_loading_earlier_turns_moves_nothing_on_the_screen():
    """Every frame that is drawn has the same lines: the reader sees no jump."""
    async with chatting(long_chat(70), session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 69" in screen_text(app))
        draw, frames = app.screen._compositor_refresh, []

        def draw_and_note():
            draw()
            if not app._batch_count and app.chat.transcript.virtual_size.height > height:
                frames.append(lines_of(app.screen)[1])

        app.screen._compositor_refresh, height = draw_and_note, app.chat.transcript.virtual_size.height
        app.chat.transcript.scroll_to(y=0, animate=False, immediate=True)
        await until(pilot, lambda: shown_count(app) == MAX_SHOWN_MESSAGES + EARLIER and len(frames) > 2)
        assert {frame.strip("▌ ") for frame in frames} == {"question 40"}


async def test_page_up_loads_earlier_turns_when_all_fits():
    """What does not fill the screen cannot be scrolled; Page Up brings the earlier ones all the same."""
    async with chatting(long_chat(70), (80, 400), session="continue") as (app, pilot):
        await until(pilot, lambda: "answer 69" in screen_text(app))
        await pilot.press("pageup")
        await until(pilot, lambda: shown_count(app) > MAX_SHOWN_MESSAGES)


async def test_selecting_upwards_loads_earlier_replies():
    """Up from the first reply on the screen chooses the one before it; a rating that it has shows."""
    runtime = long_chat(70)
    async with chatting(runtime, session="continue") as (app, pilot):
        first = app.chat.transcript.replies[0]
        assert first.reply_id == "a40"
        runtime.rated_elsewhere("a39", "up")
        app.actions.rate.look_again()
        await until(pilot, lambda: app.chat.status.learned.ratings == 1)
        first.focus()
        await pilot.press("up")
        await until(pilot, lambda: isinstance(app.focused, ReplyMessage) and app.focused.reply_id == "a39")
        assert app.focused.rating == "up"
        await until(pilot, lambda: "▲ good" in screen_text(app))


async def test_a_new_chat_shows_no_turns_of_the_old_one():
    """Nothing of the old chat comes into the new one."""
    async with chatting(long_chat(70), session="continue") as (app, pilot):
        app.chat.prompt.text = "/new"
        await pilot.press("enter")
        await until(pilot, lambda: shown_count(app) == 0)
        await pilot.press("pageup")
        await ask(app, pilot)
        assert shown_count(app) == 2


@pytest.mark.parametrize("at_layout", [False, True])
async def test_a_chat_that_opens_while_older_messages_load_can_load_its_own(monkeypatch, at_layout):
    """The new messages take the place of the message that the load held on its line."""
    runtime = long_chat(70)
    async with chatting(runtime, session="continue") as (app, pilot):
        shown, turns = app.chat.transcript, runtime.turns("s0")
        wait, mark, restarts = transcript.wait_until_drawn, shown._mark_left_out, []

        def restart():
            if not restarts:
                restarts.append(asyncio.ensure_future(shown.restart(turns, "model")))

        async def wait_and_restart(widget):
            if not at_layout:
                restart()
            await wait(widget)

        def mark_and_restart():
            mark()
            if at_layout:
                restart()

        monkeypatch.setattr(transcript, "wait_until_drawn", wait_and_restart)
        monkeypatch.setattr(shown, "_mark_left_out", mark_and_restart)
        await asyncio.wait_for(shown.load_earlier(), 60)
        await restarts[0]
        texts = [message.text for message in shown.messages]
        assert texts == [turn.content for turn in turns[-len(texts) :]]
        await asyncio.wait_for(shown.load_earlier(), 60)
        await until(pilot, lambda: shown_count(app) >= MAX_SHOWN_MESSAGES + EARLIER)


async def test_no_later_messages_are_added_while_another_chat_opens(monkeypatch):
    runtime = long_chat(70)
    async with chatting(runtime, session="continue") as (app, _pilot):
        shown, turns = app.chat.transcript, runtime.turns("s0")
        await shown.restart(turns, "model", 20)
        assert shown.has_later
        remove = shown.remove_children

        def remove_and_load(*children):
            loads.append(asyncio.ensure_future(shown.load_later()))
            return remove(*children)

        loads = []
        monkeypatch.setattr(shown, "remove_children", remove_and_load)
        await shown.restart(turns, "model", 0)
        await loads[0]
        texts = [message.text for message in shown.messages]
        assert texts == [turn.content for turn in turns[1 : 1 + len(texts)]]


async def say(app, pilot, n):
    """Ask question n of a scripted chat and wait until its reply is complete."""
    app.chat.prompt.text = f"question {n}"
    await pilot.press("enter")
    wanted = f"reply {n}\n"
    await until(
        pilot,
        lambda: (
            app.phase == "idle"
            and app.chat.transcript.replies[-1:]
            and app.chat.transcript.replies[-1].text.startswith(wanted)
        ),
    )


@pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])
async def test_a_growing_chat_holds_a_bounded_number_of_turns(monkeypatch, size, full):
    """However many turns: what is shown, and held in memory for it, is bounded; nothing moves on the screen
    when the oldest go, and they are back where the reader goes there."""
    if size is WIDE and not full:
        pytest.skip("a narrow one is watched; --full watches both")
    turns = 500 if full else 24
    monkeypatch.setattr(transcript, "MAX_SHOWN_MESSAGES", 12)
    monkeypatch.setattr(transcript, "EARLIER", 8)
    runtime = ScriptedRuntime(*[[f"reply {n}\n\n" + "- a\n" * 9] for n in range(turns)])
    async with chatting(runtime, size) as (app, pilot):
        trim, widgets, moved = app.chat.transcript.trim, [], []

        async def trim_and_note(turns):
            await pilot.pause()
            before, first = words(app), app.chat.transcript.messages[0]
            await trim(turns)
            await pilot.pause()
            if not first.is_attached:
                # a reply that waited on a busy machine keeps the empty widget of its note
                notes = sum(1 for note in app.query(".note") if not note.display)
                widgets.append(len(app.query("*")) - notes)
                moved.append(words(app)[:12] != before[:12])

        app.chat.transcript.trim = trim_and_note
        for n in range(turns):
            await say(app, pilot, n)
            assert shown_count(app) <= 12 + 8 + 2
        assert len(widgets) > turns // 10 and len(set(widgets)) == 1 and not any(moved)
        while app.chat.transcript.has_earlier:
            before = shown_count(app)
            await pilot.press("ctrl+home")
            await until(
                pilot, lambda before=before: shown_count(app) > before and not app.chat.transcript._held
            )
        assert [m.text for m in app.chat.transcript.messages][::2] == [f"question {n}" for n in range(turns)]


async def test_no_turn_is_removed_while_the_reader_looks_at_earlier_ones(monkeypatch):
    """While the reader has scrolled up, or chosen an old reply, nothing is taken away; later it is."""
    monkeypatch.setattr(transcript, "MAX_SHOWN_MESSAGES", 4)
    monkeypatch.setattr(transcript, "EARLIER", 2)
    runtime = ScriptedRuntime(*[[f"reply {n}\n\n" + "- a\n" * 9] for n in range(20)], gate=True, free=0)
    async with chatting(runtime) as (app, pilot):
        for n in range(3):
            runtime.released.release()
            await say(app, pilot, n)
        assert shown_count(app) == 6
        app.chat.prompt.text = "question 3"
        await pilot.press("enter")
        await until(pilot, lambda: app.phase == "replying")
        app.chat.transcript.scroll_to(y=3, animate=False, immediate=True)
        await pilot.pause()
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle" and len(app.chat.transcript.replies) == 4)
        assert shown_count(app) == 8 and app.chat.transcript.scroll_y == 3
        runtime.released.release()
        await say(app, pilot, 4)
        assert shown_count(app) == 4

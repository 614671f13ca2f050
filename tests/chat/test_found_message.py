"""What a search finds opens at its message: in the list of chats, with /goto, /open and `chat --find`."""

import pytest
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.messages import ReplyMessage, UserMessage
from ruvmlx.apps.chat.options import ChatOptions, start_place
from ruvmlx.apps.chat.transcript import EARLIER, MAX_SHOWN_MESSAGES

from ruvmlx.errors import NotFound
from ruvmlx.runtime import Turn

from .helpers import SMALL, WIDE, ask, screen_text, until
from .helpers import chatting as scripted
from .scripted import ScriptedRuntime
from .test_branches import chatting, run_plain, send  # noqa: F401

COUNT = 150  # exchanges: more than the transcript shows at once


@pytest.fixture
def long_chat(open_tiny):
    """A chat whose question 40 has a needle, and beside it another version; and a short, newer chat."""
    with open_tiny() as runtime:
        store = runtime.store
        chat = store.chats.new("m")
        place = 0
        for n in range(COUNT):
            word = "needle" if n == 40 else "hay"
            message = store.messages.add_user(
                chat, f"question {n} of {word}" + (f" number {n}" if n == 145 else "")
            )
            store.messages.append(chat, "assistant", f"answer {n}", None, 1.0)
            place = message if n == 40 else place
        store.messages.add_user(store.chats.new("m"), "a short one")
    return chat, place


async def check_found_message(app, pilot):
    """The message that was searched for is on the screen, and is marked."""
    await until(pilot, lambda: "question 40 of needle" in screen_text(app) and app.query(".found"))
    [marked] = app.query(".found")
    assert marked.text == "question 40 of needle"


async def test_no_line_about_a_place_stays_after_the_user_has_left_it(chatting, long_chat):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        await app.actions.library.open(long_chat[0])
        await send(app, pilot, "/goto 81")
        await until(pilot, lambda: "Esc goes to the end" in screen_text(app) and app.query(".found"))
        await pilot.press("escape")
        await until(pilot, lambda: not app.chat.transcript.has_found)
        await until(pilot, lambda: "Esc goes to the end" not in screen_text(app), seconds=1)
        await send(app, pilot, "/pin")
        await until(pilot, lambda: app.chat.status.message.startswith("Pinned"))
        await send(app, pilot, "/new")
        await until(pilot, lambda: app.chat.state.session != long_chat[0] and app.phase == "idle", seconds=2)
        assert app.chat.status.message == ""


async def test_the_list_of_chats_opens_at_the_message(chatting, long_chat):  # noqa: F811
    """With what stands around it; down to the end on the way, and at once with Esc."""
    async with chatting(SMALL) as (app, pilot):
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(app.screen, ChatsScreen) and len(app.screen._entries) == 2)
        await pilot.press(*"needle")
        await until(pilot, lambda: "question 40 of needle" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.state.session == long_chat[0])
        await check_found_message(app, pilot)
        assert app.focused.text == "answer 40"
        await until(pilot, lambda: app.chat.transcript.scroll_y > 0)
        before = len(app.chat.transcript.messages)
        assert before <= MAX_SHOWN_MESSAGES + EARLIER
        app.chat.transcript.scroll_end(animate=False, immediate=True)
        await until(pilot, lambda: len(app.chat.transcript.messages) == before + EARLIER)
        assert app.chat.transcript.has_later and "answer 149" not in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: "answer 149" in screen_text(app))
        assert not app.chat.transcript.has_later
        await ask(app, pilot, "Next")
        texts = [message.text for message in app.chat.transcript.messages]
        assert texts[-3:-1] == ["answer 149", "Next"] and len(set(texts[:-1])) == len(texts) - 1


async def test_goto_shows_a_message_of_the_open_chat(chatting, long_chat):  # noqa: F811
    async with chatting(session=long_chat[0]) as (app, pilot):
        await send(app, pilot, "/find needle")
        await until(pilot, lambda: "81. You: question 40 of needle" in screen_text(app))
        await send(app, pilot, "/goto 81")
        await check_found_message(app, pilot)
        await send(app, pilot, "/goto 301")
        await until(
            pilot, lambda: "no message has the number '301'; give a number from 1 to 300" in screen_text(app)
        )


async def test_esc_goes_to_the_end_also_where_all_is_loaded(chatting, long_chat):  # noqa: F811
    async with chatting(session=long_chat[0], find="number 145") as (app, pilot):
        await until(pilot, lambda: isinstance(app.focused, ReplyMessage))
        await until(pilot, lambda: not app.chat.transcript.has_later)
        assert app.focused.text == "answer 145"
        await until(pilot, lambda: "answer 149" not in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: "answer 149" in screen_text(app))


async def test_writing_the_found_reply_again_leaves_no_hole():
    """`r` on a reply in the middle: the new branch ends there."""
    runtime = ScriptedRuntime()
    runtime.spoken["s0"] = [
        turn
        for n in range(COUNT)
        for turn in (
            Turn("user", f"question {n}", id=2 * n + 1),
            Turn("assistant", f"answer {n}", f"r{n}", None, "stop", 2 * n + 2),
        )
    ]
    runtime.show_message = lambda session, message: None
    async with scripted(runtime, session="s0", message=82) as (app, pilot):
        await until(pilot, lambda: isinstance(app.focused, ReplyMessage) and app.chat.transcript.has_later)
        assert app.focused.text == "answer 40"
        await app.chat.transcript.cut(app.focused)
        assert not app.chat.transcript.has_later
        assert app.query(UserMessage).last().text == "question 40"


def test_a_message_of_another_branch_is_found_there(long_chat, open_tiny):
    """Its branch becomes the current one; a message of the current branch changes nothing."""
    with open_tiny() as runtime:
        messages, (chat, place) = runtime.store.messages, long_chat
        head = messages.head(chat)
        assert start_place(runtime, ChatOptions(find="needle")) == (chat, place)
        assert messages.head(chat) == head
        before = messages.all(chat)[0].id
        other = messages.add_user(chat, "a thimble", after=before)
        messages.set_head(chat, head)
        assert start_place(runtime, ChatOptions(find="thimble", session=chat[:8])) == (chat, other)
        assert [m.id for m in messages.branch(chat)] == [before, other]
        with pytest.raises(NotFound, match="no message has the words 'short'"):
            start_place(runtime, ChatOptions(find="short", session=chat))
        with pytest.raises(NotFound):
            messages.show(chat, 10_000)


def test_plain_mode_prints_the_message(open_tiny, long_chat):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/chats needle", "/open 2", "/goto 81", session="new")
        shown = run_plain(runtime, "/goto 1", find="needle")
    assert code == 0 and said.splitlines()[-2:] == ["You: question 40 of needle", "Assistant: answer 40"]
    assert shown[1].splitlines() == ["You: question 0 of hay", "Assistant: answer 0"]

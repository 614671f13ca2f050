"""Replies written again or continued, and edited questions: the app and plain mode on a real runtime."""

import asyncio
import io

import pytest
from ruvmlx.apps.chat.actions.write import ON_ANOTHER_BRANCH
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.engine import Sampling
from ruvmlx.errors import UsageError

from .helpers import SMALL, WIDE, ask, lines_of, screen_text, until
from .scripted import ScriptedRuntime

BOTH_SIZES = pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])


@pytest.fixture
def chatting(open_tiny, tiny):
    """The app on the tiny model; replies are short, cut at the limit, and sampled."""
    from contextlib import asynccontextmanager

    no_end = tuple((token, -100.0) for token in tiny.tokenizer.eos_ids)

    @asynccontextmanager
    async def chat(size=SMALL, **options):
        known = dict(sampling=Sampling(1.5, logit_bias=no_end), max_new_tokens=5, learn_when_idle=False)
        app = ChatApp(open_tiny, ChatOptions(**known | options))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.phase == "idle" or app.failure)
            assert not app.failure
            yield app, pilot
            app.host.close_now()

    return chat


async def idle_with(app, pilot, count):
    """Wait until so many replies are shown and committed."""
    await until(
        pilot,
        lambda: (
            app.phase == "idle"
            and len(app.chat.transcript.replies) == count
            and all(r.finished and r.message_id for r in app.chat.transcript.replies)
        ),
    )


async def send(app, pilot, text):
    app.chat.prompt.focus()
    app.chat.prompt.text = text
    await pilot.press("enter")


def shown_texts(app):
    return [m.text for m in app.chat.transcript.messages]


@BOTH_SIZES
async def test_again_writes_a_second_reply_and_both_can_be_shown(chatting, size):
    """Ctrl+G; then the arrow keys on the selected reply flip, and each keeps its rating."""
    async with chatting(size) as (app, pilot):
        first = await ask(app, pilot, "Hello")
        old = first.message_id
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.transcript.replies[-1].effect)
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app))
        await idle_with(app, pilot, 1)
        assert (
            app.chat.transcript.replies[0].message_id != old and app.chat.transcript.replies[0].rating is None
        )
        await pilot.press("tab", "left")
        await until(pilot, lambda: "‹ 1/2 ›" in screen_text(app) and "▲ good" in screen_text(app))
        assert (
            app.chat.transcript.replies[0].message_id == old and app.focused is app.chat.transcript.replies[0]
        )
        await until(pilot, lambda: "←→ Switch" in lines_of(app.screen)[-1])
        await pilot.press("left")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app))
        assert len(app.query(UserMessage)) == 1


async def test_an_edited_question_starts_a_branch_and_flipping_shows_the_old_one(chatting):
    """`e` brings it into the input; what followed is out of sight, and comes back with a flip."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "First question")
        await ask(app, pilot, "Second question")
        before = shown_texts(app)
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", "up", "e")
        await until(pilot, lambda: app.chat.prompt.text == "First question" and app.chat.prompt.has_focus)
        assert "Editing your question" in screen_text(app)
        await pilot.press("escape")
        assert app.chat.prompt.text == "a draft" and "Editing your question" not in screen_text(app)
        await pilot.press("tab", "up", "e")
        await pilot.press("ctrl+a", "X", "enter")
        await until(pilot, lambda: len(app.query(UserMessage)) == 1 and app.phase == "idle")
        assert shown_texts(app)[0] == "XFirst question" and screen_text(app).count("‹ 2/2 ›") == 1
        assert app.chat.transcript.messages[0].branch == (2, 2)
        assert app.chat.transcript.replies[0].branch == (1, 1)
        assert app.chat.prompt.text == "a draft"
        await send(app, pilot, "/prev")
        await until(pilot, lambda: shown_texts(app) == before)


async def test_more_continues_a_cut_reply_in_place(chatting):
    """The text grows where it stands; the shorter one is beside it."""
    async with chatting(WIDE, sampling=Sampling(0.0)) as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        assert "cut at the length limit · /more continues it" in screen_text(app)
        short = reply.text
        await pilot.press("tab", "m")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app) and app.phase == "idle")
        assert reply.text.startswith(short) and len(reply.text) > len(short)
        turns = await app.host.call(lambda runtime: runtime.chats.turns(app.chat.state.session))
        assert turns[-1].content == reply.text
        await send(app, pilot, "/prev")
        await until(pilot, lambda: shown_texts(app)[-1] == short)


async def test_the_edit_command_replaces_the_question_or_puts_it_into_the_input(chatting):
    async with chatting() as (app, pilot):
        await send(app, pilot, "/edit x")
        await until(pilot, lambda: "no question to edit" in screen_text(app))
        await ask(app, pilot, "Hello")
        await send(app, pilot, "/edit Goodbye")
        await until(pilot, lambda: shown_texts(app)[:1] == ["Goodbye"])
        await idle_with(app, pilot, 1)
        await send(app, pilot, "/edit")
        await until(pilot, lambda: app.chat.prompt.text == "Goodbye")


async def test_a_refused_edit_leaves_the_chat_unchanged(chatting):
    """Other words that are too long: the old ones are shown again, the new ones are in the input. They are
    still the edit: words that are short enough replace the question, and the draft comes back."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        await ask(app, pilot, "More")
        before, app.chat.prompt.text = shown_texts(app), "a draft"
        await pilot.press("tab", "up", "e")
        app.chat.prompt.text = "word " * 700
        await pilot.press("enter")
        await until(pilot, lambda: "reads at most" in screen_text(app) and app.phase == "idle")
        assert shown_texts(app) == before and app.chat.prompt.text == "word " * 700
        assert app.chat.editing is app.chat.transcript.messages[0] and "Editing" in screen_text(app)
        app.chat.prompt.text = "Bye"
        await pilot.press("enter")
        await until(pilot, lambda: shown_texts(app)[:1] == ["Bye"])
        await idle_with(app, pilot, 1)
        assert len(shown_texts(app)) == 2 and app.chat.prompt.text == "a draft"


async def test_again_edit_and_flip_do_nothing_during_a_reply(open_tiny):
    """Again, edit and flip wait for nobody: while a reply comes, they do nothing."""
    runtime = ScriptedRuntime(["one ", "two "], gate=True, free=1)
    app = ChatApp(lambda: runtime, ChatOptions())
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.phase == "idle")
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "one" in screen_text(app))
        await pilot.press("ctrl+g", "ctrl+o")
        assert len(app.screen_stack) == 1 and app.phase == "replying"
        app.actions.write.edit()
        assert app.chat.editing is None
        app.host.close_now()


async def test_up_and_down_recall_sent_messages(chatting):
    """Up and down go through what was sent, from the first and the last line; a draft is kept."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "one")
        await ask(app, pilot, "two\nlines")
        await pilot.press(*"draft", "up")
        assert app.chat.prompt.text == "two\nlines"
        await pilot.press("up")
        assert app.chat.prompt.text == "two\nlines"  # the cursor was in its last line
        await pilot.press("up")
        assert app.chat.prompt.text == "one"
        await pilot.press("up", "down")
        assert app.chat.prompt.text == "two\nlines"
        await pilot.press("down")
        assert app.chat.prompt.text == "draft"
    async with chatting() as (app, pilot):
        await pilot.press("up")
        assert app.chat.prompt.text == "two\nlines"


def run_plain(runtime, *lines, **options):
    """Run plain mode on these lines: (exit code, output)."""
    sink = io.StringIO()
    known = dict(sampling=Sampling(0.0), max_new_tokens=4)
    code = PlainChat(
        runtime, ChatOptions(**known | options), io.StringIO("".join(f"{line}\n" for line in lines)), sink
    ).run()
    return code, sink.getvalue()


def test_plain_mode_has_all_branch_commands(open_tiny, capsys):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "Hello", "/again", "/prev", "/more", "/edit Bye", "/edit", "/next")
        assert code == 0, capsys.readouterr().err
        assert "(2 of 2 replies in this place; /next, /prev)" in said
        assert "(1 of 2 replies in this place; /next, /prev)" in said
        assert "Your question: Bye" in said and "You: Hello\nAssistant: " in said
        chat = runtime.chats.last_chat()
        assert "(1 of 3 replies in this place, 1 of 2 versions of the question; /next, /prev)" in said
        assert [turn.branches for turn in runtime.chats.turns(chat)] == [2, 3]
        code, said = run_plain(runtime, "/again", "/more", "/next", "/edit x")
        assert code == 1 and said == ""


async def test_flipping_at_random_shows_what_the_store_has(chatting):
    """After any sequence of these actions, screen and store agree."""
    import random

    rng = random.Random(11)
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "start")
        for _ in range(14):
            what = rng.choice(["/again", "/next", "/prev", "/more", "/edit other", "go on"])
            await send(app, pilot, what)
            await asyncio.sleep(0)
            await until(pilot, lambda: app.chat.prompt.text == "" and app.phase == "idle")
            for worker in [w for w in app.workers if w.group == "write"]:
                await worker.wait()
            turns = await app.host.call(lambda runtime: runtime.chats.turns(app.chat.state.session))
            ids = [m.message_id for m in app.chat.transcript.messages]
            assert ids == [t.id for t in turns if t.role != "system"], what
            places = [m.branch for m in app.chat.transcript.messages]
            assert places == [(t.branch, t.branches) for t in turns if t.role != "system"], what


async def test_an_error_during_again_leaves_the_old_reply(chatting, monkeypatch):
    """The old reply is there again."""
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        before = shown_texts(app)

        def refuse(*_, **__):
            raise UsageError("not today")
            yield

        runtime = app.host.holder.opened_runtime
        monkeypatch.setattr(runtime.chats, "again", refuse)
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "not today" in screen_text(app) and app.phase == "idle")
        assert shown_texts(app) == before


async def test_a_reply_with_the_same_words_is_told(chatting):
    """Greedy: the other reply is the same, and the status line says what lets replies differ."""
    async with chatting(sampling=Sampling(0.0)) as (app, pilot):
        await ask(app, pilot, "Hello")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "the same words again" in screen_text(app))


async def test_a_long_message_of_the_status_line_stays_longer(chatting, monkeypatch):
    async with chatting() as (app, _):
        status, waits = app.chat.status, []
        timer = status.set_timer(99, print)
        monkeypatch.setattr(status, "set_timer", lambda seconds, _: waits.append(seconds) or timer)
        status.flash("Copied")
        status.flash("w" * 120)
        status.flash("Copied", 20)
        assert waits == [3, 10, 20]


@pytest.mark.parametrize("keys", ["r", "m", "eX⏎"])
async def test_an_earlier_reply_that_goes_on_tells_where_the_later_messages_are(chatting, keys):
    """And they are there. A reply at the end of the chat tells nothing."""
    async with chatting() as (app, pilot):
        await ask(app, pilot, "One")
        await ask(app, pilot, "Two")
        await pilot.press("tab", "up")
        for key in keys:
            await pilot.press("enter" if key == "⏎" else key)
            await pilot.pause()
        await until(pilot, lambda: ON_ANOTHER_BRANCH in screen_text(app))
        await idle_with(app, pilot, 1)
        app.chat.status.message = ""
        await pilot.press("tab", "left")
        await until(pilot, lambda: "Two" in shown_texts(app))
        await pilot.press("escape", "ctrl+g")
        await until(pilot, lambda: "‹ 2/2 ›" in screen_text(app) and app.phase == "idle")
        assert ON_ANOTHER_BRANCH not in screen_text(app)


async def test_a_rating_in_a_chat_that_another_program_deleted_says_what_it_did(chatting):
    """The rating counted, and the status line showed an error."""
    async with chatting() as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.rating == "up")
        session = app.chat.state.session
        await app.host.call(lambda runtime: runtime.store.chats.delete(session))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: reply.rating == "down")
        assert "no chat" not in screen_text(app)

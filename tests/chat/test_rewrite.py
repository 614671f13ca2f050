"""`E` on a reply: the user's version becomes a branch beside it, and the model learns from it."""

import threading

import pytest
from ruvmlx.apps.chat.actions.write import ON_ANOTHER_BRANCH
from ruvmlx.apps.chat.messages import ReplyMessage

from ruvmlx.engine import Sampling
from ruvmlx.errors import StoreBusy

from .helpers import WIDE, ask, screen_text, until
from .test_branches import BOTH_SIZES, chatting, run_plain, send, shown_texts  # noqa: F401

LEARNED = "Learned that you prefer your version; Ctrl+R takes it back"


async def rewrite(app, pilot, text, *keys):
    """Choose a reply, press E, and replace its words."""
    await pilot.press("tab", *keys, "E")
    await until(pilot, lambda: isinstance(app.chat.editing, ReplyMessage) and app.chat.prompt.has_focus)
    app.chat.prompt.text = text
    await pilot.press("enter")


@BOTH_SIZES
async def test_the_rewritten_reply_stands_beside_the_first_and_is_learned_from(chatting, size):  # noqa: F811
    async with chatting(size) as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        first = reply.text
        await pilot.press("tab")
        await until(pilot, lambda: "Choosing a reply" in screen_text(app))
        await pilot.press("E")
        await until(pilot, lambda: app.chat.prompt.text == first and app.chat.prompt.has_focus)
        assert "Rewriting the reply · Enter saves your version" in screen_text(app)
        app.chat.prompt.text = "My own words."
        await pilot.press("enter")
        await until(pilot, lambda: LEARNED in screen_text(app))
        assert shown_texts(app) == ["Hello", "My own words."] and app.chat.editing is None
        assert "‹ 2/2 ›" in screen_text(app) and "◆ preferred · Learned: more like this" in screen_text(app)
        status = await app.host.call(lambda runtime: runtime.status())
        assert (status.preferences, status.updates) == (1, 1)
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Choice taken back: “" in screen_text(app))
        assert "◆ preferred" not in screen_text(app) and shown_texts(app)[-1] == "My own words."
        await send(app, pilot, "/prev")
        await until(pilot, lambda: shown_texts(app)[-1] == first)


async def test_esc_keeps_the_reply_and_gives_the_draft_back(chatting):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        app.chat.prompt.text = "a draft"
        await pilot.press("tab", "E")
        await until(pilot, lambda: app.chat.prompt.text == reply.text)
        await pilot.press("escape")
        assert app.chat.prompt.text == "a draft" and app.chat.editing is None
        assert "Rewriting" not in screen_text(app)
        await pilot.press("enter")  # the draft is a message again
        await until(pilot, lambda: "a draft" in shown_texts(app))
        assert await app.host.call(lambda runtime: runtime.status().preferences) == 0


async def test_an_earlier_reply_can_be_rewritten_and_the_chat_goes_on_from_there(chatting):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "First")
        await ask(app, pilot, "Second")
        await rewrite(app, pilot, "line one\n/not a command", "up")
        await until(pilot, lambda: LEARNED in screen_text(app))
        assert shown_texts(app) == ["First", "line one\n/not a command"]
        await until(pilot, lambda: ON_ANOTHER_BRANCH in screen_text(app))
        await ask(app, pilot, "Third")
        turns = await app.host.call(lambda runtime: runtime.chats.turns(app.chat.state.session))
        assert [turn.content for turn in turns[:3]] == ["First", "line one\n/not a command", "Third"]


async def test_a_text_that_begins_like_a_command_is_still_a_reply(chatting):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        await rewrite(app, pilot, "/quit")
        await until(pilot, lambda: LEARNED in screen_text(app))
        assert shown_texts(app)[-1] == "/quit" and ON_ANOTHER_BRANCH not in screen_text(app)


async def test_what_is_refused_stays_in_the_input(chatting, monkeypatch):  # noqa: F811
    """The same words, and a store that is busy: nothing is saved, and the words can be sent again."""
    async with chatting(WIDE) as (app, pilot):
        reply = await ask(app, pilot, "Hello")
        await pilot.press("tab", "E")
        await until(pilot, lambda: app.chat.prompt.text == reply.text)
        await pilot.press("enter")
        await until(pilot, lambda: "same as before" in screen_text(app) and not reply.progress)
        runtime = app.host.holder.opened_runtime

        def raise_busy(*_, **__):
            raise StoreBusy("locked by a test")

        with monkeypatch.context() as patched:
            patched.setattr(runtime.store.replies, "add", raise_busy)
            app.chat.prompt.text = "Mine."
            await pilot.press("enter")
            await until(pilot, lambda: "locked by a test" in screen_text(app) and not reply.progress)
        assert app.chat.prompt.text == "Mine." and app.chat.editing is reply
        await pilot.press("enter")
        await until(pilot, lambda: LEARNED in screen_text(app))
        assert shown_texts(app)[-1] == "Mine."


async def test_the_next_message_waits_until_the_version_is_saved(chatting, monkeypatch):  # noqa: F811
    """What is learned from the version can take seconds, and the chat goes on from it."""
    saves, released = threading.Event(), threading.Event()
    async with chatting(WIDE) as (app, pilot):
        await ask(app, pilot, "Hello")
        chats = app.host.holder.opened_runtime.chats
        edit_reply = chats.edit_reply

        def save(*of):
            saves.set()
            assert released.wait(60)
            return edit_reply(*of)

        monkeypatch.setattr(chats, "edit_reply", save)
        await rewrite(app, pilot, "Mine.")
        await until(pilot, saves.is_set)
        await send(app, pilot, "And then?")
        await until(pilot, lambda: "Sent in a moment" in screen_text(app), seconds=5)
        released.set()
        await until(pilot, lambda: len(app.chat.transcript.replies) == 2 and app.phase == "idle")
        turns = await app.host.call(lambda runtime: runtime.chats.turns(app.chat.state.session))
        assert [turn.content for turn in turns[:3]] == shown_texts(app)[:3] == ["Hello", "Mine.", "And then?"]


async def test_a_version_waits_for_the_end_of_a_reply(chatting, monkeypatch):  # noqa: F811
    """Saved during the reply, it would take the growing reply off the screen."""
    released = threading.Event()
    async with chatting(WIDE) as (app, pilot):
        reply = await ask(app, pilot, "First")
        await ask(app, pilot, "Second")
        chats = app.host.holder.opened_runtime.chats
        again = chats.again

        def write(*of, **how):
            assert released.wait(60)
            return again(*of, **how)

        monkeypatch.setattr(chats, "again", write)
        await pilot.press("tab", "up", "E")
        await until(pilot, lambda: app.chat.editing is reply and app.chat.prompt.has_focus)
        await pilot.press("ctrl+g")
        await until(pilot, lambda: app.phase == "replying")
        app.chat.prompt.text = "Mine."
        await pilot.press("enter")
        await until(pilot, lambda: "Still replying" in screen_text(app), seconds=5)
        assert app.chat.prompt.text == "Mine." and app.chat.editing is reply
        released.set()
        await until(pilot, lambda: app.phase == "idle")
        await pilot.press("enter")
        await until(pilot, lambda: LEARNED in screen_text(app))
        assert shown_texts(app) == ["First", "Mine."]


async def test_the_users_own_key_is_told(chatting):  # noqa: F811
    async with chatting(WIDE, keys="undo=f8") as (app, pilot):
        await ask(app, pilot, "Hello")
        await rewrite(app, pilot, "Mine.")
        await until(pilot, lambda: "your version; f8 takes it back" in screen_text(app).lower())


async def test_without_a_reply_or_an_adapter(chatting):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        await send(app, pilot, "/rewrite")
        await until(pilot, lambda: "no reply to rewrite yet" in screen_text(app))
        await ask(app, pilot, "Hello")
        await send(app, pilot, "/adapter none")
        await until(pilot, lambda: app.chat.status.learned is None)
        await send(app, pilot, "/rewrite Mine.")
        await until(pilot, lambda: "so nothing was learned" in screen_text(app))
        assert shown_texts(app)[-1] == "Mine."


async def test_going_on_after_a_regenerated_reply_is_a_weak_preference(chatting):  # noqa: F811
    async with chatting(WIDE) as (app, pilot):
        texts = [(await ask(app, pilot, "Hello")).text]
        # Without a seed the newest reply can begin as the one before: such a choice says nothing.
        while len(texts) < 2 or texts[-1].startswith(texts[-2]) or texts[-2].startswith(texts[-1]):
            await pilot.press("ctrl+g")
            place = "‹ {0}/{0} ›".format(len(texts) + 1)
            await until(pilot, lambda place=place: place in screen_text(app) and app.phase == "idle")
            texts.append(shown_texts(app)[-1])
        assert await app.host.call(lambda runtime: runtime.status().preferences) == 0
        await ask(app, pilot, "And then?")
        (found,) = await app.host.call(lambda runtime: runtime.learner.history.pairs.in_force())
        assert found.strength == pytest.approx(0.3)
        said = "Learned that you prefer the reply that you went on from; Ctrl+R takes it back"
        await until(pilot, lambda: said in screen_text(app))
        assert "◆ preferred · Learned: more like this than like the other. Ctrl+R" in screen_text(app)
        assert app.chat.state.lesson is not None


def test_plain_mode_rewrites(open_tiny, capsys):
    with open_tiny() as runtime:
        code, said = run_plain(
            runtime, "Hello", "/rewrite", "/rewrite My own words.", "/undo", "/prev", "/next"
        )
        assert code == 0, capsys.readouterr().err
        assert "To change it: /rewrite and your text." in said
        assert "Learned that you prefer your version; /undo takes it back." in said
        assert (
            "Choice taken back: “" in said
            and "”; 0 ratings left" in said
            and "Assistant: My own words." in said
        )
        code, said = run_plain(runtime, "/rewrite x")
        assert code == 1 and said == ""


def test_plain_mode_tells_what_going_on_taught(open_tiny, capsys):
    with open_tiny() as runtime:
        how = {"sampling": Sampling(1.5), "max_new_tokens": 12}
        code, said = run_plain(runtime, "Hello", "/again", "And then?", "/details", "/undo", **how)
        both = said + capsys.readouterr().err
        assert code == 0 and both.count("you went on from; /undo takes it back.") == 1
        assert "last lesson  lead in log-probability" in said
        assert "Choice taken back: “" in said and "”; 0 ratings left" in said

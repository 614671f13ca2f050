"""`u` on a selected reply: it takes the rating of that reply back, and no other one."""

import threading
from dataclasses import replace

import pytest
from ruvmlx.apps.chat import describe
from ruvmlx.apps.chat.view_model import RatingPlace

from ruvmlx.engine import GenerationRequest

from .helpers import WIDE, ask, screen_text, until
from .test_branches import chatting, send  # noqa: F401 - a fixture


async def rated_chat(app, pilot, *ratings):
    """Ask a question for each rating (None: no rating), and return the replies."""
    replies = []
    for n, rating in enumerate(ratings, 1):
        reply = await ask(app, pilot, f"Question {n}")
        if rating:
            await send(app, pilot, f"/rate {rating}")
            await until(pilot, lambda reply=reply: reply.effect)
        replies.append(reply)
    return replies


async def ratings_of(app):
    """The ratings in force, {reply id: rating}."""
    read = lambda runtime: {r.reply_id: r.rating for r in runtime.learner.history.ratings()}  # noqa: E731
    return await app.host.call(read)


async def test_the_rating_of_an_older_reply_is_taken_back(chatting):  # noqa: F811
    """The newer rating stays in force."""
    async with chatting() as (app, pilot):
        first, second = await rated_chat(app, pilot, "up", "down")
        await pilot.press("tab", "up")
        await until(pilot, lambda: app.chat.selected_reply() is first)
        await pilot.press("u")
        await until(pilot, lambda: first.rating is None)
        assert await ratings_of(app) == {second.reply_id: "down"}
        assert "This reply's rating taken back: 1 left" in screen_text(app)
        assert second.rating == "down" and first.effect == ""


async def test_the_newest_rating_is_undone_to_the_one_before(chatting):  # noqa: F811
    """On the reply with the newest rating it is an undo: the earlier rating of the reply counts again."""
    async with chatting() as (app, pilot):
        first, second = await rated_chat(app, pilot, "down", "up")
        await pilot.press("tab", "2")
        await until(pilot, lambda: second.rating == "2")
        await pilot.press("u")
        await until(pilot, lambda: second.rating == "up")
        assert await ratings_of(app) == {first.reply_id: "down", second.reply_id: "up"}


async def test_on_an_unrated_reply_nothing_is_taken_back(chatting):  # noqa: F811
    """A line says where the newest rating is."""
    async with chatting() as (app, pilot):
        first, second = await rated_chat(app, pilot, None, "down")
        await pilot.press("tab", "up")
        await until(pilot, lambda: app.chat.selected_reply() is first)
        await pilot.press("u")
        said = "No rating here. Ctrl+R takes back the newest: “Question 2”"
        await until(pilot, lambda: said in screen_text(app))
        assert await ratings_of(app) == {second.reply_id: "down"}
        await send(app, pilot, "/new")
        await until(pilot, lambda: app.phase == "idle" and not app.chat.transcript.replies)
        await rated_chat(app, pilot, None)
        await pilot.press("tab", "u")
        said = "No rating here. Ctrl+R takes back the newest, in another chat: “Question 2”"
        await until(pilot, lambda: said in screen_text(app))


async def test_the_keys_below_the_input_name_the_undo_only_for_a_reply_with_feedback(chatting):  # noqa: F811
    """A rating and a preference are feedback. The key itself works: it says where the newest rating is."""
    async with chatting(WIDE) as (app, pilot):
        first, second = await rated_chat(app, pilot, None, "down")
        await pilot.press("tab")
        await until(pilot, lambda: app.chat.selected_reply() is second and "u Undo" in screen_text(app))
        await pilot.press("up")
        await until(pilot, lambda: app.chat.selected_reply() is first and "u Undo" not in screen_text(app))
        await pilot.press("+")
        await until(pilot, lambda: first.rating == "up" and "u Undo" in screen_text(app))
        await pilot.press("u")
        await until(pilot, lambda: first.rating is None and "u Undo" not in screen_text(app))
        first.effect = "◆ preferred"
        app.refresh_bindings()
        await until(pilot, lambda: "u Undo" in screen_text(app))


async def test_only_the_newest_rating_names_the_key(chatting):  # noqa: F811
    """After an undo, the one before is the newest again."""
    async with chatting() as (app, pilot):
        first, second = await rated_chat(app, pilot, "down", "down")
        back = "Ctrl+R takes it back"
        assert back not in first.effect and "Learned" in first.effect and back in second.effect
        await pilot.press("ctrl+r")
        await until(pilot, lambda: second.rating is None)
        assert back in first.effect


async def test_the_key_says_what_it_took_back_in_another_chat(chatting):  # noqa: F811
    async with chatting() as (app, pilot):
        await rated_chat(app, pilot, "up")
        await send(app, pilot, "/new")
        await until(pilot, lambda: app.phase == "idle" and not app.chat.transcript.replies)
        await pilot.press("ctrl+r")
        said = "Rating taken back, in another chat: “Question 1”; 0 left, version 0."
        await until(pilot, lambda: said in screen_text(app))


async def test_a_rating_that_another_program_took_back_on_a_branch_disappears(chatting):  # noqa: F811
    """Another program can show another branch of the chat. The screen shows its own branch, with the ratings
    of the store."""
    async with chatting() as (app, pilot):
        (reply,) = await rated_chat(app, pilot, "up")

        def elsewhere(runtime):
            list(runtime.chats.again(app.chat.state.session, max_new_tokens=2, cancel=threading.Event()))
            runtime.undo()

        await app.host.call(elsewhere)
        app.actions.rate.look_again()
        await until(pilot, lambda: reply.rating is None)


def test_a_place_is_said_as_it_is(open_tiny):
    """A reply of `generate` or of the server is in no chat."""
    with open_tiny() as runtime:
        here, other = runtime.chats.new_chat(), runtime.chats.new_chat()
        writers = [
            *(
                runtime.chats.say(chat, "Hi.", max_new_tokens=2, cancel=threading.Event())
                for chat in (here, other)
            ),
            runtime.writer.generate(GenerationRequest(prompt="Hi.", max_new_tokens=2)),
        ]
        replies = [[*chunks][-1].response.request_id for chunks in writers]
        place_of = lambda reply: RatingPlace.of(runtime, here, reply).elsewhere  # noqa: E731
        assert [place_of(reply) for reply in replies] == ["", "in another chat", "outside the chats"]
        runtime.store.chats.soft_delete(other)
        assert place_of(replies[1]) == "in a deleted chat"
    said = describe.nothing_to_undo(RatingPlace("Hi.", "outside the chats"), "u")
    assert said == "No rating here. u takes back the newest, outside the chats: “Hi.”"


@pytest.mark.parametrize("elsewhere", ["", "in another chat", "outside the chats"])
def test_the_line_fits_into_80_columns(elsewhere):
    said = describe.nothing_to_undo(RatingPlace("word " * 40, elsewhere), "Ctrl+R")
    assert len(said) <= 76 and said.endswith("…”")
    assert "a deleted reply" in describe.nothing_to_undo(RatingPlace("", elsewhere), "Ctrl+R")


@pytest.mark.parametrize("undone", ["rating", "preference", "change of a rating"])
def test_an_undo_fits_into_80_columns(undone, open_tiny):
    with open_tiny() as runtime:
        status = replace(runtime.status(), undone=undone, ratings=120, adapter_version=134)
    said = describe.undone(status, RatingPlace("word " * 40, "in another chat"))
    assert len(said) <= 80 and "“word" in said and "…”; 120" in said and said.endswith("left, version 134.")

"""Best of n in the app and in plain mode."""

import io

from ruvmlx.apps.chat import stream
from ruvmlx.apps.chat.messages import ReplyMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.engine import Sampling
from ruvmlx.engine.types import Chunk

from .helpers import ask, screen_text, until
from .test_branches import chatting  # noqa: F401 - a fixture


async def test_slash_best_writes_several_replies(chatting):  # noqa: F811
    """The best is shown, the others are beside it, and the arrows switch between them."""
    async with chatting() as (app, pilot):
        app.chat.prompt.text = "/best 3"
        await pilot.press("enter")
        await until(pilot, lambda: "A question gets 3 replies" in screen_text(app))
        assert "without ratings, none is chosen" in screen_text(app)
        reply = await ask(app, pilot)
        await until(pilot, lambda: reply.branch == (3, 3))
        assert "\u2039 3/3 \u203a" in screen_text(app)


async def test_progress_of_several_replies(chatting):  # noqa: F811
    """A line counts their tokens until words come."""
    async with chatting() as (app, _):
        reply = ReplyMessage()
        await app.chat.transcript.add(reply)
        await stream._show(reply, Chunk("", 7, 9, 9, replies=4), "")
        assert reply.progress == "writing 4 replies, 7 tokens each"
        await stream._show(reply, Chunk("words", 8, 9, 9, replies=1), "words")
        assert reply.progress == "" and reply.text == "words"


async def test_each_line_about_the_reply_stays_below_it(chatting):  # noqa: F811
    """A later line took the place of an earlier one. Only a line about work in progress is replaced."""
    notes = ["Opening Large ...", "Large: it is the largest", "Room for 2 of 4 replies.", "The judge failed."]

    async def arriving():
        for note in notes:
            yield [Chunk("", note=note)]
        yield [Chunk("words", 1)]

    async with chatting() as (app, pilot):
        reply = ReplyMessage()
        await app.chat.transcript.add(reply)
        await stream.show_reply(reply, arriving(), app.chat.status)
        await until(pilot, lambda: "The judge failed." in screen_text(app))
        assert all(note in screen_text(app) for note in notes[1:])
        assert notes[0] not in screen_text(app)


def test_plain_mode_says_how_many_there_are(open_tiny):
    sink = io.StringIO()
    source = io.StringIO("/best 2\nHello\n/next\n/best 17\n/best\n")
    options = ChatOptions(sampling=Sampling(1.5), max_new_tokens=5)
    with open_tiny() as runtime:
        assert PlainChat(runtime, options, source, sink).run() == 2
    said = sink.getvalue()
    assert "A question gets 2 replies; without ratings, none is chosen, and you see the last." in said
    assert "(2 of 2 replies in this place; /next, /prev)" in said
    assert "(1 of 2 replies in this place; /next, /prev)" in said
    assert said.count("A question gets 2 replies") == 2  # 17 was refused


def test_auto_in_words(open_tiny, capsys):
    sink, source = io.StringIO(), io.StringIO("/best auto\n/best much\n")
    with open_tiny() as runtime:
        assert PlainChat(runtime, ChatOptions(), source, sink).run() == 2
    assert "A question gets one reply until you have rated one" in sink.getvalue()
    assert "expected auto, or from 1 to 16" in capsys.readouterr().err

"""One question, answered with and without what was learned: choosing one is a preference."""

import threading
import time

import pytest
from ruvmlx.apps.chat import compare
from ruvmlx.apps.chat.compare_screen import CompareScreen
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx.engine import Sampling
from ruvmlx.errors import UsageError
from ruvmlx.models.text.tool_calls import ParsedCall

from ..chats.test_chats import options, run
from ..test_runtime import say
from .helpers import ask, screen_text, until
from .helpers import chatting as scripted_chat
from .scripted import ScriptedRuntime
from .test_branches import BOTH_SIZES, chatting, run_plain, send, shown_texts  # noqa: F401


@pytest.fixture
def rated_chat(open_tiny):
    """A store with one rating in it, and the chat that it was given in."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        say(runtime, chat, "hello")
        runtime.rate("last", "down")
    return chat


def test_the_untouched_side_is_the_reply_without_an_adapter(open_tiny, rated_chat):
    """Greedy: token for token the reply of a runtime without an adapter; the other side differs."""
    with open_tiny() as runtime:
        for _ in range(20):
            say(runtime, rated_chat, "hello")
            runtime.rate("last", "down")
        chat = runtime.chats.new_chat()
        with_it, _ = run(runtime.chats.say(chat, "hello", **options(12)))
        without, _ = run(runtime.chats.again(chat, untouched=True, **options(12)))
        again, _ = run(runtime.chats.again(chat, **options(12)))
    with open_tiny(adapter=None) as runtime:
        expected = say(runtime, runtime.chats.new_chat(), "hello", n=12)
    assert without.token_ids == expected.token_ids
    assert with_it.token_ids == again.token_ids != without.token_ids


def test_each_side_is_one_reply_also_with_the_best_of_several(open_tiny, rated_chat):
    """The untouched model writes one, so "writing 4 replies" told which side used what was learned."""
    with open_tiny(best_of=4) as runtime:
        for first, learned in enumerate([True, False]):
            begin = compare.writing(rated_chat, "Why?", first == 0, learned, ChatOptions(max_new_tokens=6))
            chunks = list(begin(runtime, threading.Event()))
            assert {chunk.replies for chunk in chunks} == {1}
        assert runtime.chats.turns(rated_chat)[-1].branches == 2


@BOTH_SIZES
@pytest.mark.parametrize("side", [0, 1])
async def test_choosing_a_reply_prefers_it_to_the_other(chatting, rated_chat, monkeypatch, size, side):  # noqa: F811
    """Both replies are shown before it is told which is which; the chosen one stays."""
    monkeypatch.setattr(compare, "order", lambda: [True, False])
    async with chatting(size, session=rated_chat) as (app, pilot):
        await send(app, pilot, "/compare")
        await until(
            pilot, lambda: isinstance(app.screen, CompareScreen) and "the left is better" in screen_text(app)
        )
        assert "learned" not in screen_text(app)
        candidates = app.screen.candidates
        assert [c.learned for c in candidates] == [True, False]
        await pilot.press("right" if side else "1")
        await until(pilot, lambda: app.phase == "idle" and "Learned that you prefer" in screen_text(app))
        reply = app.chat.transcript.replies[-1]
        assert reply.message_id == candidates[side].message and reply.rating is None
        assert reply.branch[1] == 3
        await until(pilot, lambda: "◆ preferred" in screen_text(app))
        await until(pilot, lambda: compare.choice_text(candidates[side]) in screen_text(app))
        turns = await app.host.call(lambda runtime: runtime.chats.turns(rated_chat))
        assert turns[-1].id == candidates[side].message
        other = {c.message for c in candidates} - {turns[-1].id}
        messages = app.host.holder.opened_runtime.store.messages
        rows = await app.host.call(lambda runtime: {row.id: row.reply_id for row in messages.all(rated_chat)})
        (found,) = await app.host.call(lambda runtime: runtime.store.preferences.of_chat(rated_chat))
        assert found == (turns[-1].reply_id, rows[other.pop()], "compare")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Choice taken back: “" in screen_text(app))
        assert await app.host.call(lambda runtime: runtime.status().preferences) == 0


async def test_esc_chooses_neither_and_choose_does_so_later(chatting, rated_chat):  # noqa: F811
    """Esc chooses neither; /choose may do so later."""
    async with chatting(session=rated_chat) as (app, pilot):
        await send(app, pilot, "/compare Which way?")
        await until(pilot, lambda: "the left is better" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle" and len(shown_texts(app)) == 4)
        assert shown_texts(app)[2] == "Which way?" and app.chat.transcript.replies[-1].rating is None
        await send(app, pilot, "/choose 3")
        await until(pilot, lambda: "choose 1 or 2" in screen_text(app))
        await send(app, pilot, "/choose 1")
        await until(pilot, lambda: "Learned that you prefer" in screen_text(app))
        assert "‹ 1/2 ›" in screen_text(app)


async def test_choose_refuses_once_the_chat_went_on(chatting, rated_chat):  # noqa: F811
    """A message after the comparison: the two replies are no longer on the screen, so /choose judges none."""
    async with chatting(session=rated_chat, sampling=Sampling(0.0)) as (app, pilot):
        await send(app, pilot, "/compare")
        await until(
            pilot, lambda: isinstance(app.screen, CompareScreen) and "the left is better" in screen_text(app)
        )
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle" and not isinstance(app.screen, CompareScreen))
        await ask(app, pilot, "Something else")
        shown = shown_texts(app)
        await send(app, pilot, "/choose 2")
        await until(pilot, lambda: "the chat went on after the two replies" in screen_text(app))
        assert shown_texts(app) == shown
        assert app.chat.status.learned.preferences == 0


async def test_a_stopped_comparison_leaves_nothing_to_choose(chatting, rated_chat):  # noqa: F811
    """Esc while they are written: there is nothing to choose, and the chat goes on."""
    async with chatting(session=rated_chat, max_new_tokens=300, sampling=Sampling(0.0)) as (app, pilot):
        runtime = app.host.holder.opened_runtime
        say_it = runtime.chats.say

        def slowly(*args, **given):
            for chunk in say_it(*args, **given):
                time.sleep(0.05)
                yield chunk

        runtime.chats.say = slowly
        await send(app, pilot, "/compare Which way?")
        await until(pilot, lambda: isinstance(app.screen, CompareScreen) and app.chat.status.meter.tokens > 1)
        await pilot.press("escape")
        await until(pilot, lambda: "Stopped   esc Close" in screen_text(app))
        await pilot.press("1", "escape")
        await until(pilot, lambda: app.phase == "idle" and not isinstance(app.screen, CompareScreen))
        assert shown_texts(app)[2] == "Which way?"
        await send(app, pilot, "/choose 1")
        await until(pilot, lambda: "for the two replies of /compare" in screen_text(app))


async def test_without_anything_learned_there_is_nothing_to_compare(chatting):  # noqa: F811
    async with chatting(sampling=Sampling(0.0)) as (app, pilot):
        await ask(app, pilot, "Hello")
        await send(app, pilot, "/compare")
        await until(pilot, lambda: "nothing was learned yet" in screen_text(app))
        assert not isinstance(app.screen, CompareScreen)


@pytest.fixture
def equal_replies(monkeypatch):
    """Both replies of a comparison are the original model's, with one seed."""
    write = compare.writing

    def of_the_original(session, text, first, learned, options, seed=None):
        return write(session, text, first, False, options, 7)

    monkeypatch.setattr(compare, "writing", of_the_original)


async def test_between_equal_replies_there_is_no_choice(chatting, rated_chat, equal_replies):  # noqa: F811
    async with chatting(session=rated_chat) as (app, pilot):
        await send(app, pilot, "/compare")
        await until(pilot, lambda: "Both replies are the same." in screen_text(app))
        await pilot.press("1", "right")
        assert isinstance(app.screen, CompareScreen)
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle" and not isinstance(app.screen, CompareScreen))
        await send(app, pilot, "/choose 1")
        await until(pilot, lambda: "for the two replies of /compare" in screen_text(app))
        assert await app.host.call(lambda runtime: runtime.status().preferences) == 0


def test_plain_mode_offers_no_choice_between_equal_replies(open_tiny, rated_chat, equal_replies, capsys):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/compare", "/choose 2", session=rated_chat)
        assert code == 1 and "Both replies are the same." in said and "Which is better" not in said
        assert runtime.status().preferences == 0
        first, second = (row.reply_id for row in runtime.store.messages.all(rated_chat)[-2:])
        with pytest.raises(UsageError, match="have the same words"):
            runtime.choices.prefer(first, second)


def test_replies_with_other_tool_calls_are_different_replies(open_tiny):
    """The text of a reply has no tool calls, so two replies that only call tools both have the text ""."""
    bern, again, oslo = (
        compare.Candidate(n, False, "", (ParsedCall(f"call {n}", "weather", f'{{"city": "{city}"}}'),))
        for n, city in enumerate(("Bern", "Bern", "Oslo"))
    )
    assert bern.is_like(again) and not bern.is_like(oslo)
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        ids = [
            say(runtime, chat, "hello").request_id,
            run(runtime.chats.again(chat, **options(12)))[0].request_id,
        ]
        assert runtime.store.replies.get(ids[0]).sampled_ids != runtime.store.replies.get(ids[1]).sampled_ids
        with runtime.store.transaction():
            runtime.store.db.execute("UPDATE replies SET text = ''")
        assert runtime.choices.prefer(*ids).adapter_version == 1


def test_a_choice_that_was_taken_back_is_not_learned_again(open_tiny, rated_chat):
    """The next message continues the chat from the chosen reply. It teaches no preference for this reply."""
    with open_tiny() as runtime:
        run_plain(runtime, "/compare", "/choose 1", "/undo", "Go on", session=rated_chat)
        assert runtime.status().preferences == 0


def test_plain_mode_compares_and_chooses(open_tiny, rated_chat, capsys):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/compare", "/choose 2", session=rated_chat)
        assert code == 0, capsys.readouterr().err
        lines = said.splitlines()
        assert lines[0] == "Reply 1." and "Reply 2." in lines and "Which is better?" in said
        assert "Learned that you prefer the " in said and "/undo takes it back" in said
        assert runtime.chats.turns(rated_chat)[-1].branch == 3 and runtime.status().preferences == 1
        code, said = run_plain(runtime, "/compare", "/choose 1")
        assert code == 1 and said == "" and capsys.readouterr().err.count("ruvmlx: ") == 2


def test_plain_mode_refuses_a_choice_once_the_chat_went_on(open_tiny, rated_chat, capsys):
    with open_tiny() as runtime:
        code, _ = run_plain(runtime, "/compare", "Something else", "/choose 2", session=rated_chat)
        assert code == 1 and "the chat went on after the two replies" in capsys.readouterr().err
        assert runtime.status().preferences == 0
        assert runtime.chats.turns(rated_chat)[-2].content == "Something else"


def test_plain_mode_shows_the_reply_before_until_one_is_chosen(open_tiny, rated_chat):
    """As in the app: /rate acts on that reply, and on the chosen one after /choose."""
    with open_tiny() as runtime:
        before = runtime.chats.turns(rated_chat)[-1].id
        _, said = run_plain(runtime, "/compare", "/rate 1", session=rated_chat)
        assert "Without a choice, the chat and /rate go on with the reply before these two." in said
        shown = runtime.chats.turns(rated_chat)[-1]
        assert (shown.id, shown.rating) == (before, "1")
        run_plain(runtime, "/compare", "/choose 1", "/rate 4", session=rated_chat)
        shown = runtime.chats.turns(rated_chat)[-1]
        assert (shown.branch, shown.rating) == (4, "4")
        _, said = run_plain(runtime, "/compare And now?", session=rated_chat)
        assert said.endswith("/choose 2.\n") and runtime.chats.turns(rated_chat)[-1].branch == 2


def test_the_order_of_the_two_replies_is_random():
    """A user cannot learn which side is which."""
    assert {tuple(compare.order()) for _ in range(60)} == {(True, False), (False, True)}


@BOTH_SIZES
async def test_the_effect_is_shown_side_by_side_with_names(chatting, rated_chat, size):  # noqa: F811
    """Ctrl+T: left without, right with what was learned, and both lengths; no choice, and no preference."""
    async with chatting(size, session=rated_chat) as (app, pilot):
        await until(pilot, lambda: app.chat.transcript.replies)
        await pilot.press("ctrl+t")
        await until(
            pilot,
            lambda: (
                isinstance(app.screen, CompareScreen)
                and ("with what was learned." in screen_text(app) or "are the same" in screen_text(app))
            ),
        )
        line = next(line for line in screen_text(app).splitlines() if "without what was" in line)
        assert line.index("without what was") < line.rindex("with what was")
        assert [c.learned for c in app.screen.candidates] == [False, True]
        await pilot.press("1", "right")
        assert isinstance(app.screen, CompareScreen)
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle" and not isinstance(app.screen, CompareScreen))
        assert await app.host.call(lambda runtime: runtime.status().preferences) == 0
        await until(pilot, lambda: "‹ 1/3 ›" in screen_text(app))  # the reply that was shown before
        await send(app, pilot, "/choose 1")
        await until(pilot, lambda: "for the two replies of /compare" in screen_text(app))


def test_plain_mode_names_both_sides(open_tiny, rated_chat):
    with open_tiny() as runtime:
        code, said = run_plain(runtime, "/open 1", "/effect")
    assert code == 0
    first, second = said.index("Without what was learned:"), said.index("With what was learned:")
    assert first < second
    assert "with what was learned." in said[second:] or "are the same" in said[second:]


def test_both_sides_of_an_effect_have_one_seed(open_tiny, rated_chat):
    """At a high temperature, the sides differ by what was learned alone: without a lesson they are equal."""
    with open_tiny() as runtime:
        runtime.rollback(0)
        texts = []
        for first in (True, False):
            begin = compare.writing(
                rated_chat, "", first, True, ChatOptions(sampling=Sampling(1.5), max_new_tokens=12), 7
            )
            list(begin(runtime, threading.Event()))
            texts.append(runtime.chats.turns(rated_chat)[-1].content)
        assert texts[0] == texts[1]


@pytest.mark.parametrize("sides", [[False, True], [True, False]])
@pytest.mark.parametrize("rated_before", [True, False])
def test_going_on_from_the_reply_before_a_comparison_teaches_nothing(open_tiny, sides, rated_before):
    """The two replies were written to be looked at, and the first one was not left for them."""
    with open_tiny() as runtime:
        chat = runtime.chats.new_chat()
        if rated_before:
            say(runtime, chat, "hi")
            runtime.rate("last", "down")
        say(runtime, chat, "hello")
        shown = compare.shown_reply_id(runtime, chat, "")
        if not rated_before:
            runtime.rate("last", "down")
        for learned in sides:
            begin = compare.writing(
                chat, "", False, learned, ChatOptions(sampling=Sampling(1.5), max_new_tokens=8)
            )
            list(begin(runtime, threading.Event()))
        compare.show_again(runtime, chat, shown)
        assert runtime.chats.turns(chat)[-1].id == shown
        say(runtime, chat, "go on")
        assert runtime.status().preferences == 0 and runtime.choices.take_continuation(chat) is None


async def test_the_key_of_effect_waits_for_the_end_of_a_reply():
    """One line says why the key does nothing."""
    async with scripted_chat(ScriptedRuntime(["One ", "two."], gate=True, free=1)) as (app, pilot):
        app.chat.prompt.text = "Hello"
        await pilot.press("enter")
        await until(pilot, lambda: "One" in screen_text(app))
        await pilot.press("ctrl+t")
        await until(pilot, lambda: "Still replying: Esc stops" in screen_text(app), seconds=5)

"""The chat app, driven through Textual's pilot with a scripted runtime."""

import random
import threading
from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat import stream
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.messages import Notice, UserMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.welcome import Welcome
from textual.events import Paste
from textual.filter import Monochrome

from ruvmlx.engine.types import Chunk

from .helpers import SMALL, WIDE, ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime

BOTH_SIZES = pytest.mark.parametrize("size", [SMALL, WIDE], ids=["80x24", "160x50"])


@BOTH_SIZES
async def test_a_reply_is_shown_word_by_word_while_it_is_written(size):
    """Words appear while more are to come; the finished reply is what was committed."""
    runtime = ScriptedRuntime(["The capital ", "is **Par", "is**."], gate=True)
    async with chatting(runtime, size) as (app, pilot):
        await pilot.press(*"Capital", "space", *"of", "space", *"France", "question_mark", "enter")
        await until(pilot, lambda: "The capital" in screen_text(app))
        assert app.phase == "replying"
        assert "Capital of France?" in screen_text(app)
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")
        assert app.chat.transcript.replies[-1].text == "The capital is **Paris**."
        assert "The capital is Paris." in screen_text(app)
        await until(pilot, lambda: runtime.settled == 1)
    assert runtime.said == ["Capital of France?"]


@BOTH_SIZES
async def test_after_a_reply_the_status_line_shows_speed_context_and_adapter(size):
    """After a reply: speed, time to the first token, context, ratings."""
    async with chatting(ScriptedRuntime(["Hi."]), size) as (app, pilot):
        await ask(app, pilot)
        status = lines_of(app.screen)[-2]
        for part in ("42 tokens/s", "first word 0.2 s", "33 of 8,192 tokens", "0 ratings"):
            assert part in status
        assert "SmolLM2-135M-Instruct" in screen_text(app)
        assert ("mlx, metal" in status) == (size == WIDE)


async def test_escape_stops_and_keeps_the_text():
    """Esc ends the reply at once; its words stay, and the next message works."""
    runtime = ScriptedRuntime([f"word{n} " for n in range(50)], ["Next."], gate=True, free=3)
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Tell me"
        await pilot.press("enter")
        await until(pilot, lambda: "word2" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle")
        reply = app.chat.transcript.replies[-1]
        assert reply.text == "word0 word1 word2 "
        assert "stopped" in screen_text(app)
        assert (await ask(app, pilot, "Go on")).text == "Next."


async def test_escape_at_random_tokens_always_ends_idle():
    """Whenever Esc comes, also before the first word, the app is idle again and shows what was committed."""
    rng = random.Random(7)
    runtime = ScriptedRuntime(*[[f"w{n} " for n in range(12)] for _ in range(12)], gate=True, free=0)
    async with chatting(runtime) as (app, pilot):
        for turn in range(12):
            app.chat.prompt.text = "Go"
            await pilot.press("enter")
            await until(pilot, lambda: app.phase == "replying")
            for _ in range(rng.randrange(6)):
                runtime.released.release()
                if rng.random() < 0.5:
                    await pilot.pause()
            await pilot.press("escape")
            await until(pilot, lambda: app.phase == "idle")
            while runtime.released.acquire(blocking=False):
                pass
            assert len(app.chat.transcript.replies) == turn + 1
            assert (
                app.chat.transcript.replies[-1].text
                == runtime.chats.turns(app.chat.state.session)[-1].content
            )


@BOTH_SIZES
async def test_continue_shows_the_earlier_turns(size):
    """-c brings back what was said, with ratings, and new messages go to the same session."""
    runtime = ScriptedRuntime(["It is *me*."], ["Again."])
    async with chatting(runtime, size) as (app, pilot):
        await ask(app, pilot, "Who is there?")
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.transcript.replies[-1].effect)
        session = app.chat.state.session
    runtime.closed = False
    async with chatting(runtime, size, session="continue") as (app, pilot):
        await until(pilot, lambda: "It is me." in screen_text(app))
        assert app.chat.state.session == session
        assert "Who is there?" in screen_text(app)
        assert "▲ good" in screen_text(app)
        await ask(app, pilot, "And now?")
    assert [turn.content for turn in runtime.spoken[session]] == [
        "Who is there?",
        "It is *me*.",
        "And now?",
        "Again.",
    ]


async def test_an_opened_chat_shows_reasons_and_preferences():
    """The line below a reply names the reason or the preference. It does not name what the model learned."""
    runtime = ScriptedRuntime(["One."], ["Two."], ["Three."])
    async with chatting(runtime) as (app, pilot):
        for question in ("First?", "Second?", "Third?"):
            await ask(app, pilot, question)
        session, replies = app.chat.state.session, app.chat.transcript.replies
        first, second, third = (reply.reply_id for reply in replies)
    runtime.rated_elsewhere(first, "down")
    runtime.rated_elsewhere(third, "2")
    runtime.reasons += [(first, "long", 1), (third, "tone", 2)]
    runtime.preferences += [(second, "other", "compare"), (third, "another", "edit")]
    runtime.closed = False
    async with chatting(runtime, (100, 40), session=session) as (app, pilot):
        for words in ("★★☆☆☆, wrong tone · ◆ your version", "◆ preferred", "▼ bad, too long"):
            await until(pilot, lambda words=words: words in screen_text(app))
        runtime.reasons.clear()  # another process takes the reasons back
        runtime.preferences.clear()
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "wrong tone" not in screen_text(app))
        assert "▼ bad" in screen_text(app) and "too long" not in screen_text(app)


async def test_continue_without_an_earlier_chat_begins_a_new_one():
    """No error: there is just nothing to show yet."""
    async with chatting(ScriptedRuntime(), session="continue") as (app, _):
        assert app.query_one(Welcome)


async def test_progress_of_the_prompt_disappears_at_the_first_token():
    """A token without text yet (a part of an emoji) does not bring "reading ..." back below the reply."""
    runtime = ScriptedRuntime(["", "中", "", ""], gate=True, free=0)
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "reading 32 of 32 tokens" in screen_text(app))
        runtime.released.release()
        await until(pilot, lambda: "reading" not in screen_text(app))
        for _ in range(2):
            runtime.released.release()
        await until(pilot, lambda: "中" in screen_text(app) and app.chat.status.meter.tokens == 3)
        assert "reading" not in screen_text(app)
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")


async def test_the_progress_of_a_long_prompt_has_readable_numbers():
    reply = SimpleNamespace(text="", progress="")
    await stream._show(reply, Chunk("", prefilled=1235, prompt_tokens=1719), "")
    assert reply.progress == "reading 1,235 of 1,719 tokens"


HOSTILE = [
    "\x1b]52;c;cm0gLXJm\x07clip",
    "\x1b[2Jwiped",
    "\x9b31mred",
    "bell\x07 back\x08 null\x00",
    "if (admin\u202e) {\u2066 x \u2069}",
    "**bold\x1b[0m** `code\x1b]0;t\x07`",
    "[link\x1b[8m](http://x\x1b[2J)",
    "[/red][@click=app.quit]markup[/]",
    "&#x202e;entity &#27;[2J",
    "lone \ud83d surrogate",
]


async def test_hostile_output_never_reaches_widgets():
    """Escapes, C1, direction overrides and console markup of a model end as plain words on the screen."""
    runtime = ScriptedRuntime(*[list(text) for text in HOSTILE])
    runtime.model.name = "evil\x1b[2J\u202emodel"
    async with chatting(runtime, WIDE) as (app, pilot):
        for text in HOSTILE:
            await ask(app, pilot, f"say {text}")
            shown = screen_text(app)
            bad = [c for c in shown if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0]
            assert not bad
            assert not set(shown) & set("\u202e\u2066\u2069\ud83d")
        assert "markup[/]" in screen_text(app)
        assert app.is_running


@pytest.mark.parametrize("key", ["pageup", "shift+pageup"])
async def test_the_scroll_position_stays_while_a_reply_grows(key):
    """Only the reader moves the scroll position. At the end, the chat follows the reply again. The Terminal
    of macOS sends Page Up only with Shift."""
    runtime = ScriptedRuntime(["line\n\n"] * 60, gate=True, free=40)
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        transcript = app.chat.transcript
        await until(
            pilot, lambda: transcript.max_scroll_y > 30 and transcript.scroll_y == transcript.max_scroll_y
        )
        await pilot.press(key)
        await until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        place, height = transcript.scroll_y, transcript.max_scroll_y
        for _ in range(10):
            runtime.released.release()
        await until(pilot, lambda: transcript.max_scroll_y > height + 10)
        assert transcript.scroll_y == place
        await pilot.press("ctrl+end")
        for _ in range(10):
            runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")
        await until(pilot, lambda: transcript.scroll_y == transcript.max_scroll_y)


async def test_line_breaks_and_pastes_stay_in_the_input():
    """Ctrl+J and Shift+Enter break the line; a paste keeps its newlines, is made safe and is not sent."""
    runtime = ScriptedRuntime(["ok"])
    async with chatting(runtime) as (app, pilot):
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert app.chat.prompt.text == "a\nb\nc"
        app.post_message(Paste("\r\nd\x1b[31me\nf"))
        await until(pilot, lambda: app.chat.prompt.text == "a\nb\nc\nde\nf")
        assert runtime.said == []
        await pilot.press("enter")
        await until(pilot, lambda: runtime.said == ["a\nb\nc\nde\nf"])


@pytest.mark.parametrize(("size", "rows"), [((40, 12), 4), ((80, 24), 8), ((40, 9), 3)])
async def test_a_long_input_takes_a_third_of_the_screen_at_most(size, rows):
    """A pasted text takes a third of the screen at most; the conversation and the keys stay in sight."""
    async with chatting(ScriptedRuntime(["It is Paris."]), size) as (app, pilot):
        await ask(app, pilot)
        app.post_message(Paste("\n".join(f"line {n}" for n in range(100))))
        await until(pilot, lambda: "line 99" in screen_text(app))
        await until(pilot, lambda: app.chat.prompt.outer_size.height == rows)
        assert "It is Paris." in screen_text(app)
        assert "Send" in lines_of(app.screen)[-1]


async def test_system_status_help_and_new_do_what_they_say():
    """/system, /status, /help, /new and a wrong one do what they say."""
    runtime = ScriptedRuntime(["ok"])
    async with chatting(runtime, WIDE) as (app, pilot):

        async def send(text, answer):
            app.chat.prompt.text = text
            await pilot.press("enter")
            await until(pilot, lambda: answer in screen_text(app))

        await ask(app, pilot)
        await send("/system Be brief.", "System prompt: Be brief.")
        assert runtime.chats.turns(app.chat.state.session)[0].content == "Be brief."
        await send("/status", "8,192 tokens")
        await send("/help", "rate the reply; short:")
        await send("/nope", "no command /nope")
        first = app.chat.state.session
        app.chat.prompt.text = "/new"
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.state.session != first and not app.query(UserMessage))
        assert not runtime.chats.turns(app.chat.state.session)  # a new chat has the user's own setting: none
        assert not app.query(Notice)


async def test_quitting_during_a_reply_keeps_it_and_exits_with_0():
    """Ctrl+Q stops the reply, commits what there is, closes the runtime in its thread, leaves with 0."""
    runtime = ScriptedRuntime(["one ", "two ", "three "], gate=True, free=1)
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "one" in screen_text(app))
        await pilot.press("ctrl+q")
        await until(pilot, lambda: runtime.closed)
    assert app.return_value == 0
    assert runtime.spoken["s1"][-1].finish_reason == "cancelled"
    assert len(runtime.threads) == 1
    assert threading.get_ident() not in runtime.threads


async def test_control_c_stops_a_reply_and_pressed_twice_quits():
    """Once stops a reply, or asks; twice leaves."""
    runtime = ScriptedRuntime(["one ", "two "], gate=True, free=1)
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: app.phase == "replying" and "one" in screen_text(app))
        await pilot.press("ctrl+c")
        await until(pilot, lambda: app.phase == "idle")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: "Press again to quit" in screen_text(app))
        assert not runtime.closed
        await pilot.press("ctrl+c")
        await until(pilot, lambda: runtime.closed)


async def test_quitting_while_the_model_opens_closes_the_late_runtime():
    """The runtime that arrives late is closed as well."""
    runtime, arrive = ScriptedRuntime(), threading.Event()

    def open_slowly():
        arrive.wait(10)
        return runtime

    app = ChatApp(open_slowly)
    async with app.run_test() as pilot:
        await until(pilot, lambda: "Opening the model" in screen_text(app))
        app.chat.prompt.text = "early"
        await pilot.press("enter")
        assert app.chat.prompt.text == "early"
        await pilot.press("ctrl+q")
        arrive.set()
        await until(pilot, lambda: runtime.closed)
    assert app.return_value == 0


async def test_a_message_sent_while_the_model_opens_goes_out_afterwards():
    """It stays in the input, and goes out when the model is there."""
    runtime, arrive = ScriptedRuntime(["Hi."]), threading.Event()
    app = ChatApp(lambda: arrive.wait(10) and runtime)
    async with app.run_test() as pilot:
        await pilot.press("a", "b", "enter")
        assert app.chat.prompt.text == "ab"
        arrive.set()
        await until(pilot, lambda: app.chat.transcript.replies and app.phase == "idle")
        assert runtime.said == ["ab"]
        assert app.chat.prompt.text == ""
        app.host.close_now()


async def test_keys_are_offered_only_when_they_do_something():
    """Rating keys are shown once there is a reply, Stop while one runs, undo once there is a rating."""
    runtime = ScriptedRuntime(["one ", "two "], gate=True, free=1)
    async with chatting(runtime) as (app, pilot):

        def hints():
            return lines_of(app.screen)[-1]

        assert "Send" in hints()
        assert "Good" not in hints()
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "Stop" in hints())
        runtime.released.release()
        await until(pilot, lambda: "^y Good" in hints() and "Stop" not in hints())
        assert "Take back" not in hints()
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "Take back" in hints())
        assert "^q Quit" in hints()


@pytest.mark.parametrize("theme", ["ruvmlx-dark", "ruvmlx-light", "nord"])
async def test_every_theme_draws_a_whole_conversation(theme, monkeypatch):
    """Each theme draws a whole conversation."""
    monkeypatch.setenv("TEXTUAL_THEME", theme)
    async with chatting(ScriptedRuntime(["```py\nx\n```\n\n# a\n\n- b"])) as (app, pilot):
        await ask(app, pilot)
        assert app.theme == theme
        assert "• b" in screen_text(app)


async def test_no_color_leaves_only_grey(monkeypatch):
    """NO_COLOR leaves no colour: every pixel is grey."""
    monkeypatch.setenv("NO_COLOR", "1")
    app = ChatApp(lambda: ScriptedRuntime(["Hi `x`."]), ChatOptions())
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.phase == "idle")
        await ask(app, pilot)
        assert any(isinstance(f, Monochrome) for f in app._filters)
        app.host.close_now()


async def test_a_gpu_that_is_not_used_is_reported_once():
    """One notice under the welcome when the chat opens; another chat does not repeat it."""
    runtime = ScriptedRuntime(["ok"])
    runtime.backend.caveat = "Our GPU kernels are not used on this machine (append: gives NaN)."
    async with chatting(runtime) as (app, pilot):
        await until(pilot, lambda: "append: gives NaN" in screen_text(app))
        assert len(app.query(Notice)) == 1 and "more like this" in screen_text(app)
        await ask(app, pilot)
        assert len(app.query(Notice)) == 1
        first = app.chat.state.session
        app.chat.prompt.text = "/new"
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.state.session != first and not app.query(UserMessage))
        assert not app.query(Notice)

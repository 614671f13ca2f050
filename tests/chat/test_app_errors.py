"""Errors in the chat app: each is one line, and no word that was typed or written is lost."""

import threading

import pytest
from ruvmlx.apps.chat.app import ChatApp, run_app
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx.errors import CorruptFile, ModelNotFound, UsageError

from .helpers import WIDE, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


async def test_an_error_before_a_reply_is_one_line_and_puts_the_message_back():
    """The error stands in the chat, the message is back in the input, and the app goes on."""
    runtime = ScriptedRuntime(UsageError("the prompt has 9,000 tokens; the context holds 8,192"), ["Fine."])
    async with chatting(runtime, WIDE) as (app, pilot):
        app.chat.prompt.text = "a long text"
        await pilot.press("enter")
        await until(pilot, lambda: "9,000 tokens" in screen_text(app) and app.phase == "idle")
        assert app.chat.prompt.text == "a long text"
        assert not app.query(UserMessage)
        assert "Traceback" not in screen_text(app)
        app.chat.prompt.text = ""
        assert (await ask(app, pilot)).text == "Fine."


async def test_a_refused_message_is_put_back_before_text_typed_meanwhile():
    """Also a message with a slash in front comes back as it was typed; nothing is overwritten."""
    runtime = ScriptedRuntime()
    say, go_on = runtime.chats.say, threading.Event()

    def refuse(*args, **options):
        go_on.wait(10)
        raise UsageError("temperature is -1; it must be 0 or more")
        yield from say(*args, **options)

    runtime.chats.say = refuse
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "//etc?"
        await pilot.press("enter")
        await until(pilot, lambda: app.phase == "replying" and app.query(UserMessage))
        await pilot.press("n", "e", "x", "t")
        go_on.set()
        await until(pilot, lambda: "temperature is -1" in screen_text(app) and app.phase == "idle")
        assert app.chat.prompt.text == "//etc?\n\nnext"
        assert not app.query(UserMessage)


async def test_an_error_after_the_message_was_saved_leaves_it_in_the_chat():
    """It is part of the chat then: it stays in sight, and can be sent again."""
    async with chatting(ScriptedRuntime([UsageError("too hot")])) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "too hot" in screen_text(app) and app.phase == "idle")
        assert len(app.query(UserMessage)) == 1
        assert app.chat.prompt.text == "Go"


async def test_an_error_during_a_reply_keeps_its_words():
    """What came before the error stays readable."""
    async with chatting(ScriptedRuntime(["Half ", "a ", ValueError("boom\nline two")])) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "boom line two" in screen_text(app) and app.phase == "idle")
        assert "Half a" in screen_text(app)
        assert "unexpected ValueError" in screen_text(app)


@pytest.mark.parametrize("error", [ModelNotFound("no model 'x'"), CorruptFile("cut short"), OSError("disk")])
async def test_an_error_while_opening_ends_the_app_with_its_exit_code(error):
    """The app leaves with the error's exit code; `run_app` prints its line."""

    def fail():
        raise error

    app = ChatApp(fail)
    async with app.run_test() as pilot:
        await until(pilot, lambda: app.failure is not None)
    assert app.failure is error
    assert app.return_value == getattr(error, "exit_code", 1)


def test_an_unexpected_exception_in_the_app_is_one_line(monkeypatch, capsys):
    """Where Textual would print a traceback with every local, the user gets a line and exit code 1."""
    runtime, run = ScriptedRuntime(), ChatApp.run

    async def press_help(pilot):
        await pilot.press("f1")

    monkeypatch.setattr(ChatApp, "action_help", lambda self: 1 // 0)
    monkeypatch.setattr(ChatApp, "run", lambda self: run(self, headless=True, auto_pilot=press_help))
    assert run_app(lambda: runtime, ChatOptions()) == 1
    assert (
        capsys.readouterr().err
        == "ruvmlx: unexpected ZeroDivisionError: integer division or modulo by zero\n"
    )
    assert runtime.closed

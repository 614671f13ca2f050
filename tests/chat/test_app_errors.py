"""Errors in the chat app: each is one line, and no word that was typed or written is lost."""

import threading
from contextlib import closing

import pytest
from ruvmlx.apps.chat.app import ChatApp, run_app
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.commands import COMMANDS
from ruvmlx.apps.chat.errors import IN_CHAT, chat_error_line
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.options import ChatOptions

from ruvmlx.errors import CorruptFile, ModelNotFound, StoreBusy, UsageError
from ruvmlx.store import Store

from .helpers import WIDE, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime
from .test_branches import chatting as with_store  # noqa: F401
from .test_branches import run_plain, send


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


async def test_an_error_names_the_command_of_the_chat_and_not_of_the_shell(with_store):  # noqa: F811
    async with with_store(WIDE) as (app, pilot):
        await send(app, pilot, "/open zzz")
        await until(pilot, lambda: "no chat 'zzz'; /chats lists the chats." in screen_text(app))


def test_plain_mode_names_its_commands_too(open_tiny, capsys):
    with open_tiny() as runtime:
        run_plain(runtime, "/open zzz", session="new")
    assert "no chat 'zzz'; /chats lists the chats." in capsys.readouterr().err


@pytest.mark.parametrize(("shell", "here"), IN_CHAT.items())
def test_the_line_of_an_error_keeps_the_arguments_and_the_other_commands(shell, here):
    error = UsageError(f"`ruvmlx {shell}` or `ruvmlx {shell} 2` goes back; `ruvmlx doctor` checks it.")
    assert chat_error_line(error) == f"{here} or {here} 2 goes back; `ruvmlx doctor` checks it."
    assert here.removeprefix("/") in COMMANDS


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


@pytest.mark.parametrize(
    ("keys", "expected"),
    [("next", "Hi next"), ("?", "Hi?"), (["space", "n"], "Hi n"), (["backspace", "a", "t"], "Hat")],
)
async def test_a_word_after_a_message_that_came_back_is_a_new_word(keys, expected):
    """As if the user had typed it before the message came back; other changes stay as they are typed."""
    async with chatting(ScriptedRuntime([UsageError("too hot")])) as (app, pilot):
        app.chat.prompt.text = "Hi"
        await pilot.press("enter")
        await until(pilot, lambda: "too hot" in screen_text(app) and app.phase == "idle")
        await pilot.press(*keys)
        assert app.chat.prompt.text == expected
        await pilot.press("enter")
        await until(pilot, lambda: [m.text for m in app.query(UserMessage)] == ["Hi", expected])


async def test_the_second_message_of_one_burst_of_keys_comes_back():
    """The app handles "hi", Enter, "ok", Enter before the first reply begins."""
    async with chatting(ScriptedRuntime(["A."], ["B."])) as (app, pilot):
        for text in ("hi", "ok"):
            app.chat.prompt.text = text
            app.chat.prompt.action_submit()
        await until(pilot, lambda: app.chat.transcript.replies and app.phase == "idle")
        assert [m.text for m in app.query(UserMessage)] == ["hi"] and app.chat.prompt.text == "ok"
        await pilot.press("enter")
        await until(pilot, lambda: len(app.chat.transcript.replies) == 2 and app.phase == "idle")
        assert [m.text for m in app.query(UserMessage)] == ["hi", "ok"]


async def test_the_next_letter_replaces_a_refused_command():
    """The next command is not joined to it. The history keeps the refused command."""
    async with chatting(ScriptedRuntime(), WIDE) as (app, pilot):
        await pilot.press(*"/nope", "enter")
        await until(pilot, lambda: "no command /nope" in screen_text(app))
        assert app.chat.prompt.text == "/nope"
        await pilot.press(*"/help", "enter")
        await until(pilot, lambda: "rate the reply; short:" in screen_text(app))
        assert not app.query(UserMessage) and app.chat.prompt.text == ""
        await pilot.press("up", "up")
        assert app.chat.prompt.text == "/nope"


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

    monkeypatch.setattr(ChatApp, "action_help", lambda self: {}["the help"])
    monkeypatch.setattr(ChatApp, "run", lambda self: run(self, headless=True, auto_pilot=press_help))
    assert run_app(lambda: runtime, ChatOptions()) == 1
    assert capsys.readouterr().err == "ruvmlx: unexpected KeyError: 'the help'\n"
    assert runtime.closed


@pytest.fixture
def erase(home):
    """Erase a chat, as another process does."""

    def erase_chat(session):
        with closing(Store(home / "ruvmlx.db")) as store:
            store.chats.delete(session)

    return erase_chat


async def test_a_chat_that_is_erased_while_the_list_shows_it(with_store, erase):  # noqa: F811
    """Enter ended the app. The open chat stays open, with what was typed."""
    async with with_store(WIDE) as (app, pilot):
        await ask(app, pilot)
        first = app.chat.state.session
        app.chat.prompt.text = "/new"
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.state.session != first and app.phase == "idle")
        await ask(app, pilot, "Another")
        session, app.chat.prompt.text = app.chat.state.session, "a draft"
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(app.screen, ChatsScreen) and len(app.screen._entries) == 2)
        erase(first)
        await pilot.press("down", "enter")
        await until(pilot, lambda: "no chat" in screen_text(app) and app.phase == "idle")
        assert app.chat.state.session == session and app.chat.prompt.text == "a draft"
        assert (await ask(app, pilot, "And now?")).text


async def test_a_message_to_an_erased_chat_comes_back(with_store, erase):  # noqa: F811
    """The app could not show the erased chat again, and the message was gone."""
    async with with_store(WIDE) as (app, pilot):
        await ask(app, pilot)
        erase(app.chat.state.session)
        app.chat.prompt.text = "a long text"
        await pilot.press("enter")
        await until(pilot, lambda: app.query(".error") and app.phase == "idle", seconds=20)
        assert app.chat.prompt.text == "a long text" and len(app.query(UserMessage)) == 1


async def test_a_refused_message_to_a_tool_comes_back_with_the_command(monkeypatch):
    runtime = ScriptedRuntime()

    def refuse(*_, **__):
        raise UsageError("temperature is -1; it must be 0 or more")

    runtime.chats.say = refuse
    async with chatting(runtime) as (app, pilot):
        monkeypatch.setattr(app.chat.state.tools, "offer", lambda function: None)
        app.chat.prompt.text = "/tool forecast In Rome?"
        await pilot.press("enter")
        await until(pilot, lambda: "temperature is -1" in screen_text(app) and app.phase == "idle")
        assert app.chat.prompt.text == "/tool forecast In Rome?"


async def test_a_message_that_a_busy_store_refuses_comes_back(monkeypatch):
    """The app cannot read the messages of the chat either."""
    runtime = ScriptedRuntime(["A."], StoreBusy("locked by a test"))
    async with chatting(runtime, WIDE) as (app, pilot):
        await ask(app, pilot)
        turns = runtime.turns

        def raise_busy(*arguments):
            if not runtime.replies:
                raise StoreBusy("locked by a test")
            return turns(*arguments)

        monkeypatch.setattr(runtime, "turns", raise_busy)
        app.chat.prompt.text = "a long text"
        await pilot.press("enter")
        await until(pilot, lambda: app.query(".error") and app.phase == "idle")
        assert app.chat.prompt.text == "a long text" and "locked by a test" in screen_text(app)


async def test_a_refused_continuation_keeps_the_mark_and_the_rating_of_the_reply(
    with_store,  # noqa: F811
    monkeypatch,
):
    async with with_store(WIDE) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: reply.effect)
        text, ending, effect = reply.text, reply.ending, reply.effect

        def raise_busy(*_, **__):
            raise StoreBusy("locked by a test")

        monkeypatch.setattr(app.host.holder.opened_runtime.chats, "continue_reply", raise_busy)
        await pilot.press("tab", "m")
        await until(pilot, lambda: app.query(".error") and app.phase == "idle")
        assert (reply.text, reply.ending, reply.rating, reply.effect) == (text, ending, "up", effect)
        assert reply.finished and reply.is_cut and not reply.progress


async def test_an_unexpected_error_in_the_background_keeps_a_running_reply():
    """It is one line; neither the reply that is written meanwhile nor the typed words go."""

    async def fail():
        raise ValueError("boom")

    runtime = ScriptedRuntime(["Half ", "a ", "loaf."], gate=True)
    async with chatting(runtime, WIDE) as (app, pilot):
        app.chat.prompt.text = "Go"
        await pilot.press("enter")
        await until(pilot, lambda: "Half a" in screen_text(app))
        app.chat.prompt.text = "a draft"
        app.chat.start(fail)
        await until(pilot, lambda: "unexpected ValueError: boom" in screen_text(app))
        assert app.phase == "replying" and app.chat.prompt.text == "a draft"
        runtime.released.release()
        await until(pilot, lambda: app.phase == "idle")
        assert app.chat.transcript.replies[-1].text == "Half a loaf."

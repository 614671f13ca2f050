"""Tools in the chat, plain and in the app: a real small server, calls that the user allows or not."""

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.messages import Notice, ReplyMessage, ToolMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.tool_screen import ToolScreen
from ruvmlx.apps.chat.tools import chat_tools, connections
from ruvmlx.apps.chat.tools.described import TEACHES_NOTHING, call_lines, short_lines

from ruvmlx.backends.select import open_backend
from ruvmlx.engine import Sampling
from ruvmlx.models.load import load_model
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from ..models.make_models import make_safetensors_model
from .helpers import SMALL, screen_text, until
from .terminal import Terminal
from .test_tool_servers import SERVER, write_servers

pytest.importorskip("mcp.server.mcpserver", reason="the extra `mcp` is not installed")
OPTIONS = ChatOptions(sampling=Sampling(1.5), max_new_tokens=60, learn_when_idle=False)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """The tiny model takes each byte for a token, so it needs a longer context for tools."""
    model = load_model(
        str(make_safetensors_model(tmp_path_factory.mktemp("roomy") / "tiny", max_context=4096))
    )
    return model, open_backend("native", model)


@pytest.fixture
def open_roomy(roomy, home):
    def open_it() -> Runtime:
        return Runtime(Store(home / "ruvmlx.db"), *roomy, Settings(adapter="none", kv_disk=None), False)

    return open_it


@pytest.fixture
def small_tools(home):
    write_servers(
        home, small={"command": sys.executable, "args": [SERVER, "secrets", "slow", "fail"], "timeout": 20}
    )


def run_plain(runtime, *lines):
    """What a plain chat prints, and its exit code."""
    sink = io.StringIO()
    code = PlainChat(runtime, OPTIONS, io.StringIO("\n".join(lines) + "\n"), sink).run()
    return sink.getvalue(), code


def roles(runtime):
    return [turn.role for turn in runtime.chats.turns(runtime.chats.last_chat())]


# Plain


def test_a_call_is_shown_asked_run_and_answered(open_roomy, small_tools, capsys):
    with open_roomy() as runtime:
        said, code = run_plain(runtime, "/tools on small", "/tool secrets Which?", "o")
        assert code == 0 and capsys.readouterr().err == ""
        assert "small is on for this chat: fail, slow, secrets." in said
        assert said.index("Tool: secrets\n") < said.index("PATH") < said.index("Assistant: ")
        assert roles(runtime) == ["user", "assistant", "tool", "assistant"]


def test_no_means_no(open_roomy, small_tools):
    with open_roomy() as runtime:
        said, _ = run_plain(runtime, "/tools on small", "/tool secrets Which?", "n")
        assert "(The user did not allow this call.)" in said and "PATH" not in said
        assert roles(runtime) == ["user", "assistant", "tool", "assistant"]


def test_the_end_of_input_allows_nothing(open_roomy, small_tools):
    with open_roomy() as runtime:
        said, _ = run_plain(runtime, "/tools on small", "/tool secrets Which?")
        assert "(The user stopped this call.)" in said and "PATH" not in said
        assert roles(runtime) == ["user", "assistant", "tool"]


def test_always_asks_no_more_and_another_answer_asks_again(open_roomy, small_tools, capsys):
    ask = "/tool secrets Which?"
    with open_roomy() as runtime:
        said, _ = run_plain(
            runtime, "/tools on small", ask, "perhaps", "a", ask, "/new", "/tools on small", ask, "n"
        )
        assert capsys.readouterr().err == "Answer o, a or n.\n"
        assert said.count("PATH") == 2 and said.count("did not allow") == 1


def test_nothing_runs_before_it_is_turned_on(open_roomy, small_tools, capsys):
    with open_roomy() as runtime:
        said, code = run_plain(runtime, "/tool secrets Which?", "/tools", "/tools of small")
        assert code != 0 and "small  off" in said
        wrong = capsys.readouterr().err.splitlines()
        assert "No tool is on" in wrong[0] and "/tools [on|off NAME]" in wrong[1]
        assert runtime.chats.last_chat() is None


def test_an_answer_stops_at_the_limit(open_roomy, small_tools, monkeypatch):
    monkeypatch.setattr(chat_tools, "MOST_CALLS", 0)
    monkeypatch.setattr(chat_tools, "TOO_MANY", "(limit)")
    with open_roomy() as runtime:
        said, _ = run_plain(runtime, "/tools on small", "Hello")
        assert "Tool:" not in said and "Assistant: " in said


# The app


async def enter_lines(app, pilot, *lines):
    await until(pilot, lambda: app.phase == "idle" or app.failure)
    for line in lines:
        app.chat.prompt.text = line
        await pilot.press("enter")
        await pilot.pause()
        await until(pilot, lambda: app.phase == "idle" or isinstance(app.screen, ToolScreen))


async def test_the_app_asks_and_shows_the_result(open_roomy, small_tools):
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await enter_lines(app, pilot, "/tools on small", "/tool secrets Which?")
        shown = screen_text(app)
        assert "Run this tool of small?" in shown and "secrets" in shown
        await pilot.press("enter", "a", "o", "y")  # who types on allows nothing
        await until(pilot, lambda: app.phase == "idle")
        [message] = app.query(ToolMessage)
        assert message.result == "(The user did not allow this call.)"
        await enter_lines(app, pilot, "/tool secrets Which?")
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.phase == "idle")
        assert "PATH" in app.query(ToolMessage)[1].result
        [first, second] = app.query(ReplyMessage)
        assert (
            first.reply_id and second.reply_id and TEACHES_NOTHING in str(app.query(ToolMessage)[1].render())
        )
        app.host.close_now()


async def test_always_counts_for_this_chat(open_roomy, small_tools):
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await enter_lines(app, pilot, "/tools on small", "/tool secrets Which?")
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: app.phase == "idle")
        await enter_lines(app, pilot, "/tool secrets Which?")
        assert not isinstance(app.screen, ToolScreen) and len(app.query(ToolMessage)) == 2
        await enter_lines(app, pilot, "/new")
        assert not app.chat.state.tools.is_on
        app.host.close_now()


async def test_esc_stops_a_running_call(open_roomy, small_tools):
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await enter_lines(app, pilot, "/tools on small", "/tool slow Now?")
        await pilot.press("down", "enter")
        await until(pilot, lambda: [m for m in app.query(ToolMessage) if "Esc stops it" in str(m.render())])
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle", seconds=10)
        [message] = app.query(ToolMessage)
        assert message.result == "(The user stopped this call.)" and not app.query(ReplyMessage)
        app.host.close_now()


async def test_esc_stops_the_start_of_a_server(open_roomy, home, monkeypatch):
    monkeypatch.setattr(connections, "START_SECONDS", 12.0)  # the test's own wait for Esc is shorter
    write_servers(home, silent={"command": "sleep", "args": ["60"]})
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app.phase == "idle")
        app.chat.prompt.text = "/tools on silent"
        await pilot.press("enter")
        await until(pilot, lambda: "Esc stops" in screen_text(app))
        await pilot.press("escape")
        await until(pilot, lambda: app.phase == "idle", seconds=10)
        assert "did not answer" not in screen_text(app)
        app.host.close_now()


async def test_a_stored_chat_shows_its_calls_again(open_roomy, small_tools):
    with open_roomy() as runtime:
        run_plain(runtime, "/tools on small", "/tool fail Now?", "o")
    app = ChatApp(open_roomy, ChatOptions(session="continue", learn_when_idle=False))
    async with app.run_test(size=SMALL) as pilot:
        await until(pilot, lambda: app.phase == "idle")
        [message] = app.query(ToolMessage)
        assert message.result.startswith("(fail failed: ") and len(app.query(ReplyMessage)) == 1
        app.host.close_now()


async def test_write_again_takes_the_calls_away(open_roomy, small_tools):
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await enter_lines(app, pilot, "/tools on small", "/tool fail Now?")
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.phase == "idle")
        await enter_lines(app, pilot, "/tools off small", "/again")
        assert not app.query(ToolMessage) and len(app.query(ReplyMessage)) == 1
        await enter_lines(app, pilot, "/prev")
        assert len(app.query(ToolMessage)) == 1
        app.host.close_now()


async def test_a_server_that_does_not_start_is_one_line(open_roomy, home):
    write_servers(home, broken={"command": sys.executable, "args": [SERVER, "broken"]})
    app = ChatApp(open_roomy, OPTIONS)
    async with app.run_test(size=SMALL) as pilot:
        await enter_lines(app, pilot, "/tools on broken", "/tools")
        await until(pilot, lambda: len(app.query(Notice)) >= 2)
        shown = "\n".join(str(notice.render()) for notice in app.query(Notice))
        assert "broken did not start: the reason" in shown and "broken  off" in shown
        app.host.close_now()


def test_a_chat_on_a_server_has_no_tools(open_roomy, small_tools, capsys):
    with open_roomy() as runtime:
        chat = PlainChat(
            runtime, replace(OPTIONS, tools=False), io.StringIO("/tools on small\n"), io.StringIO()
        )
        assert chat.run() != 0 and "without --server" in capsys.readouterr().err


# What people read


def test_a_call_and_a_result_are_safe_and_short():
    call = ParsedCall("1", "search", '{"words": "a\\u001b[2Jb", "limit": 3}')
    assert call_lines(call) == ["search", "  words: ab", "  limit: 3"]
    assert short_lines("one\ntwo") == ["one", "two"]
    assert short_lines("x\n" * 30)[-1].startswith("… ") and len(short_lines("x\n" * 30)) == 9
    assert len(short_lines("y" * 5000)) == 2 and "\x1b" not in "".join(short_lines("\x1b[31mred"))


@pytest.mark.slow
def test_in_a_real_terminal(home, starter_file):
    """The starter model, the real command, a real server."""
    write_servers(home)
    command = [sys.executable, "-m", "ruvmlx", "chat", "--max-tokens", "40"]
    terminal = Terminal(command, RUVMLX_HOME=str(home), cwd=str(Path(SERVER).parents[2]))
    terminal.expect("Ask anything")
    terminal.send("/tools on small\r")
    terminal.expect("small is on for this chat")
    terminal.send("/tool forecast How is the weather in Rome?\r")
    terminal.expect("Run this tool of small")
    terminal.send("\x1b[B\r")
    terminal.expect("sunny, 24 degrees")
    terminal.expect("Good")
    terminal.send("\x11")
    assert terminal.wait() == 0

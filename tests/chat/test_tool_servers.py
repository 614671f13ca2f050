"""Tool servers: the file that names them, and calls of a real small one."""

import errno
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ruvmlx.apps.chat.tools import chat_tools, connections, server_file
from ruvmlx.apps.chat.tools.chat_tools import ChatTools
from ruvmlx.apps.chat.tools.server_file import ToolServer

from ruvmlx.errors import Interrupted, NotFound, RuvmlxError, UsageError
from ruvmlx.models.text.tool_calls import ParsedCall

SERVER = str(Path(__file__).with_name("tool_server.py"))


def write_servers(home, **more):
    """Write `mcp.json`: the small server, and others."""
    rows = {"small": {"command": sys.executable, "args": [SERVER]}, **more}
    home.mkdir(parents=True, exist_ok=True)
    (home / "mcp.json").write_text(json.dumps({"mcpServers": rows}))


def call(name, **arguments):
    return ParsedCall("abcdefghi", name, json.dumps(arguments))


@pytest.fixture
def tools(home):
    pytest.importorskip("mcp.server.mcpserver", reason="the extra `mcp` is not installed")
    write_servers(home, broken={"command": sys.executable, "args": [SERVER, "broken"]})
    made = ChatTools()
    yield made
    made.close()


def run(tools, name, **arguments):
    return tools.run(call(name, **arguments), threading.Event())


def test_nothing_is_on_at_first(tools):
    assert not tools.is_on and tools.offer().tools == ()
    assert tools.lines()[0].startswith("small   off  ")


def test_a_real_server_is_started_called_and_stopped(tools):
    names = tools.turn_on("small", threading.Event())
    assert names == ["forecast", "add", "fail", "big", "slow", "die", "secrets"]
    offered = {row["function"]["name"]: row["function"] for row in tools.offer().tools}
    assert offered["add"]["description"] == "The sum of two numbers."
    assert offered["forecast"]["parameters"]["properties"]["city"]["type"] == "string"
    assert run(tools, "forecast", city="Rome") == "Rome: sunny, 24 degrees"
    assert run(tools, "add", a=2, b=3) == "5"
    assert "    forecast  The weather of a city." in tools.lines()
    assert tools.turn_off("small") and not tools.turn_off("small")
    assert run(tools, "forecast", city="Rome") == "(there is no tool forecast.)"


def test_variables_of_the_user_do_not_reach_a_server(tools, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    tools.turn_on("small", threading.Event())
    assert "MY_API_KEY" not in run(tools, "secrets") and "PATH" in run(tools, "secrets")


def test_errors_are_one_line(tools):
    tools.turn_on("small", threading.Event())
    assert run(tools, "fail").startswith("(fail failed: ") and "\n" not in run(tools, "fail")
    assert run(tools, "add", a="no number", b=1).startswith("(add failed: ")
    assert "\n" not in run(tools, "add", a="no number", b=1)
    assert run(tools, "nonsense") == "(there is no tool nonsense.)"


def test_a_server_that_dies_is_one_line(tools):
    tools.turn_on("small", threading.Event())
    ended = "(the tool server small has ended; /tools on small starts it again.)"
    assert run(tools, "die") == ended
    assert "/tools on small starts it" in run(tools, "add", a=1, b=1)
    tools.turn_on("small", threading.Event())
    assert run(tools, "add", a=1, b=1) == "2"


def test_a_server_that_hangs_is_given_up(tools, home):
    write_servers(home, small={"command": sys.executable, "args": [SERVER], "timeout": 0.5})
    tools.turn_on("small", threading.Event())
    assert run(tools, "slow") == "(slow did not answer in 0.5 s, so the call was given up.)"
    assert run(tools, "add", a=1, b=1) in ("2", "(add did not answer in 0.5 s, so the call was given up.)")


def test_the_user_can_stop_a_call(tools):
    tools.turn_on("small", threading.Event())
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    began = time.monotonic()
    with pytest.raises(Interrupted):
        tools.run(call("slow"), cancel)
    assert time.monotonic() - began < 5


def test_a_server_that_does_not_start_says_why(tools, home, monkeypatch):
    with pytest.raises(RuvmlxError, match=r"broken did not start: the reason$"):
        tools.turn_on("broken", threading.Event())
    write_servers(home, none={"command": "/no/such/program"}, mute={"command": "sleep", "args": ["60"]})
    with pytest.raises(RuvmlxError, match="No such file or directory"):
        tools.turn_on("none", threading.Event())
    monkeypatch.setattr(connections, "START_SECONDS", 0.5)
    with pytest.raises(RuvmlxError, match="mute did not answer in 0 s: sleep 60"):
        tools.turn_on("mute", threading.Event())
    assert not tools.is_on


@pytest.mark.parametrize("has_room", [True, False])
def test_a_full_folder_of_temporary_files_is_named(monkeypatch, has_room):
    """Without room for temporary files, the chat names the folder at once. Before, the chat waited 30 s
    for the server. The test makes a small connection of its own."""
    ended = []

    @asynccontextmanager
    async def connect():
        yield "client"
        ended.append("client")

    async def client(server, log, stack):
        log.write("a line of the server")
        return connect()

    async def no_tools(client, name):
        return []

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(connections, "require_client", lambda: None)
    monkeypatch.setattr(connections, "_client", client)
    monkeypatch.setattr(connections, "_tools", no_tools)
    if not has_room:
        monkeypatch.setattr(connections.tempfile, "TemporaryFile", refuse)
    made, server = connections.Connections(), ToolServer("small", sys.executable)
    if has_room:
        assert made.start(server, threading.Event()) == [] and not ended
        made.close()
        assert ended
    else:
        with pytest.raises(RuvmlxError, match=r"small did not start: No space left on device$"):
            made.start(server, threading.Event())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer x"}])
def test_an_address_is_called(tools, home, headers):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        write_servers(home, far={"url": f"http://127.0.0.1:{port}/mcp", "headers": headers})
        deadline = time.monotonic() + 60
        while True:
            try:
                tools.turn_on("far", threading.Event())
                break
            except RuvmlxError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.2)
        assert run(tools, "add", a=2, b=3) == "5"
    finally:
        running.kill()
        running.wait()
    assert "\n" not in run(tools, "add", a=2, b=3) and run(tools, "add", a=2, b=3).startswith("(")


def test_a_server_ends_with_the_chat(tools):
    tools.turn_on("small", threading.Event())
    [connection] = tools._connections._open.values()
    tools.close()
    assert connection.task.done()


def test_a_server_that_starts_ends_with_the_chat(tools, home):
    script = f"echo $$ > {home}/new && mv {home}/new {home}/pid; exec sleep 60"
    write_servers(home, silent={"command": "sh", "args": ["-c", script]})
    with ThreadPoolExecutor() as threads:
        started = threads.submit(tools.turn_on, "silent", threading.Event())
        while not (home / "pid").exists():
            time.sleep(0.02)
        tools.close()
        with pytest.raises(Interrupted):
            started.result(5)
    with pytest.raises(ProcessLookupError):
        os.kill(int((home / "pid").read_text()), 0)


def test_two_tools_with_one_name_are_told_apart(tools, home):
    write_servers(home, other={"command": sys.executable, "args": [SERVER]})
    tools.turn_on("small", threading.Event())
    assert "other.add" in tools.turn_on("other", threading.Event())
    assert run(tools, "other.add", a=1, b=2) == "3"


def test_an_answer_has_a_limit_of_calls(tools, monkeypatch):
    monkeypatch.setattr(chat_tools, "MOST_CALLS", 2)
    tools.turn_on("small", threading.Event())
    for _ in range(2):
        assert tools.refusal(call("add")) == ""
        run(tools, "add", a=1, b=1)
    assert tools.refusal(call("add")) == chat_tools.TOO_MANY and tools.offer().is_over
    tools.begin_answer()
    assert tools.refusal(call("add")) == "" and not tools.offer().is_over


def test_always_counts_for_one_tool_until_all_are_off(tools):
    tools.turn_on("small", threading.Event())
    tools.always_allow(call("add"))
    assert not tools.needs_question(call("add")) and tools.needs_question(call("forecast"))
    tools.turn_all_off()
    tools.turn_on("small", threading.Event())
    assert tools.needs_question(call("add"))


@pytest.mark.parametrize("args, asks", [([SERVER], False), ([SERVER, "add"], True)])
def test_always_ends_with_an_edit_of_the_server(tools, home, args, asks):
    """The name can mean another program now."""
    tools.turn_on("small", threading.Event())
    tools.always_allow(call("add"))
    write_servers(home, small={"command": sys.executable, "args": args})
    tools.turn_on("small", threading.Event())
    assert tools.needs_question(call("add")) == asks


def test_a_tool_that_is_not_on_cannot_be_required(tools):
    with pytest.raises(UsageError, match=r"^there is no tool 'forecast'\. No tool is on"):
        tools.offer("forecast")
    tools.turn_on("small", threading.Event())
    assert tools.offer("add").function == "add"
    with pytest.raises(UsageError, match="Did you mean 'forecast'"):
        tools.offer("forecst")


def test_not_in_a_chat_on_a_server(tools):
    tools.may_run = False
    with pytest.raises(UsageError, match="without --server"):
        tools.turn_on("small", threading.Event())


def test_without_the_package_it_says_how(tools, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(RuvmlxError, match=r"uv sync --inexact --extra mcp"):
        tools.turn_on("small", threading.Event())


def test_without_a_file_it_says_where(home):
    assert str(home / "mcp.json") in ChatTools().lines()[0]
    with pytest.raises(NotFound, match="no tool server 'files'"):
        server_file.find("files")


@pytest.mark.parametrize(
    "row,wrong",
    [
        ("[]", '"mcpServers"'),
        ("{", "not JSON"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "name"),
        ('{"mcpServers": {"a": 3}}', "object"),
        ('{"mcpServers": {"a": {}}}', "either a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://y"}}}', "either a command or a url"),
        ('{"mcpServers": {"a": {"url": "file:///etc/passwd"}}}', "http://"),
        ('{"mcpServers": {"a": {"command": "x", "args": "y"}}}', "args"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}', "env"),
        ('{"mcpServers": {"a": {"command": "x", "timeout": 0}}}', "timeout"),
        ('{"mcpServers": {"a": {"command": "x", "comand": "y"}}}', "'comand'"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(home, row, wrong):
    home.mkdir(parents=True, exist_ok=True)
    (home / "mcp.json").write_text(row)
    with pytest.raises(UsageError) as caught:
        server_file.servers()
    assert wrong in str(caught.value) and "\n" not in str(caught.value)


def test_an_address_is_read(home):
    write_servers(
        home, far={"url": "https://example.org/mcp", "headers": {"Authorization": "x"}, "type": "http"}
    )
    far = server_file.find("far")
    assert far.line == "https://example.org/mcp" and far.headers == {"Authorization": "x"}
    assert os.fspath(server_file.path()) == str(home / "mcp.json")


def test_a_permission_is_for_the_tool_of_one_server(tools, home):
    """After its server is off, another server's tool can have the same name: it asks again."""
    write_servers(home, other={"command": sys.executable, "args": [SERVER, "secrets"]})
    for server in ("small", "other"):
        tools.turn_on(server, threading.Event())
    tools.always_allow(call("secrets"))
    assert not tools.needs_question(call("secrets")) and tools.needs_question(call("other.secrets"))
    tools.turn_off("small")
    assert tools.by_name()["secrets"].server == "other" and tools.needs_question(call("secrets"))

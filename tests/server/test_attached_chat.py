"""`ruvmlx chat --server`: real clients on pseudo-terminals, on a real server with the tiny model."""

import asyncio
import base64
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from click.testing import CliRunner
from ruvmlx.apps.chat.user_files import UserFiles
from ruvmlx.apps.cli.chat import chat

from ruvmlx.errors import UsageError
from ruvmlx.text import sanitize
from tests.chat.terminal import Terminal

from .conftest import CHAT_KEY

WELCOME = "learns from what you think"


ENTER, CTRL_C, CTRL_N, CTRL_P, CTRL_Q, CTRL_R = "\r", "\x03", "\x0e", "\x10", "\x11", "\x12"
CTRL_Y, ESC = "\x19", "\x1b"


OTHER_SCREEN, BACK = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.fixture
def attach(home):
    """attach(url, *flags, key=..., wait=...) -> a terminal with a client."""
    started = []

    def begin(url, *flags, key=CHAT_KEY, wait=True, cwd=None, term="xterm-256color", own_home=home):
        argv = ["env", f"TERM={term}", sys.executable, "-m", "ruvmlx", "chat", "--server", url, *flags]
        environment = {"RUVMLX_HOME": str(own_home), "SSH_TTY": "/dev/pts/9"} | (
            {"RUVMLX_API_KEY": key} if key else {}
        )
        terminal = Terminal(argv, cwd=cwd, **environment)
        started.append(terminal)
        if wait:
            terminal.expect(WELCOME)
        return terminal

    yield begin
    for terminal in started:
        try:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


@pytest.fixture
def slow_server(running, endless):
    """The server. Each step of its replies takes 20 ms."""
    scheduler = running.serving.host.holder.opened_runtime.writer.scheduler
    step = scheduler.step

    def slowly():
        time.sleep(0.02)
        return step()

    scheduler.step = slowly
    return running


def on_runtime(running, work):
    """work(runtime), as an HTTP request would call it."""
    return asyncio.run_coroutine_threadsafe(running.serving.host.call(work), running.loop).result(30)


def replies(running):
    """(id, text, rating, finish reason) of the replies of all chats, the oldest first."""

    def read(runtime):
        chats = reversed(runtime.store.chats.all())
        turns = [turn for row in chats for turn in runtime.chats.turns(row.id)]
        return [(t.reply_id, t.content, t.rating, t.finish_reason) for t in turns if t.role == "assistant"]

    return on_runtime(running, read)


def all_replies(running, number):
    """As soon as there are so many."""
    found = []

    def enough():
        found[:] = replies(running)
        return len(found) >= number

    running.wait_until(enough, 60)
    return found


def reply_over_http(running):
    """What the model writes over HTTP."""
    return running.chat("tell me", max_tokens=24).json["choices"][0]["message"]


def test_ask_and_rate(running, attach):
    """The reply and its rating are in the server's store; leaving restores the terminal."""
    terminal = attach(running.url)
    raw = terminal.attributes
    terminal.send("hello" + ENTER)
    terminal.expect("hello")
    all_replies(running, 1)
    terminal.expect("Good")  # the reply can be rated
    terminal.send(CTRL_Y)
    terminal.expect("▲ good")
    ((_, text, rating, _),) = replies(running)
    assert rating == "up" and text
    terminal.send(CTRL_Q)
    assert terminal.wait() == 0
    assert terminal.attributes != raw and terminal.raw.count(OTHER_SCREEN) == terminal.raw.count(BACK) == 1
    running.wait_until(lambda: not running.terminals.attached)
    assert '"path": "/chat"' in running.log.getvalue() and "hello" not in running.log.getvalue()
    assert running.chat().status == 200  # the host is still open


def test_http_and_the_terminal_have_one_store(serve, attach):
    """Ratings over HTTP change the terminal's next reply; undo in the terminal undoes them everywhere."""
    running = serve(temperature=0.0)
    terminal = attach(running.url)
    terminal.send("tell me" + ENTER)
    before, untouched = all_replies(running, 1)[0][1], reply_over_http(running)
    terminal.expect("Good")  # the app knows that the reply has ended
    for _ in range(3):
        asked = running.chat("tell me", max_tokens=24).json["id"]
        assert running.ask("POST", "/v1/ratings", {"id": asked, "rating": "down"}).json["applied"]
    terminal.send("/new" + ENTER)
    terminal.expect(WELCOME)
    terminal.send("tell me" + ENTER)
    after = all_replies(running, 2)[1][1]
    assert after != before
    terminal.expect("Good")
    assert running.ask("GET", "/v1/status").json["adapter"] == "default@3"
    assert reply_over_http(running) != untouched
    for left in (2, 1, 0):
        terminal.send(CTRL_R)
        terminal.expect(f"{left} left")
    assert on_runtime(running, lambda runtime: runtime.status().ratings) == 0
    assert reply_over_http(running) == untouched


def test_the_clients_clipboard_is_filled(running, attach):
    """By the client: here, where SSH_TTY is set, by its terminal."""
    terminal = attach(running.url)
    terminal.send("hello" + ENTER)
    ((_, text, _, _),) = all_replies(running, 1)
    terminal.expect("Good")
    terminal.send("/copy" + ENTER)
    clipboard = re.compile(rb"\x1b\]52;c;([^\a]*)\a")
    running.wait_until(lambda: terminal._read() and clipboard.search(terminal.raw))
    copied = base64.b64decode(clipboard.search(terminal.raw)[1]).decode()
    assert copied == sanitize(text)


def test_a_chosen_theme_is_saved_at_the_client(running, attach, home, tmp_path):
    """Not in the data folder of the user who started the server."""
    terminal = attach(running.url, own_home=tmp_path / "of the client")
    for typed, seen in ((CTRL_P, "Search"), ("theme" + ENTER, "nord"), ("nord" + ENTER, "")):
        terminal.send(typed)
        terminal.expect(seen)
    saved = tmp_path / "of the client" / "config.toml"
    running.wait_until(lambda: terminal._read() and saved.exists())
    assert saved.read_text() == 'theme = "nord"\n' and not (home / "config.toml").exists()


def test_a_theme_that_cannot_be_saved_is_told_at_the_end(running, attach, tmp_path):
    """While the app draws on the terminal, the client cannot print the line."""
    (tmp_path / "file").touch()
    terminal = attach(running.url, own_home=tmp_path / "file" / "home")
    running.wait_until(lambda: running.terminals.attached)
    for typed, seen in ((CTRL_P, "Search"), ("theme" + ENTER, "nord"), ("nord" + ENTER, "")):
        terminal.send(typed)
        terminal.expect(seen)
    time.sleep(1)
    terminal.send(CTRL_Q)
    terminal.expect("cannot write .*config.toml")
    assert terminal.wait() == 0


def test_another_size_is_drawn(running, attach):
    terminal = attach(running.url)
    terminal.expect("─{70}")
    terminal.resize(120, 40)
    terminal.expect("─{85}")


def test_ctrl_c_stops_the_reply_and_then_leaves(slow_server, attach):
    """Keys are the app's: the client is not interrupted."""
    terminal = attach(slow_server.url)
    terminal.send("hello" + ENTER)
    terminal.expect("tokens/s")
    terminal.send(CTRL_C)
    terminal.expect("stopped")
    assert all_replies(slow_server, 1)[0][3] == "cancelled"
    terminal.send(CTRL_C)
    terminal.expect("Press again to quit")
    terminal.send(CTRL_C)
    assert terminal.wait() == 0


def test_a_client_that_dies_ends_its_reply(slow_server, attach):
    """Killed in the middle: the reply ends within a moment, and its text is kept."""
    terminal = attach(slow_server.url)
    terminal.send("hello" + ENTER)
    terminal.expect("tokens/s")
    time.sleep(0.5)  # the first random bytes may be half a character
    os.kill(terminal.pid, signal.SIGKILL)
    slow_server.wait_until(lambda: not slow_server.terminals.attached)
    ((_, text, _, reason),) = replies(slow_server)
    assert reason == "cancelled" and text
    assert slow_server.chat().status == 200


def test_a_server_that_stops_restores_the_terminal(slow_server, attach):
    """In the middle of a reply: one line, and the text is in the store."""
    terminal = attach(slow_server.url)
    raw = terminal.attributes
    terminal.send("hello" + ENTER)
    terminal.expect("tokens/s")
    threading.Thread(target=slow_server.stop).start()
    terminal.expect("the server stopped; the chat is saved")
    restored = terminal.attributes
    assert terminal.wait() == 1 and restored != raw and BACK in terminal.raw


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(running, attach, signum):
    terminal = attach(running.url)
    os.kill(terminal.pid, signum)
    assert terminal.wait() == 128 + signum and BACK in terminal.raw


def test_a_client_that_is_stopped_gives_the_terminal_back(running, attach):
    """With SIGTSTP the shell gets its terminal; with SIGCONT the chat is drawn again."""
    terminal = attach(running.url)
    raw = terminal.attributes
    os.kill(terminal.pid, signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(terminal.pid, os.WUNTRACED)[1]) and terminal.attributes != raw
    while terminal.seen and select.select([terminal.fd], [], [], 0.2)[0]:
        terminal._read()
    drawn = len(terminal.raw)
    os.kill(terminal.pid, signal.SIGCONT)
    running.wait_until(lambda: terminal._read() and WELCOME.encode() in terminal.raw[drawn:])
    assert terminal.attributes == raw and terminal.raw[drawn:].count(OTHER_SCREEN) == 1


def test_two_terminals_and_http_at_the_same_time(slow_server, attach):
    """Replies are written beside each other; Esc ends one's own alone; /model asks for a single user."""
    one, two = attach(slow_server.url), attach(slow_server.url)
    one.send("first" + ENTER)
    one.expect("tokens/s")
    two.send("second" + ENTER)
    two.expect("tokens/s")
    assert slow_server.chat(max_tokens=2).status == 200 and slow_server.serving.host.is_writing
    one.send(ESC)
    one.expect("stopped")
    one.expect("Good")
    one.send("/model other" + ENTER)
    one.expect("close them, then change it")
    assert slow_server.serving.host.is_writing  # the other reply
    reasons = sorted(reason for _, _, _, reason in all_replies(slow_server, 2))
    assert reasons[0] == "cancelled" and reasons[1] != "cancelled"


def test_files_are_those_of_the_client(running, attach, tmp_path):
    """A relative name belongs to the folder that the user is in."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    terminal = attach(running.url, cwd=folder)
    terminal.send("/export chat.json" + ENTER)
    terminal.expect("Written")
    assert (folder / "chat.json").exists()


def test_files_of_another_machine_are_refused(running, attach, tmp_path):
    running.terminals.local = False
    terminal = attach(running.url, cwd=tmp_path)
    terminal.send("/export chat.json" + ENTER)
    terminal.expect("a file of the server's machine")
    assert not (tmp_path / "chat.json").exists()
    with pytest.raises(UsageError, match="server's machine"):
        UserFiles(None).path("x")


def test_a_deleted_chat_can_come_back_after_its_terminal_left(running, attach):
    terminal = attach(running.url)
    terminal.send("/delete" + ENTER)
    terminal.expect("Deleted")
    assert on_runtime(running, lambda runtime: runtime.store.chats.soft_deleted())
    terminal.send(CTRL_Q)
    assert terminal.wait() == 0
    assert on_runtime(running, lambda runtime: runtime.store.chats.soft_deleted())


# -- who may connect ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "wrong-key-of-16-characters"])
def test_a_key_is_always_needed(running, attach, key):
    terminal = attach(running.url, key=key, wait=False)
    terminal.expect("asks for an API key")
    assert terminal.wait() == 1 and OTHER_SCREEN not in terminal.raw


def test_the_key_file_is_found(running, attach, home):
    home.mkdir(exist_ok=True)
    (home / "api_keys").write_text(CHAT_KEY + "\n")
    (home / "api_keys").chmod(0o600)
    attach(running.url, key=None)


def test_no_more_terminals_than_allowed(running, attach):
    running.serving.limits = running.serving.limits.__class__(terminals=1)
    attach(running.url)
    second = attach(running.url, wait=False)
    second.expect(r"limit\s+of\s+attached\s+terminals")
    assert second.wait() == 1


@pytest.mark.parametrize(
    ("flags", "line"), [(["--session", "nothing"], "no chat 'nothing'"), (["--theme", "dark"], None)]
)
def test_what_the_server_says_at_the_end(running, attach, flags, line):
    """An error of the app, after its start, is the client's line and exit code."""
    terminal = attach(running.url, *flags, wait=line is None)
    if line is None:
        terminal.send(CTRL_Q)
    else:
        terminal.expect(line)
    assert (terminal.wait() == 0) == (line is None) and terminal.raw.count(BACK) == 1


def test_wrong_keys_are_one_line(running, attach, home):
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text('keys = "nonsense=ctrl+t"\n')
    terminal = attach(running.url, wait=False)
    terminal.expect("nonsense")
    assert terminal.wait() != 0 and "Traceback" not in terminal.seen


def test_no_server(attach):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    terminal = attach(f"http://127.0.0.1:{port}", wait=False)
    terminal.expect("no server answers at .*; start one with")
    assert terminal.wait() == 1


def test_another_program_on_the_port(attach):
    """What is no server of ours is one line, too."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        terminal = attach(f"http://127.0.0.1:{other.getsockname()[1]}", wait=False)
        terminal.expect(r"is no `ruvmlx serve` that chats\s+can\s+join")
        assert terminal.wait() == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--model", "x"], "--model"),
        (["--backend", "native"], "--backend"),
        (["--adapter", "work"], "--adapter"),
        (["--temp", "0"], "--temp"),
        (["--plain"], "--plain"),
        ([], "needs a terminal"),
        (["ftp://x"], "needs a terminal"),
    ],
)
def test_flags_that_the_server_decides(flags, named):
    done = CliRunner().invoke(chat, ["--server", *flags])
    assert isinstance(done.exception, UsageError) and named in str(done.exception)


def test_a_terminal_that_cannot_draw_a_screen(attach):
    terminal = attach("http://127.0.0.1:1", wait=False, term="dumb")
    terminal.expect(r"this terminal cannot \(TERM=dumb\)")
    assert terminal.wait() == 2


def test_a_key_without_a_server():
    done = CliRunner().invoke(chat, ["--api-key", "k" * 16])
    assert isinstance(done.exception, UsageError) and "--server" in str(done.exception)


def test_the_client_loads_no_model():
    """Neither the model's libraries nor Textual: it starts at once."""
    code = (
        "import sys, ruvmlx.apps.cli as verbs; verbs.cli.get_command(None, 'chat')\n"
        "import ruvmlx.apps.attach.client, ruvmlx.apps.server.keys\n"
        "sys.exit(bool({'numpy', 'mlx', 'textual', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0

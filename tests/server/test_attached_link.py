"""What a server takes from an attached terminal, sent without one: who may connect, floods, pastes."""

import gc
import threading
import time
from dataclasses import asdict

import pytest
from ruvmlx.apps.attach.client import Link
from ruvmlx.apps.attach.wire import Hello
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.prompt import MAX_MESSAGE_CHARACTERS
from ruvmlx.apps.server import web
from textual import events
from wsproto.events import CloseConnection

from .conftest import CHAT_KEY

# -- floods ------------------------------------------------------------------------------------------


@pytest.fixture
def apps(monkeypatch):
    """The apps that have started. gc.get_objects does not find them all: `gc_policy` sets objects aside."""
    started, start = [], ChatApp.on_mount

    def note_and_start(app):
        started.append(app)
        return start(app)

    monkeypatch.setattr(ChatApp, "on_mount", note_and_start)
    return started


@pytest.fixture
def link(running, apps):
    """A client without a screen. What the server draws is read and dropped."""
    found = Link(running.url, CHAT_KEY)
    found.send_facts(**asdict(Hello.of((80, 24))))

    def read():
        while not any(isinstance(event, CloseConnection) for event in found.read_events()):
            pass

    threading.Thread(target=read, daemon=True).start()
    yield found
    found.close()


def living_objects(kind):
    """The objects of a class."""
    return [found for found in gc.get_objects() if isinstance(found, kind)]


@pytest.fixture
def app(running, link, apps):
    """The client's app, when its input takes keys."""
    running.wait_until(lambda: apps and apps[0].focused and apps[0].chat.state.session, 60)
    return apps[0]


def test_a_flood_of_keys_waits_at_its_sender(running, link, app):
    """Of 100,000 keys few are messages of the app at a time; those that wait end with the terminal."""
    link.send(b"x" * 100_000)
    running.wait_until(lambda: app.chat.prompt.text, 60)
    for _ in range(5):
        time.sleep(0.1)
        assert len(living_objects(events.Key)) < 200
    link.close()
    running.wait_until(lambda: not running.terminals.attached, 60)


@pytest.fixture
def patient(monkeypatch):
    """A server that stops waits for its terminals without a limit."""
    monkeypatch.setattr(web, "_GRACE", 10_000)


def test_a_server_stops_while_a_terminal_floods(patient, running, link, app):
    """It does not wait until the app has read the keys."""
    link.send(b"x" * 1_000_000)
    running.wait_until(lambda: app.chat.prompt.text, 60)
    running.stop()  # it fails after 30 s
    assert not running.terminals.attached


def test_a_paste_is_bounded(running, link, app):
    """A paste of megabytes is cut, whether it ends or not, and the chat says so."""
    for _ in range(3):
        link.send(b"\x1b[200~" + b"x" * 700_000)
    link.send(b"\x1b[201~")
    running.wait_until(lambda: app.chat.prompt.text, 60)
    assert len(app.chat.prompt.text) == MAX_MESSAGE_CHARACTERS and "200,000" in app.chat.status.message


def test_a_client_that_leaves_before_its_first_message(serve):
    """The log has the request and no internal error."""
    running = serve()
    Link(running.url, CHAT_KEY).close()
    running.wait_until(lambda: '"path": "/chat"' in running.log.getvalue())
    assert '"error"' not in running.log.getvalue()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {CHAT_KEY}", "Origin": "http://localhost:3000"}, 403),
        ({"Authorization": f"Bearer {CHAT_KEY}", "Host": "evil.example"}, 403),
        ({"Authorization": f"Bearer {CHAT_KEY}"}, 101),
    ],
)
def test_who_is_refused(shared, headers, status):
    """Whoever has no key, every web page, and names that are not this server's."""
    upgrade = {
        "Host": "localhost", "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", **headers,
    }  # fmt: skip
    with shared.connect() as connection:
        lines = "".join(f"{name}: {value}\r\n" for name, value in upgrade.items())
        connection.sendall(f"GET /chat HTTP/1.1\r\n{lines}\r\n".encode())
        assert connection.recv(100).startswith(f"HTTP/1.1 {status}".encode())


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/responses"])
def test_a_websocket_that_is_not_there(shared, path):
    """Clients of OpenAI ask for these WebSockets. The answer does not depend on an API key."""
    lines = "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    with shared.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\n{lines}{key}\r\n".encode())
        answer = b""
        while not answer.endswith(b"}}"):  # the head and the body can come in two pieces
            piece = connection.recv(10_000)
            assert piece, answer
            answer += piece
    assert answer.startswith(b"HTTP/1.1 404") and b"there is no WebSocket at this path" in answer

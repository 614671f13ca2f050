"""These tests end a server that opens a model, and let a switch to another model fail."""

import asyncio
import json
import threading

import pytest
from ruvmlx.apps.attach.client import Link
from wsproto.events import CloseConnection, TextMessage

from ruvmlx.errors import CorruptFile
from ruvmlx.host.guest import Guest
from ruvmlx.host.host import Host
from ruvmlx.progress import QUIET

from .conftest import CHAT_KEY
from .test_many_models import KEY, A, B, ask, home, serve_models  # noqa: F401 - fixtures


def in_loop(running, work):
    """Run a coroutine in the event loop of the server, and return the result."""
    return asyncio.run_coroutine_threadsafe(work, running.loop).result(60)


def test_a_server_that_stops_opens_no_model(serve_models):  # noqa: F811
    """A request that waits for its turn to open a model gets a 503 when the server stops."""
    running, got = serve_models(), []
    turn = running.models._turn
    in_loop(running, turn.acquire())
    asking = threading.Thread(target=lambda: got.append(ask(running, B)))
    asking.start()
    running.wait_until(lambda: running.serving.calls and turn._waiters, 60)
    running.loop.call_soon_threadsafe(running.models.stop)
    running.loop.call_soon_threadsafe(turn.release)
    asking.join()
    assert (got[0].status, got[0].error["code"]) == (503, "stopping")
    assert '"opened"' not in running.log.getvalue()


def test_a_first_model_that_a_switch_closed_is_opened_again(serve_models, monkeypatch):  # noqa: F811
    """If a switch fails and leaves no model open, the next request opens the old model again."""
    running = serve_models()
    assert ask(running, A).status == 200  # the start of the server is over
    host = running.serving.host

    def fail(model, session, watch):
        host.holder.release()
        raise CorruptFile("cut short.")

    monkeypatch.setattr(host.holder, "switch", fail)
    running.terminals.attached.add(Guest(host))
    with pytest.raises(CorruptFile, match="cut short"):
        in_loop(running, running.terminals._switch(B, "s1", QUIET))
    assert ask(running, A).status == 200


def test_a_terminal_learns_why_its_model_is_not_open(serve_models, monkeypatch):  # noqa: F811
    """The server accepts the connection before it opens the model. So the client gets the error."""
    running = serve_models()
    assert running.ask("POST", "/v1/stop", {"model": A}, **KEY).json["was_open"]

    async def fail(host, watch):
        raise CorruptFile("cut short.")

    monkeypatch.setattr(Host, "open", fail)
    link, found = Link(running.url, CHAT_KEY), []
    link._socket.settimeout(60)
    while not any(isinstance(event, CloseConnection) for event in found):
        found += link.read_events()
    link.close()
    told = json.loads("".join(event.data for event in found if isinstance(event, TextMessage)))
    assert told["end"] == 1 and "cannot be opened: cut short" in told["error"]
    assert '"error"' not in running.log.getvalue()

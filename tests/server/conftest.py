"""A server on a real socket, in a thread of its own, with the tiny model."""

import asyncio
import http.client
import io
import json
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from ruvmlx.apps.attach.route import Terminals
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.app import make_app
from ruvmlx.apps.server.idle import IdleWork
from ruvmlx.apps.server.keys import salt_digest
from ruvmlx.apps.server.limits import ServerLimits
from ruvmlx.apps.server.model_pool import ModelPool
from ruvmlx.apps.server.requestlog import RequestLog
from ruvmlx.apps.server.serving import Serving
from ruvmlx.apps.server.web import WebServer, listening, web_server

from ruvmlx.backends.select import open_backend
from ruvmlx.engine.run import Run
from ruvmlx.engine.tools import forced_calls, tool_form
from ruvmlx.host.host import Host
from ruvmlx.models.load import load_model
from ruvmlx.progress import QUIET
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

CHAT_KEY = "a-key-for-the-chat-app"
CHAT_TOKENS = 200  # of a reply in an attached chat


@dataclass
class Reply:
    """An answer to `ask`."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}, self.body
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        assert "\n" not in self.json["error"]["message"]
        return self.json["error"]


@dataclass
class Running:
    """A server that runs; `serving` is to be read only."""

    port: int
    serving: Serving
    server: WebServer
    log: io.StringIO
    terminals: Terminals
    thread: threading.Thread | None = None
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def model(self) -> str:
        return self.serving.model_name

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """One request; body: JSON, or bytes as they are. Headers: `x_api_key="..."`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named.setdefault("content-type", "application/json")
        try:
            connection.request(method, path, data, named)
            answer = connection.getresponse()
            return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def chat(self, text: str = "hello", **fields: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        return self.ask("POST", "/v1/chat/completions", self.body(**{"messages": messages, **fields}))

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "max_tokens": 8, "temperature": 0, **fields}

    def connect(self) -> socket.socket:
        """A connection that a test writes to by hand."""
        found = socket.socket()
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        found.settimeout(20)
        found.connect(("127.0.0.1", self.port))
        return found

    def send_chat(self, **fields: Any) -> socket.socket:
        """Ask for a reply and return the connection, unread."""
        messages = [{"role": "user", "content": "hello"}]
        data = json.dumps(self.body(**{"messages": messages, **fields})).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = self.connect()
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def wait_until(self, condition: Any, seconds: float = 10.0) -> float:
        """Seconds until condition() holds."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < seconds
            time.sleep(0.005)
        return time.monotonic() - started

    def slow_down(self, seconds: float = 0.3) -> None:
        """Wait before each piece of a reply, as if the model were slow; not after it was cancelled."""
        submit = self.serving.host.submit

        async def slowly(request: Any, session_id: str | None = None) -> Any:
            async for chunks in submit(request, session_id):
                for chunk in chunks:
                    await asyncio.sleep(0 if request.cancel.is_set() else seconds)
                    yield [chunk]

        self.serving.host.submit = slowly  # type: ignore[method-assign]

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.serving.stop)
        self.server.should_exit = True
        if self.thread is not None:
            self.thread.join(30)
            assert not self.thread.is_alive()


def run_server(
    open_runtime, access: Access, limits: ServerLimits, pool: Any = None, **serving: Any
) -> Running:
    """Start a server; it is ready when this returns. pool: makes a ModelPool of the first `Serving`."""
    ready, failed, log = threading.Event(), [], io.StringIO()
    found: list[Running] = []

    async def main() -> None:
        host = Host(open_runtime)
        await host.open(QUIET)
        state = Serving(host, limits=limits, log=RequestLog(as_json=True, sink=log), **serving)
        sock = listening("127.0.0.1", 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a stream that nobody reads soon stalls
        models = pool(state) if pool else ModelPool(state)
        terminals = Terminals(models, local=True, max_tokens=CHAT_TOKENS)
        server = web_server(make_app(models, access, [terminals.route]), limits, state.log)
        loop = asyncio.get_running_loop()
        found.append(Running(sock.getsockname()[1], state, server, log, terminals, None, loop))
        ready.set()
        try:
            async with models.running(), IdleWork(state, learns=False).running():
                await server.serve(sockets=[sock])
        finally:
            await host.close()

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)
            raise
        finally:
            ready.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60) and not failed, failed
    found[0].thread = thread
    return found[0]


@pytest.fixture
def endless(monkeypatch):
    """No reply ends by itself before its last token."""
    draw = Run.draw

    def go_on(run: Run, record: bool = True) -> Any:
        run.request.ignore_eos = True
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", go_on)


@pytest.fixture(scope="module")
def module_servers():
    started: dict[str, Running] = {}
    yield started
    for running in started.values():
        running.stop()


@pytest.fixture
def one(request, module_servers, serve_all):
    """one(start) -> the server that start() makes, once for all cases of a test function."""

    def get(start):
        name = request.function.__name__
        if name not in module_servers:
            module_servers[name] = start()
            serve_all.clear()  # stopped with the module
        return module_servers[name]

    return get


@pytest.fixture
def shared(module_servers, serve, serve_all):
    """A server with the tiny model for tests that leave it as it was."""
    if "shared" not in module_servers:
        module_servers["shared"] = serve()
        serve_all.clear()
    return module_servers["shared"]


@pytest.fixture
def serve_all():
    """Servers to stop after the test."""
    return []


@pytest.fixture
def serve(open_tiny, serve_all):
    """serve(keys=..., limits=..., adapter=...) starts a server; all are stopped after the test. own: by API
    key, the adapter that it alone uses."""

    def start(keys=(), hosts=(), origins=(), limits=None, alias=None, max_tokens=None, own=None, **settings):
        access = Access(keys, hosts, origins, keys or [CHAT_KEY])
        running = run_server(
            lambda: open_tiny(**settings),
            access,
            limits or ServerLimits(),
            alias=alias,
            max_tokens=max_tokens,
            own_adapters={salt_digest(key): adapter for key, adapter in (own or {}).items()},
        )
        serve_all.append(running)
        return running

    yield start
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


@pytest.fixture
def running(serve):
    """A server with the tiny model."""
    return serve()


@pytest.fixture
def client(running):
    """OpenAI's own client."""
    openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")
    with openai.OpenAI(base_url=running.url, api_key="none-needed", max_retries=0, timeout=600) as found:
        yield found


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A server whose model has room for tools in its prompt; each byte is a token."""
    folder = tmp_path_factory.mktemp("roomy")
    model = load_model(str(make_safetensors_model(folder / "roomy-llama", max_context=1536)))
    backend, settings = open_backend("reference", model), Settings(adapter="none", kv_disk=None)

    def opened():
        return Runtime(Store(folder / "ruvmlx.db"), model, backend, settings, learn=False)

    running = run_server(opened, Access(), ServerLimits())
    yield running
    running.stop()
    assert "Traceback" not in running.log.getvalue()


@pytest.fixture
def calls_first(roomy, monkeypatch):
    """calls_first(name, parameters): the next reply of `roomy` is a call of this function, as if the model
    had decided so. Returns the requests from then on."""

    def script(name, parameters):
        submit, seen = roomy.serving.host.submit, []
        tokenizer = roomy.serving.runtime.model.tokenizer
        function = {"name": name, "parameters": parameters, "strict": True}

        def submit_forced(request, session_id=None):
            seen.append(request)
            if len(seen) == 1:
                forced = forced_calls(tokenizer, tool_form(tokenizer), [function])
                request = replace(request, constraint=forced)
            return submit(request, session_id)

        monkeypatch.setattr(roomy.serving.host, "submit", submit_forced)
        return seen

    return script


@pytest.fixture
def says(roomy, monkeypatch):
    """says(text): from then on, each reply of `roomy` is this text and ends by itself."""

    def script(text):
        submit = roomy.serving.host.submit

        async def submit_scripted(request, session_id=None):
            async for chunks in submit(request, session_id):
                if (response := chunks[-1].response) is not None:
                    yield [replace(chunks[-1], text=text, response=replace(response, finish_reason="stop"))]

        monkeypatch.setattr(roomy.serving.host, "submit", submit_scripted)

    return script

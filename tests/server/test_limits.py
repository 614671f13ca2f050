"""What one client may take: of time, of memory, of the model; and what happens when it leaves."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from ruvmlx.apps.server import prompts
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.engine import grammar
from ruvmlx.engine.run import Run

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hello"}]


@pytest.fixture
def drawn_requests(monkeypatch, endless):
    """Each token takes 20 ms; returns the requests that were drawn for."""
    draw, seen = Run.draw, []

    def slowly(run, record=True):
        time.sleep(0.02)
        if run.request not in seen:
            seen.append(run.request)
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", slowly)
    return seen


def read_all(connection) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def answer(connection) -> tuple[int, dict]:
    """(status, JSON) of an answer after which the server closes."""
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves(serve, drawn_requests, stream):
    """Its reply ends within a second, and the next one is written at once."""
    running = serve()
    connection = running.send_chat(stream=stream, max_tokens=400)
    running.wait_until(lambda: drawn_requests)
    connection.close()
    assert running.wait_until(lambda: running.serving.waiting == 0) < 1
    assert drawn_requests[0].cancel.is_set()
    assert running.chat(max_tokens=2).status == 200
    assert "ruvmlx_cancelled_total 1" in running.ask("GET", "/metrics").body.decode()
    rows = [json.loads(line) for line in running.log.getvalue().splitlines()]
    [row] = [row for row in rows if row.get("status") == "gone"]
    # The whole prompt was read, and at least one token was drawn.
    assert row["prompt_tokens"] == len(drawn_requests[0].input_ids or ()) > 0
    [seen] = [recent for _, recent in running.serving.recent if recent.status == "gone"]
    assert seen.prompt_tokens == row["prompt_tokens"]


def test_a_client_that_leaves_the_queue(serve, drawn_requests):
    """Those behind it do not wait for its reply."""
    running = serve()
    first = running.send_chat(max_tokens=20)
    running.wait_until(lambda: drawn_requests)
    second = running.send_chat(max_tokens=400)
    running.wait_until(lambda: running.serving.waiting == 2)
    second.close()
    started = time.monotonic()
    assert running.chat(max_tokens=2).status == 200 and time.monotonic() - started < 3
    first.close()


def test_many_clients_that_leave(serve, drawn_requests):
    """Nothing is left of them but cached prompts: without these, no page is in use."""
    running = serve()
    for i in range(40):
        connection = running.send_chat(stream=bool(i % 2), max_tokens=400, n=1 + i % 3)
        if i % 4:
            time.sleep(0.01 * (i % 5))
        connection.close()
    running.wait_until(lambda: running.serving.waiting == 0 and running.serving.calls == 0)
    engine = running.serving.host.holder.opened_runtime.engine
    engine.sessions.clear()
    assert engine.sessions.nbytes == 0
    assert running.chat(max_tokens=2).status == 200


def test_a_slow_reader_is_let_go(serve, drawn_requests):
    """A stream that is not read ends; its connection is closed, although bytes are on their way."""
    running = serve(limits=ServerLimits(stall_seconds=0.3))
    connection = running.send_chat(stream=True, max_tokens=400, logprobs=True, top_logprobs=20, n=2)
    running.wait_until(lambda: drawn_requests)
    running.wait_until(lambda: running.serving.waiting == 0, 20)
    assert all(request.cancel.is_set() for request in drawn_requests)
    running.wait_until(lambda: not running.server.server_state.connections, 3)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_more_replies_than_the_server_ever_writes(serve, stream):
    """To try again would not help."""
    running = serve(limits=ServerLimits(replies=2))
    refused = running.chat(max_tokens=2, n=3, stream=stream)
    assert refused.status == 400 and refused.error["param"] == "n"
    assert "asks for 3 replies" in refused.error["message"] and "at most 2" in refused.error["message"]
    prompts = {"model": "tiny-llama", "prompt": ["a", "b", "c"], "max_tokens": 2}
    assert running.ask("POST", "/v1/completions", prompts).status == 400
    assert running.chat(max_tokens=2, n=2).status == 200


def test_large_bodies(serve):
    running = serve()
    body = running.body(messages=[{"role": "user", "content": "x" * 10_000_000}])
    refused = running.ask("POST", CHAT, body)
    assert refused.status == 413 and refused.error["code"] == "body_too_large"
    assert refused.headers["connection"] == "close"


def test_large_bodies_without_a_length(serve):
    """In pieces, and cut off."""
    running = serve(limits=ServerLimits(body=1000))
    connection = running.connect()
    connection.sendall(
        b"POST /v1/ratings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b" " * 1024 + b"\r\n0\r\n\r\n"
    )
    assert answer(connection)[0] == 413


def test_a_body_that_does_not_arrive(serve):
    running = serve(limits=ServerLimits(body_seconds=0.2))
    connection = running.connect()
    connection.sendall(
        b"POST /v1/ratings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    status, told = answer(connection)
    assert status == 408 and told["error"]["code"] == "timeout"


@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"GET /health HTTP/1.1\r\nHost: loc"])
@pytest.mark.parametrize("second", [False, True])
def test_half_open_headers(serve, begun, second):
    """Also behind a request that was answered."""
    running = serve(limits=ServerLimits(header_seconds=0.2))
    connection = running.connect()
    if second:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in connection.recv(65536)
        if not begun:  # an idle connection, which uvicorn closes by itself
            return
    connection.sendall(begun)
    status, told = answer(connection)
    assert status == 408 and "header" in told["error"]["message"]
    running.wait_until(lambda: not running.server.server_state.connections)


def test_header_in_drops(serve):
    """The time is for the whole header: a byte now and then does not make it longer."""
    running = serve(limits=ServerLimits(header_seconds=0.4))
    connection, started = running.connect(), time.monotonic()
    with pytest.raises(OSError):
        for _ in range(100):
            connection.sendall(b"G")
            time.sleep(0.05)
    assert time.monotonic() - started < 3


def test_large_headers(serve):
    running = serve()
    assert running.ask("GET", "/health", x_long="y" * 20_000).status == 200
    connection = running.connect()
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 40_000)
    status, told = answer(connection)
    assert status == 431 and told["error"]["message"]


def test_what_is_no_http(serve):
    running = serve()
    connection = running.connect()
    connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    assert answer(connection)[0] == 400


def test_too_many_connections(serve):
    running = serve(limits=ServerLimits(connections=3))
    idle = [running.connect() for _ in range(3)]
    running.wait_until(lambda: len(running.server.server_state.connections) == 3)
    connection = running.connect()
    data = read_all(connection)
    assert b" 503 " in data.splitlines()[0] and b"Retry-After: 1" in data
    for each in idle:
        each.close()
    running.wait_until(lambda: not running.server.server_state.connections)
    assert running.ask("GET", "/health").status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_too_many_replies(serve, drawn_requests, stream):
    """429 with Retry-After, as a status also for a stream; later it works."""
    running = serve(limits=ServerLimits(replies=2))
    busy = running.send_chat(max_tokens=400, n=2)
    running.wait_until(lambda: drawn_requests)
    refused = running.chat(stream=stream)
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.error["type"] == "rate_limit_error"
    busy.close()
    running.wait_until(lambda: running.serving.waiting == 0)
    assert running.chat(max_tokens=2).status == 200


def test_a_reply_that_takes_too_long(serve, drawn_requests):
    running = serve(limits=ServerLimits(reply_seconds=0.3))
    refused = running.chat(max_tokens=400)
    assert refused.status == 408 and refused.error["code"] == "timeout"
    running.wait_until(lambda: running.serving.waiting == 0)
    last = running.chat(max_tokens=400, stream=True).body.strip().split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "timeout"


def test_comments_while_the_prompt_is_read(serve, drawn_requests, monkeypatch):
    """Before the first event, and between events; clients do not see them."""
    read_piece = Run.read_piece

    def slowly(run, most=None):
        time.sleep(0.3)
        return read_piece(run, most)

    monkeypatch.setattr(Run, "read_piece", slowly)
    running = serve(limits=ServerLimits(keep_alive=0.1))
    body = running.chat(max_tokens=3, stream=True).body
    assert body.startswith(b": ") and body.count(b"\n\n: ") + 1 >= 2
    assert body.endswith(b"data: [DONE]\n\n")
    openai = pytest.importorskip("openai", reason="the dependency group `clients` is not installed")
    with openai.OpenAI(base_url=running.url, api_key="x", max_retries=0) as client:
        chunks = list(
            client.chat.completions.create(model=running.model, messages=HI, max_tokens=3, stream=True)
        )
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"


def test_stopping_ends_replies(serve, drawn_requests):
    """Whoever waits gets one line, not a reply that looks whole."""
    running = serve()
    got = {}

    def ask(stream):
        got[stream] = running.chat(max_tokens=400, stream=stream)

    threads = [threading.Thread(target=ask, args=[stream]) for stream in (False, True)]
    for thread in threads:
        thread.start()
    running.wait_until(lambda: running.serving.waiting == 2 and len(drawn_requests) == 1)
    running.stop()
    for thread in threads:
        thread.join(20)
    assert got[False].status == 503 or b"stopping" in got[False].body
    assert b"stopping" in got[True].body


def test_stopping_waits_for_no_body(serve):
    """A client that sent half of a body held the end of the server up for ten seconds."""
    running = serve(limits=ServerLimits(body_seconds=600))
    with running.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        running.wait_until(lambda: running.serving.calls == 1)
        running.stop()
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"the server is stopping" in answer


def test_no_reply_begins_after_the_stop(serve, monkeypatch):
    """Also not the reply to a request whose schema is compiled while the server stops."""
    running, is_begun, is_stopped = serve(), threading.Event(), threading.Event()

    def compile_slowly(model, constraint, where):
        is_begun.set()
        assert is_stopped.wait(20)

    monkeypatch.setattr(prompts, "_compile", compile_slowly)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.chat, max_tokens=400, response_format={"type": "json_object"})
        assert is_begun.wait(20)
        running.loop.call_soon_threadsafe(running.serving.stop)
        running.wait_until(lambda: running.serving.stopping)
        is_stopped.set()
        refused = answer.result(60)
    assert (refused.status, refused.error["code"]) == (503, "stopping")


def test_slow_schemas_leave_threads_for_other_requests(serve, monkeypatch):
    """Forty schemas compile without an end. The list of models needs a thread, too."""
    running, is_over, begun = serve(), threading.Event(), []

    def compile_slowly(model, constraint, where):
        begun.append(constraint)
        assert is_over.wait(60)

    monkeypatch.setattr(prompts, "_compile", compile_slowly)
    with ThreadPoolExecutor(40) as pool:
        ask = partial(running.chat, max_tokens=1, response_format={"type": "json_object"})
        answers = [pool.submit(ask) for _ in range(40)]
        running.wait_until(lambda: begun and running.serving.calls == 40)
        assert running.ask("GET", "/v1/models").status == 200
        assert len(begun) <= grammar.AT_ONCE
        is_over.set()
        assert {answer.result(60).status for answer in answers} <= {200, 429, 503}


def test_a_reply_that_the_end_of_the_server_ends(serve):
    """The error of the reply has the code of the other errors of a server that stops."""
    running = serve()
    running.slow_down()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(running.chat, max_tokens=400)
        running.wait_until(lambda: running.serving.writing)
        running.loop.call_soon_threadsafe(running.serving.stop)
        ended = answer.result(60)
    assert (ended.status, ended.error["code"]) == (503, "stopping")


def test_an_internal_error(serve, monkeypatch):
    """The client gets an id, the log has it with the place; neither has the error's text."""
    running = serve()
    assert running.ask("GET", "/metrics").status == 200  # the server's start, which looks too, is over

    def raise_secret(self):
        raise ValueError("secret words")

    monkeypatch.setattr(type(running.serving.runtime), "memory_use", raise_secret)
    told = running.ask("GET", "/metrics")
    assert told.status == 500 and told.error["type"] == "server_error"
    log = running.log.getvalue()
    id = told.error["message"].split()[2].rstrip(";")
    assert id in log and "ValueError at" in log and "secret" not in log + told.body.decode()


def test_a_failure_of_the_event_loop(serve):
    """It is a line of the log, too, without its text."""
    running = serve()
    context = {"message": "secret", "exception": ValueError("secret words")}
    running.loop.call_soon_threadsafe(running.loop.call_exception_handler, context)
    running.wait_until(lambda: "ValueError at" in running.log.getvalue())
    assert "secret" not in running.log.getvalue()


def test_an_internal_error_in_a_stream(serve, monkeypatch):
    running = serve()
    draw = Run.draw

    def draw_and_break(run, record=True):
        if len(run.ids) == 3:
            raise ValueError("secret words")
        return draw(run, record)

    monkeypatch.setattr(Run, "draw", draw_and_break)
    body = running.chat(stream=True).body.decode()
    assert "internal error" in body and "[DONE]" not in body and "secret" not in body + running.log.getvalue()
    monkeypatch.undo()
    assert running.chat(max_tokens=2).status == 200


def test_a_log_that_cannot_be_written(serve, monkeypatch):
    """The server answers as usual if the disk of the log is full, or if the reader of the log has ended."""
    running = serve()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(running.log, "write", fail)
    refused = running.ask("GET", "/v1/nonsense")
    assert refused.status == 404 and refused.error["code"] == "unknown_path"
    assert running.chat(max_tokens=2).status == 200
    monkeypatch.undo()


class Panic(BaseException):
    """An error that is no Exception, as a panic of a library in Rust is."""


@pytest.mark.parametrize("place", ["encode_request", "generate"])
def test_a_panic_is_an_internal_error(serve, monkeypatch, place):
    """The client gets a 500 at once, and the log has the place of the panic without the text of the panic."""

    def panic(*_):
        raise Panic("secret words")

    running = serve()
    monkeypatch.setattr(running.serving.runtime.writer, place, panic)
    for stream in (False, True):
        told = running.chat(stream=stream)
        assert told.status == 500 and told.error["code"] == "internal_error"
    assert "Panic at" in running.log.getvalue() and "secret" not in running.log.getvalue()
    monkeypatch.undo()
    assert running.chat(max_tokens=2).status == 200


def test_no_piece_of_an_answer_waits_for_an_acknowledgement(serve):
    """Without TCP_NODELAY the second request of a connection, and each that follows, takes 40 ms more."""
    running = serve()
    with running.connect():
        running.wait_until(lambda: running.server.server_state.connections)
        [found] = running.server.server_state.connections
        ours = found.transport.get_extra_info("socket")
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

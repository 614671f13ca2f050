"""Requests against the memory: of KV caches, and of the bodies that say what is wanted."""

import json
import threading

import pytest
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.limits import ServerLimits

from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from ruvmlx.text import size as size_text
from tests.models.make_models import make_safetensors_model

from .conftest import run_server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Each byte is a token."""
    return load_model(
        str(make_safetensors_model(tmp_path_factory.mktemp("m") / "byte-llama", max_context=1024))
    )


@pytest.fixture
def start_small(model, tmp_path, serve_all):
    """small(pages, **limits) -> a server whose KV budget is so many pages in f16."""

    def start(pages: float, **limits):
        def open_runtime():
            backend = open_backend("native", model, threads=1)
            backend.pool.budget, backend.pool.pressure = int(pages * backend.pool.sizes[-1]), lambda: 0.0
            settings = Settings(adapter="none", kv="f16", kv_disk=None)
            return Runtime(Store(tmp_path / "ruvmlx.db"), model, backend, settings, learn=False)

        running = run_server(open_runtime, Access(), ServerLimits(**limits))
        serve_all.append(running)
        return running

    yield start
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


def test_what_can_never_fit_names_the_field(start_small):
    running = start_small(4)
    refused = running.chat("x" * 300, max_tokens=100)
    assert refused.status == 400 and refused.error["param"] == "max_tokens"
    assert refused.error["code"] == "cache_too_large" and "the budget is" in refused.error["message"]
    assert running.chat("hello", max_tokens=20).status == 200
    assert running.chat("hello", n=16, max_tokens=1).status == 200  # one after the other


def test_a_reply_without_a_limit_ends_where_the_budget_does(start_small):
    running = start_small(3)
    body = running.body(messages=[{"role": "user", "content": "hello"}])
    del body["max_tokens"]
    done = running.ask("POST", "/v1/chat/completions", body).json
    assert done["usage"]["total_tokens"] <= 3 * 64


def test_a_full_budget_is_503_with_the_numbers(start_small):
    """One reply takes all of it: the next request waits, then gets 503; behind one that waits, at once."""
    running = start_small(4, memory_seconds=1.0, memory_waits=1, keep_alive=0.2)
    got: list = []
    busy = threading.Thread(target=lambda: got.append(running.chat("a", max_tokens=200)))
    slow_steps(running)
    busy.start()
    running.wait_until(lambda: running.serving.runtime.writer.scheduler.counts[0] == 1)
    waits = threading.Thread(target=lambda: got.append(running.chat("b", max_tokens=200)))
    waits.start()
    running.wait_until(lambda: running.serving.runtime.writer.scheduler.counts[1] == 1)
    refused = running.chat("c", max_tokens=200, stream=True)
    assert refused.status == 503 and 1 <= int(refused.headers["retry-after"]) <= 60
    size = running.serving.runtime.backend.pool.sizes[-1]
    assert (
        refused.error["code"] == "memory_busy"
        and f"needs {size_text(4 * size)}, " in refused.error["message"]
    )
    waits.join()
    assert got[0].status == 503 and "free" in got[0].error["message"]
    busy.join()
    assert got[1].status == 200


def test_replies_of_one_request_wait_for_each_other(start_small, endless):
    """Only one fits at a time, and each takes longer than a request may wait: all are written, none twice."""
    running = start_small(4, memory_seconds=0.2, memory_waits=1)
    slow_steps(running)
    done = running.chat("a", n=3, max_tokens=40)
    assert done.status == 200, done.body
    assert [choice["finish_reason"] for choice in done.json["choices"]] == ["length"] * 3
    assert done.json["usage"]["completion_tokens"] == 120
    assert "ruvmlx_generated_tokens_total 120" in running.ask("GET", "/metrics").body.decode()


def slow_steps(running):
    """The engine takes a while for each token."""
    scheduler = running.serving.runtime.writer.scheduler
    step = scheduler.step

    def slowly():
        threading.Event().wait(0.03)
        return step()

    scheduler.step = slowly


def test_all_bodies_together_have_a_limit(start_small):
    """Bodies that are being read count, and are given back however they end."""
    running = start_small(4, bodies=100_000)
    bodies = running.serving.bodies
    slow = running.connect()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    slow.sendall(f"{head}Content-Length: 90000\r\n\r\n".encode() + b" " * 60_000)
    running.wait_until(lambda: bodies.held >= 60_000)
    large = json.dumps({"model": running.model, "messages": [], "padding": "x" * 50_000}).encode()
    refused = running.ask("POST", "/v1/chat/completions", large)
    assert refused.status == 503 and refused.error["code"] == "bodies_busy"
    assert refused.headers["retry-after"] == "1" and "of 100000 bytes" in refused.error["message"]
    assert running.chat("hello").status == 200
    slow.close()
    running.wait_until(lambda: bodies.held == 0)
    assert running.ask("POST", "/v1/chat/completions", large).status == 400
    running.wait_until(lambda: bodies.held == 0)

"""One server, several models of this machine: `model` in a request names any of them."""

import asyncio
import json
import shutil
import threading
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from ruvmlx.apps.attach import route
from ruvmlx.apps.attach.client import Link
from ruvmlx.apps.bench.random_model import make
from ruvmlx.apps.cli import cli
from ruvmlx.apps.cli.open_models import _row as ps_row
from ruvmlx.apps.server import model_pool
from ruvmlx.apps.server.access import Access
from ruvmlx.apps.server.installed import InstalledModels
from ruvmlx.apps.server.limits import ServerLimits
from ruvmlx.apps.server.memory_share import MemoryShare, PooledModel, plan_bytes
from ruvmlx.apps.server.model_pool import ModelPool

from ruvmlx.errors import CorruptFile, ModelClosed, StoreBusy
from ruvmlx.host.host import Host
from ruvmlx.host.model_holder import Opener
from ruvmlx.memory.load_plan import PROGRAM, NotEnoughMemory
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from tests.models.gguf_writer import u32, write_gguf
from tests.models.make_gguf import gguf_metadata, gguf_tensors
from tests.models.shapes import Shape

from .conftest import CHAT_KEY, run_server

A, B = "lmstudio:tests/one", "lmstudio:tests/two"
KEY = {"authorization": f"Bearer {CHAT_KEY}"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home folder whose LM Studio has two small models."""
    found = tmp_path_factory.mktemp("home")
    for name in ("one", "two"):
        folder = found / ".lmstudio" / "models" / "tests" / name
        folder.mkdir(parents=True)
        make("narrow", folder / f"{name}.gguf")
    return found


@pytest.fixture
def serve_models(home, tmp_path, monkeypatch, serve_all):
    """serve_models(models, ...) -> a server whose memory holds so many models; A is its first."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("RUVMLX_HOME", str(tmp_path))

    def start(models: float = 4, unload_after: float = 0.0, **limits):
        settings = Settings(model=A, backend="native", threads=1, max_context=256)
        installed, made = InstalledModels(settings), []
        opener = Opener(lambda model, adapter, watch: _open(settings, model, adapter, watch), A)
        bytes_of_one = PooledModel(A, None, installed.need(installed.all()[A])).bytes  # type: ignore[arg-type]
        share = MemoryShare(PROGRAM + int(models * bytes_of_one), is_fixed=True)

        def pool(first):
            made.append(ModelPool(first, opener, installed, share, unload_after))
            return made[0]

        access = Access(chat_keys=[CHAT_KEY])
        running = run_server(opener, access, ServerLimits(**limits), pool, alias=A)
        serve_all.append(running)
        running.models = made[0]
        return running

    yield start
    for running in serve_all:
        running.stop()
        assert "Traceback" not in running.log.getvalue()


def _open(settings, model, adapter, watch):
    return Runtime.open(replace(settings, model=model, adapter=adapter or "none"), watch=watch)


def ask(running, model, **fields):
    return running.chat(**{"model": model, "max_tokens": 2, **fields})


def open_names(running):
    return [row["model"] for row in running.ask("GET", "/v1/ps").json["models"]]


def metric(running, name):
    """The sum of a counter over its labels."""
    text = running.ask("GET", "/metrics").body.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


class MemoryWatch:
    """Looks, all the time, at what the open models take: by the plan, and in fact."""

    def __init__(self, running):
        self._models, self._over = running.models, threading.Event()
        self.planned: list[int] = []
        self.taken: list[int] = []
        self._thread = threading.Thread(target=self._look)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._over.set()
        self._thread.join()

    def _look(self):
        while not self._over.wait(0.002):
            runtimes = [m.serving.host.holder.runtime for m in list(self._models._models)]
            backends = [r.backend for r in runtimes if r is not None]
            self.planned.append(plan_bytes(self._models.open_models))
            self.taken.append(PROGRAM + sum(b.nbytes + b.pool.nbytes for b in backends))


@pytest.mark.parametrize("requests", [6, pytest.param(40, marks=pytest.mark.full)])
def test_two_models_take_turns_in_memory_for_one_and_a_half(serve_models, requests):
    """Requests to one and the other: none is refused, each costs a swap, and memory stays within the plan."""
    running = serve_models(1.5)
    with MemoryWatch(running) as watch:
        replies = [ask(running, (A, B)[i % 2]) for i in range(requests)]
    assert [reply.status for reply in replies] == [200] * requests
    assert {reply.json["model"] for reply in replies} == {A, B}
    assert metric(running, "ruvmlx_model_loads_total{") == requests - 1
    assert metric(running, "ruvmlx_model_unloads_total{") == requests - 1
    limit = running.models.share.limit
    assert len(watch.taken) > requests and max(watch.taken) > PROGRAM
    assert max(watch.planned) <= limit and max(watch.taken) <= limit


def test_two_models_stay_open_where_there_is_room(serve_models):
    """They answer beside each other, and as they do alone."""
    running, got = serve_models(4), {}
    alone = {name: ask(running, name, max_tokens=8).json["choices"][0]["message"] for name in (A, B)}

    def one(i):
        got[i] = ask(running, (A, B)[i % 2], max_tokens=8).json["choices"][0]["message"]

    threads = [threading.Thread(target=one, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == [alone[A], alone[B]] * 3
    assert open_names(running) == [A, B] and metric(running, "ruvmlx_model_loads_total{") == 1


def test_no_request_waits_for_what_another_model_prepares(serve_models, monkeypatch):
    """The status names that work; the figures of the others are those from before."""
    running, begun, ended = serve_models(4), threading.Event(), threading.Event()
    ask(running, B)
    second = running.models.open_models[1].serving
    running.wait_until(lambda: not second.idle_work)

    def settle(cancel, watch, unseen):
        if not begun.is_set():
            begun.set()
            cancel.wait(20)
            ended.set()

    monkeypatch.setattr(second.host.holder.opened_runtime.learning, "settle", settle)
    ask(running, B)
    assert begun.wait(20)
    assert running.ask("GET", "/v1/status").json["idle_work"] == "preparing"
    assert 'work="preparing"} 1' in running.ask("GET", "/metrics").body.decode()
    assert open_names(running) == [A, B] and not ended.is_set()
    assert running.ask("POST", "/tokenize", {"content": "hello"}).status == 200
    body = {"model": A, "messages": [{"role": "user", "content": "hello"}]}
    assert running.ask("POST", "/v1/messages/count_tokens", body).status == 200 and ended.is_set()


def test_a_model_that_writes_is_not_closed(serve_models, endless):
    """The other one's request waits for its end, and a later request behind that one."""
    running, done = serve_models(1.5), []

    def one(model, tokens):
        done.append((model, ask(running, model, max_tokens=tokens).json["choices"][0]["finish_reason"]))

    asked = [(A, 120), (B, 2), (A, 2)]
    threads = [threading.Thread(target=one, args=each) for each in asked]
    for i, thread in enumerate(threads):
        thread.start()
        running.wait_until(lambda i=i: running.serving.calls == i + 1 or len(done) > i, 60)
        if i == 1:  # its model's file was found, and it waits in turn
            running.wait_until(lambda: running.models._turn.locked() or len(done) > 1, 60)
    for thread in threads:
        thread.join()
    assert done == [(A, "length"), (B, "length"), (A, "length")]
    assert metric(running, "ruvmlx_model_loads_total{") == 2


@pytest.fixture
def slow_to_open(monkeypatch):
    """Opening a model takes a second. Returns the hosts that were opened."""
    began, opens = [], Host.open

    async def slowly(host, watch):
        began.append(host)
        await asyncio.sleep(1.0)
        await opens(host, watch)

    return lambda: (monkeypatch.setattr(Host, "open", slowly), began)[1]


def test_a_stream_is_kept_alive_while_its_model_is_opened(serve_models, slow_to_open):
    running = serve_models(keep_alive=0.1)
    slow_to_open()
    body = ask(running, B, stream=True).body
    assert body.startswith(b": ") and body.rstrip().endswith(b"data: [DONE]")
    assert body.index(b": the reply") < body.index(b"data: {")


def test_a_client_that_leaves_stops_no_opening(serve_models, slow_to_open):
    """Another one waits for the same model, which is opened once."""
    running, got = serve_models(), []
    began = slow_to_open()
    leaving = running.send_chat(model=B)
    running.wait_until(lambda: began, 60)
    staying = threading.Thread(target=lambda: got.append(ask(running, B)))
    staying.start()
    leaving.close()
    staying.join()
    assert got[0].status == 200 and len(began) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreBusy("locked"), 503), (ModelClosed("closed"), 503), (CorruptFile("damaged"), 404)],
)
def test_an_error_that_passes_is_no_missing_model(serve_models, monkeypatch, error, status):
    running = serve_models()

    async def fail(self, watch):
        raise error

    monkeypatch.setattr(Host, "open", fail)
    answer = ask(running, B)
    assert answer.status == status and ("retry-after" in answer.headers) == (status == 503)


def test_names(serve_models):
    """What is installed is listed, whether it is open or not; an adapter may be named with it."""
    running = serve_models()
    names = [card["id"] for card in running.ask("GET", "/v1/models").json["data"]]
    assert names[:1] == [A] and B in names and len(names) == len(set(names))
    assert ask(running, f"{B}@none").status == 200 and open_names(running) == [A, B]
    assert f"{B}@none" in [card["id"] for card in running.ask("GET", "/v1/models").json["data"]]
    for wrong in ("lmstudio:tests/twoo", "two"):
        missing = ask(running, wrong)
        assert missing.status == 404 and f"Did you mean '{B}'?" in missing.error["message"]
    assert ask(running, f"{B}@work").error["code"] == "adapter_not_found"
    context = running.ask("GET", "/v1/models", anthropic_version="2023-06-01").json["data"]
    assert {card["max_input_tokens"] for card in context if card["id"] in (A, B)} == {256}


def test_what_never_fits_is_refused(serve_models):
    running = serve_models()
    running.models.share.limit = running.models.first.need.total - 1
    refused = ask(running, B)
    assert refused.status == 400 and refused.error["code"] == "model_too_large"
    assert "server_memory" in refused.error["message"] and ask(running, A).status == 200


def test_a_budget_below_the_first_model_is_one_line(serve_models):
    running = serve_models()
    running.models.share.limit = PROGRAM
    with pytest.raises(NotEnoughMemory, match=r"server_memory is .*needs about"):
        asyncio.run(running.models.share.begin(running.models.first))


def test_the_verbs_ask_the_server(serve_models, tmp_path):
    """`ps` and `stop`, with the key that the data folder has."""
    keys = tmp_path / "api_keys"
    keys.write_text(CHAT_KEY)
    keys.chmod(0o600)
    running, ended = serve_models(), []
    running.models.end = lambda: ended.append(True)
    at = ("--server", f"http://127.0.0.1:{running.port}")
    assert ask(running, B).status == 200
    printed = CliRunner().invoke(cli, ["ps", *at])
    assert all(f"{name} " in printed.output for name in (A, B)), repr(printed.exception)
    for words in ("default, version 0", "idle for", "The whole server takes "):
        assert words in printed.output
    found = json.loads(CliRunner().invoke(cli, ["ps", "--json", *at]).stdout)
    assert [row["is_first"] for row in found["models"]] == [True, False]
    for row in found["models"]:
        assert row["name"] == row["model"] and row["idle_s"] == row["idle_seconds"]
        assert row["bytes"] == row["model_bytes"] + row["kv_bytes"] > 0 and row["adapter"] == "default@0"
    assert found["planned_bytes"] <= found["limit_bytes"]
    assert "is closed" in CliRunner().invoke(cli, ["stop", B, *at]).output and open_names(running) == [A]
    assert "was not open" in CliRunner().invoke(cli, ["stop", B, *at]).output
    failed = CliRunner().invoke(cli, ["stop", "lmstudio:tests/twoo", *at])
    assert failed.exit_code and "Did you mean" in str(failed.exception)
    assert not ended and "stops" in CliRunner().invoke(cli, ["stop", *at]).output and ended


@pytest.mark.parametrize(
    ("requests", "replies", "now"),
    [
        (0, 0, "idle for 2 s"),
        (1, 1, "writes 1 reply"),
        (1, 0, "answers 1 request"),
        (0, 2, "writes 2 replies"),
    ],
)
def test_ps_says_what_a_model_does(requests, replies, now):
    """Embeddings and counts of tokens are requests without a reply."""
    row = {"model": A, "adapter": None, "model_bytes": 1, "kv_bytes": 0, "kv_limit_bytes": 0}
    assert ps_row(row | {"requests": requests, "replies": replies, "idle_seconds": 2.0})[-1] == now


def test_a_model_that_nobody_uses_is_closed(serve_models, monkeypatch):
    """The first one stays."""
    monkeypatch.setattr(model_pool, "UNLOAD_EVERY", 0.05)
    running = serve_models(unload_after=0.2)
    assert ask(running, B).status == 200
    running.wait_until(lambda: open_names(running) == [A], 60)
    time.sleep(0.3)
    assert open_names(running) == [A] and ask(running, B).status == 200


def test_a_fault_while_a_model_closes_does_not_keep_later_models_open(serve_models, monkeypatch):
    monkeypatch.setattr(model_pool, "UNLOAD_EVERY", 0.05)
    running, close, faults = serve_models(unload_after=0.2), Runtime.close, [OSError("a disk fault")]

    def close_with_fault(runtime):
        close(runtime)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(Runtime, "close", close_with_fault)
    for _ in range(2):
        assert ask(running, B).status == 200
        running.wait_until(lambda: open_names(running) == [A], 15)
    assert not faults and "OSError at" in running.log.getvalue()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_at_the_end_each_model_closes_even_if_another_fails(serve_models, home, monkeypatch):
    """A model saves its data when it closes."""
    third = home / ".lmstudio" / "models" / "tests" / "three"
    shutil.copytree(third.with_name("two"), third)
    running, close, closed = serve_models(), Runtime.close, []

    def close_or_fail(runtime):
        close(runtime)
        closed.append(runtime.model.name)
        if len(closed) == 1:
            raise StoreBusy("another program uses the store.")

    assert ask(running, B).status == ask(running, "lmstudio:tests/three").status == 200
    shutil.rmtree(third)
    monkeypatch.setattr(Runtime, "close", close_or_fail)
    running.stop()
    assert len(closed) == 3


def test_a_rating_finds_the_model_that_wrote(serve_models):
    """Also after it was closed. The label has the version of the store."""
    running = serve_models()
    id = ask(running, B).json["id"]
    assert running.ask("POST", "/v1/stop", {"model": B}, **KEY).json == {"model": B, "was_open": True}
    assert open_names(running) == [A]
    rated = running.ask("POST", "/v1/ratings", {"id": id, "rating": "up"})
    assert rated.status == 200 and rated.json["applied"], rated.body
    rows = {row["model"]: row["adapter"] for row in running.ask("GET", "/v1/ps").json["models"]}
    assert rows[B] == "default@1"
    assert running.ask("DELETE", f"/v1/ratings/{id}").json["deleted"]


def test_ollamas_keep_alive_and_ps(serve_models):
    running = serve_models()
    hello = {"messages": [{"role": "user", "content": "hello"}], "options": {"num_predict": 2}}
    lines = running.ask("POST", "/api/chat", {"model": B, **hello, "keep_alive": "5m"}).body.splitlines()
    last = json.loads(lines[-1])
    assert last["done"] and last["load_duration"] > 1e7  # the server opened the model for this request
    assert last["load_duration"] < last["total_duration"]
    assert [m["model"] for m in running.ask("GET", "/api/ps").json["models"]] == [A, B]
    running.ask("POST", "/api/chat", {"model": B, **hello, "keep_alive": 0})
    running.wait_until(lambda: open_names(running) == [A], 60)
    adapter = running.ask("GET", "/v1/status").json["adapter"]
    done = running.ask("POST", "/api/generate", {"model": A, "keep_alive": "0s", "stream": False}).json
    assert done["done_reason"] == "unload"
    running.wait_until(lambda: open_names(running) == [], 60)
    assert running.ask("POST", "/api/show", {"model": A}).json["model_info"]["llama.block_count"] == 32
    status = running.ask("GET", "/v1/status").json
    assert status["memory"]["model_bytes"] == 0 and status["adapter"] == adapter == "default@0"
    assert ask(running, A).status == 200 and open_names(running) == [A]


@pytest.fixture
def attach():
    """attach(server) connects a terminal to the server, and returns the connection. The terminal keeps the
    first model open."""
    links = []

    def attach(running):
        links.append(Link(running.url, CHAT_KEY))
        running.wait_until(lambda: running.models.first.users)
        return links[-1]

    yield attach
    for link in links:
        link.close()


def test_a_model_to_close_that_is_in_use_holds_up_no_request(serve_models, attach, monkeypatch):
    """A terminal uses it. The model is closed when the terminal leaves; many wishes cost what one does."""
    monkeypatch.setattr(route, "HELLO_SECONDS", 60.0)
    running, stopped = serve_models(), []
    terminal = attach(running)
    for _ in range(3):
        done = running.ask("POST", "/api/generate", {"model": A, "keep_alive": 0, "stream": False}).json
        assert done["done_reason"] == "unload"
    stopping = threading.Thread(
        target=lambda: stopped.append(running.ask("POST", "/v1/stop", {"model": A}, **KEY).json)
    )
    stopping.start()
    running.wait_until(lambda: running.serving.calls)
    assert ask(running, A).status == 200 and ask(running, B).status == 200
    assert open_names(running) == [A, B] and not stopped and len(running.models._closing) == 1
    terminal.close()
    stopping.join()
    assert stopped == [{"model": A, "was_open": True}] and open_names(running) == [B]
    running.wait_until(lambda: not running.models._closing)


def test_a_model_without_room_beside_a_terminal_is_refused_at_once(serve_models, attach, monkeypatch):
    """The terminal's model makes no room for it, and answers on; when the terminal leaves, there is room."""
    monkeypatch.setattr(route, "HELLO_SECONDS", 60.0)
    running = serve_models(1.5)
    terminal = attach(running)
    refused = ask(running, B)
    assert refused.status == 503 and refused.error["code"] == "memory_busy" and refused.headers["retry-after"]
    assert refused.error["message"].startswith(f"model: {B} needs about ")
    assert ask(running, A).status == 200 and open_names(running) == [A]
    terminal.close()
    running.wait_until(lambda: not running.models.first.users)
    assert ask(running, B).status == 200 and open_names(running) == [B]


def test_stopping_needs_a_key_and_no_web_page(serve_models):
    running, ended = serve_models(), []
    running.models.end = lambda: ended.append(True)
    assert running.ask("POST", "/v1/stop", {}).status == 401
    page = {"origin": "http://localhost:3000"}
    assert running.ask("POST", "/v1/stop", {}, **KEY, **page).status == 403 and not ended
    for body in ({}, b"", None):  # `curl -X POST` sends no body
        ended.clear()
        answer = running.ask("POST", "/v1/stop", body, **KEY)
        assert answer.json == {"model": None, "was_open": True} and ended


@pytest.fixture
def embedder(home):
    """The name of a model that is trained to embed texts."""
    folder = home / ".lmstudio" / "models" / "tests" / "reader"
    made, kind = Shape(family="qwen3"), {"qwen3.pooling_type": u32(3)}
    folder.mkdir()
    write_gguf(folder / "reader.gguf", gguf_metadata(made) | kind, gguf_tensors(made, "Q8_0"))
    yield "lmstudio:tests/reader"
    shutil.rmtree(folder)


def test_embedding_names_the_embedding_model_of_the_machine(serve_models, embedder):
    """It is opened for that; the answer names it, and says how it embeds. Chats do not have this name."""
    running = serve_models()
    schemas = running.ask("GET", "/openapi.json").json["components"]["schemas"]
    for body, known in (("EmbeddingBody", True), ("RerankBody", True), ("ChatBody", False)):
        assert ("embedding" in schemas[body]["properties"]["model"]["enum"]) is known
    asked = {"input": ["hello", "the sea"]}
    found = running.ask("POST", "/v1/embeddings", {"model": "embedding", **asked}).json
    assert found["model"] == embedder and "trained for it" in found["method"]
    same = running.ask("POST", "/v1/embeddings", {"model": embedder, **asked}).json
    assert same == found and len(found["data"][0]["embedding"]) == 64
    other = running.ask("POST", "/v1/embeddings", {"model": A, **asked}).json
    assert other["model"] == A and "chat model" in other["method"] and other["data"] != found["data"]
    ranked = running.ask(
        "POST", "/v1/rerank", {"model": "embedding", "query": "sea", "documents": ["a", "b"]}
    )
    assert ranked.json["model"] == embedder and embedder in ranked.json["method"]
    latest = running.ask("POST", "/v1/embeddings", {"model": "embedding:latest", **asked}).json
    assert latest == found
    by_ollama = running.ask("POST", "/api/embed", {"model": "embedding:latest", **asked}).json
    assert by_ollama["model"] == embedder and len(by_ollama["embeddings"]) == 2
    assert running.ask("POST", "/api/show", {"model": embedder}).json["capabilities"] == ["embedding"]
    assert ask(running, "embedding").status == 404


def test_without_an_embedding_model_it_is_the_first_one(serve_models):
    running = serve_models()
    found = running.ask("POST", "/v1/embeddings", {"model": "embedding", "input": "hello"}).json
    assert found["model"] == A and "chat model" in found["method"]

"""A lost rank ends the others with one line, soon, and leaves the store whole; a wrong rank is refused."""

import contextlib
import queue
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ruvmlx.backends.sharded import cluster, messages, peers, place
from ruvmlx.backends.sharded.cluster import PeerRefused
from ruvmlx.settings import store_file
from ruvmlx.store import Store
from tests.models.make_models import make_safetensors_model

from .shared_model import WAIT, ranks, start_asking

SOON = 10.0  # seconds; half a second was measured


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"n_layers": 1, "n_heads": 6, "n_kv_heads": 6, "max_context": 2048}
    return make_safetensors_model(tmp_path_factory.mktemp("lost") / "m", **sizes)


@pytest.mark.parametrize("n, killed", [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_each_rank_killed_in_the_middle_of_a_prompt(folder, home, n, killed):
    with ranks(n) as others, start_asking(folder) as first:
        assert first.stdout.readline() == "reading\n", first.stderr.read()
        every = [first, *others]
        every.pop(killed).kill()
        started = time.monotonic()
        for process in every:
            process.wait(WAIT)
        took = time.monotonic() - started
        lines = [process.stderr.read().splitlines() for process in every]
    name = "rank 0" if not killed else f"rank {killed} "
    assert [len(found) for found in lines] == [1] * (n - 1), lines
    assert lines[0][0].startswith("ruvmlx: rank ") and name in lines[0][0] and "is lost" in lines[0][0]
    assert took < SOON
    check_store()


def test_a_rank_that_stands_still_is_lost(folder, home):
    """As a pulled cable: nothing comes, and no connection is closed."""
    with ranks(2) as (other,), start_asking(folder) as first:
        assert first.stdout.readline() == "reading\n", first.stderr.read()
        other.send_signal(signal.SIGSTOP)
        first.wait(WAIT)
        other.kill()
        said = first.stderr.read()
    assert said.startswith("ruvmlx: rank 1 ") and "it sent nothing for 8 seconds" in said
    check_store()


def test_a_long_message_may_take_longer_than_a_silence(monkeypatch):
    """Bytes that move are no silence."""
    monkeypatch.setattr(peers, "SILENCE", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as server:
        here, (there, _) = socket.create_connection(server.getsockname()), server.accept()
    with here, there:
        link = peers.PeerLink(here, "rank 1", lambda link: None)
        sender = threading.Thread(target=link.send, args=({"do": "restore"}, bytes(1 << 24)))
        sender.start()
        while sender.is_alive():
            there.sendall(messages.encode({"do": "beat"}))
            there.recv(1 << 20)
            time.sleep(0.1)
        assert not link.lost
        link.close()


def test_a_signal_in_a_step_keeps_its_exit_code():
    """It ends the process; no other rank is lost."""
    links = peers.PeerLinks()
    with pytest.raises(SystemExit), links.step():
        raise SystemExit(143)
    with pytest.raises(peers.PeerLost, match="out of step"):
        links.check()


@pytest.mark.parametrize("ends", [True, False])
def test_a_failed_step_ends_a_server(monkeypatch, ends):
    """Otherwise the server answers each later request with an error. A chat shows the error of each reply."""
    lines, links = queue.Queue(), peers.PeerLinks()
    monkeypatch.setattr(peers, "GRACE", 0.01)
    monkeypatch.setattr(peers, "end_process", lines.put)
    links.ends_when_idle = ends
    with pytest.raises(peers.PeerLost, match="out of step: out of memory"), links.step():
        raise RuntimeError("out of memory")
    if ends:
        assert "out of step: out of memory" in lines.get(timeout=WAIT)
    else:
        time.sleep(0.1)
        assert lines.empty()


def check_store() -> None:
    with sqlite3.connect(store_file()) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with contextlib.closing(Store(store_file())) as store:
        assert store.replies.get("last") is not None


def refusal(**changes: str) -> tuple[str, str]:
    """Return what rank 0 and the other rank say."""
    with ranks(2, **changes) as (other,):
        with pytest.raises(PeerRefused) as found:
            cluster.join_ranks.__wrapped__()
        other.wait(WAIT)
        return str(found.value), other.stderr.read()


def test_a_rank_with_another_key_is_refused():
    said, there = refusal(**{place.KEY: "another"})
    assert "rank 1" in said and "has the key of another start" in said
    assert there == f"ruvmlx: {said}\n"


def test_a_rank_with_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(cluster, "installed_versions", lambda: "ruvmlx 0.0.1 with MLX 0.1")
    said, there = refusal()
    assert f"has {peers.installed_versions()}; rank 0 has ruvmlx 0.0.1 with MLX 0.1. Install the same" in said
    assert there == f"ruvmlx: {said}\n"


def test_ranks_that_do_not_come_are_named(monkeypatch):
    monkeypatch.setattr(cluster, "ARRIVE", 0.3)
    with ranks(2, **{place.LEADER: "127.0.0.1:1"}), pytest.raises(PeerRefused, match="rank 1 did not come"):
        cluster.join_ranks.__wrapped__()


def test_a_rank_that_has_come_hears_rank_0_while_another_is_late():
    """Else it takes rank 0 for lost after some seconds."""
    at, links = place.RankPlace(0, 3, ("127.0.0.1", 0), "key", "ring"), peers.PeerLinks()
    with socket.create_server(at.leader) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster._accept_all, server, at, links)
        with hello(server, 2) as early:
            assert messages.read(early)[0] == {"do": "beat"}
            with hello(server, 1):
                waiting.result(WAIT)
                assert [link.name for link in links.links] == ["rank 1 (mac)", "rank 2 (mac)"]
                links.close()


def test_a_rank_that_is_lost_while_another_is_late_is_named():
    at, links = place.RankPlace(0, 3, ("127.0.0.1", 0), "key", "ring"), peers.PeerLinks()
    with socket.create_server(at.leader) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(cluster._accept_all, server, at, links)
        hello(server, 1).close()
        with pytest.raises(peers.PeerLost, match=r"rank 1 \(mac\) is lost: its process has ended"):
            waiting.result(SOON)


def hello(server: socket.socket, rank: int) -> socket.socket:
    """Return the connection of a new rank."""
    sock = socket.create_connection(server.getsockname(), SOON)
    facts = {"do": "hello", "rank": rank, "key": "key", "host": "mac", "version": peers.installed_versions()}
    sock.sendall(messages.encode(facts))
    return sock


def test_other_programs_do_not_disturb_the_start(monkeypatch):
    """A connection that says nothing of ruvmlx is closed, and the wait goes on."""
    monkeypatch.setattr(cluster, "ARRIVE", 0.3)
    link, other = socket.socketpair()
    with link, other:
        other.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert cluster._read_hello(link) is None


@pytest.mark.parametrize("at", [0, 13, -1])
def test_a_damaged_message_is_refused(at):
    message = bytearray(messages.encode({"do": "lora"}, b"weights of an adapter"))
    message[at] ^= 1
    link, other = socket.socketpair()
    with link, other:
        link.settimeout(1)
        other.sendall(message)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises((messages.BadMessage, EOFError)):
            messages.read(link)


def test_a_message_arrives_whole():
    link, other = socket.socketpair()
    with link, other:
        other.sendall(messages.encode({"do": "lora", "n": 3}, b"weights"))
        facts, data = messages.read(link)
    assert facts == {"do": "lora", "n": 3, "hash": messages.digest(b"weights")} and data == b"weights"

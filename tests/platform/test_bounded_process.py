"""A child process that computes for ever, takes all memory or dies ends the request, and nothing else."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ruvmlx.errors import UsageError
from ruvmlx.platform import bounded_process, memory
from ruvmlx.platform.bounded_process import BoundedProcess, ProcessEnded, stop_requests

CHILD = """
import os, sys, time
from ruvmlx.errors import UsageError
from ruvmlx.platform.bounded_process import answer_requests

def answer(request):
    what, value = request
    if what == "spin":
        while True:
            pass
    if what == "sleep":
        time.sleep(value)
    if what == "fill":
        return len(b"x" * value)
    if what == "refuse":
        raise UsageError(value)
    if what == "exit":
        os._exit(value)
    if what == "pid":
        return os.getpid()
    if what == "print":
        print(value, flush=True)
        print(value, file=sys.stderr, flush=True)
    return value

answer_requests(answer)
"""
MEMORY = 100 << 20


@pytest.fixture
def child(tmp_path, monkeypatch):
    (tmp_path / "a_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process = BoundedProcess("a_child")
    yield process
    process.close()


def ask(process, what, value=None, seconds=60.0):
    return process.ask([what, value], seconds, MEMORY)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers(child):
    """One child answers all requests; values of any size and text come back."""
    pid = ask(child, "pid")
    for value in (None, "é\ud800\0\u2028", ["x" * 3_000_000, {"a": 1.5}]):
        assert ask(child, "say", value) == value
    with pytest.raises(UsageError, match="no such thing"):
        ask(child, "refuse", "no such thing")
    assert ask(child, "pid") == pid != os.getpid()


def test_a_child_that_the_system_ended_is_replaced(child):
    """For example by the system's own killer of processes, when memory is short."""
    pid = ask(child, "pid")
    os.kill(pid, signal.SIGKILL)
    assert ask(child, "say", "again") == "again" and ask(child, "pid") != pid


@pytest.mark.parametrize("what, value, seconds", [("spin", 0, 0.2), ("exit", 3, 60), ("fill", 10**9, 60)])
def test_limits(child, what, value, seconds):
    """Time, memory, a death: the request ends, and a new child answers the next one."""
    with pytest.raises(ProcessEnded) as ended:
        ask(child, what, value, seconds)
    assert ("MemoryError" in str(ended.value)) == (what == "fill")  # this one the child sees itself
    assert ask(child, "say", 1) == 1


def test_a_child_that_waits_is_ended_by_the_clock(child, monkeypatch):
    ask(child, "say")
    monkeypatch.setattr(bounded_process, "WAIT", 1)
    with pytest.raises(ProcessEnded):
        ask(child, "sleep", 10_000, 0.2)


@pytest.mark.parametrize("used", [MEMORY, MEMORY + 1], ids=["within the limit", "above it"])
def test_a_child_above_the_memory_limit_is_ended_on_macos(child, monkeypatch, used):
    """A check starts no new process, because the parent checks ten times a second."""
    pid = ask(child, "pid")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(memory, "darwin_footprint", lambda process: used if process == pid else 0)
    monkeypatch.setattr(subprocess, "run", None)
    if used > MEMORY:
        with pytest.raises(ProcessEnded):
            ask(child, "sleep", 10_000)
    else:
        assert ask(child, "sleep", 0.3) == 0.3


def test_a_child_prints_nothing(child, capfd):
    assert ask(child, "print", "hello") == "hello"
    assert capfd.readouterr() == ("", "")


def test_ctrl_c_ends_a_request(child):
    """In the main thread it is a KeyboardInterrupt at once; no child is left."""
    pid = ask(child, "pid")
    interrupt = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        ask(child, "sleep", 10_000, 10_000)
    interrupt.join()
    assert is_gone(pid) and ask(child, "say", 1) == 1


def test_requests_of_other_threads_can_be_stopped(child):
    """stop_requests ends those that are being worked on; a child at rest stays."""
    pid, ended = ask(child, "pid"), threading.Event()

    def wait():
        with pytest.raises(ProcessEnded):
            ask(child, "sleep", 10_000, 10_000)
        ended.set()

    stop_requests()
    assert ask(child, "pid") == pid
    thread = threading.Thread(target=wait)
    thread.start()
    while not ended.wait(0.05):
        stop_requests()
    thread.join()
    assert is_gone(pid) and ask(child, "say", 1) == 1


def test_threads_get_their_own_answers(child):
    wrong = []

    def many(name):
        for i in range(50):
            if ask(child, "say", [name, i]) != [name, i]:
                wrong.append((name, i))

    threads = [threading.Thread(target=many, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("what", ["say", "spin"])
def test_a_child_ends_with_its_parent(child, tmp_path, what):
    """Also where the parent has no time to end it, and in the middle of a request."""
    file, pid = tmp_path / "pid", os.fork()
    if not pid:
        file.write_text(str(ask(child, "pid")))  # a forked process has a child of its own
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()
        ask(child, what, seconds=10_000)
        time.sleep(10_000)
    os.waitpid(pid, 0)
    orphan, until = int(file.read_text()), time.monotonic() + 60
    while not is_gone(orphan) and time.monotonic() < until:
        time.sleep(0.02)
    survived = not is_gone(orphan)
    if survived:
        os.kill(orphan, signal.SIGKILL)
    assert not survived and ask(child, "say", 1) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only the limit of time ends the child elsewhere")
def test_a_child_whose_parent_ended_before_the_work_does_not_begin_it(child):
    """The request waits in the socket when its sender is gone: no signal can come any more."""
    (ours, its), (life, watched) = socket.socketpair(), socket.socketpair()
    data = json.dumps({"request": ["spin", None], "seconds": 1e5, "memory": MEMORY}).encode()
    ours.sendall(len(data).to_bytes(4, "big") + data)
    ours.close()
    life.close()
    with its, watched:
        done = subprocess.run([sys.executable, "-m", "a_child"], stdin=its, stdout=watched, timeout=60)
    assert done.returncode == 0

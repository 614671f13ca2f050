"""Parts of an experiment in several processes."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from apps.prove.processes import Workers


def open_state(*lines):
    return os.getpid(), lines


def square(worker, part):
    pid, _ = worker
    return pid, part * part


def fail(worker, part):
    if part == 3:
        raise ValueError("part three")
    time.sleep(0.01 if part < 3 else 60)
    return part


@pytest.mark.parametrize("count", [1, 2])
def test_every_part_is_worked_on_once(count):
    found = list(Workers(partial(open_state, "a"), count).results(square, [1, 2, 3, 4, 5]))
    assert sorted(result for _, result in found) == [1, 4, 9, 16, 25]
    pids = {pid for pid, _ in found}
    assert len(pids) <= count and (os.getpid() in pids) is (count == 1)


def test_an_error_ends_all_processes():
    """The parts that sleep for a minute do not delay the error."""
    begun = time.monotonic()
    with pytest.raises(ValueError, match="part three"):
        list(Workers(open_state, 2).results(fail, [1, 3, 4, 5]))
    assert time.monotonic() - begun < 50


def test_no_parts_open_nothing():
    assert list(Workers(partial(pytest.fail, "opened"), 2).results(square, [])) == []


def test_a_signal_waits_until_the_processes_are_started():
    """Otherwise the half started ones print a traceback: they read what a program that has ended writes."""
    passed = []

    class Parts(list):
        def __iter__(self):
            for part in super().__iter__():
                yield part
                if part == 1:
                    os.kill(os.getpid(), signal.SIGHUP)
                    time.sleep(0.2)
                passed.append(part)

    def end(number, frame):
        raise SystemExit(128 + number)

    ended = threading.Event()
    other = threading.Thread(target=ended.wait)  # a thread that can take the signal
    other.start()
    before = signal.signal(signal.SIGHUP, end)
    try:
        with pytest.raises(SystemExit):
            list(Workers(open_state, 2).results(square, Parts([1, 2, 3])))
        assert passed == [1, 2, 3] and signal.getsignal(signal.SIGHUP) is end
    finally:
        signal.signal(signal.SIGHUP, before)
        ended.set()
        other.join()

"""The collection of garbage disturbs no other thread."""

import sys
import threading

from ruvmlx.apps.chat.gc_policy import Garbage


def test_other_threads_may_build_tuples_meanwhile():
    """A list of all objects would hold a tuple that another thread is still building: SystemError."""
    errors, is_over, before = [], threading.Event(), sys.getswitchinterval()

    def build_tuples():
        try:
            while not is_over.is_set():
                tuple(object() for _ in range(40))
        except SystemError as e:
            errors.append(e)

    threads = [threading.Thread(target=build_tuples) for _ in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        garbage = Garbage()
        for _ in range(12):
            objects = [[] for _ in range(100_000)]
            garbage.set_aside()
            del objects
    finally:
        is_over.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()
        garbage.leave()
    assert errors == []

"""The model prepares ratings while the program makes no call, and each call ends the preparation."""

import gc
import threading
import time
import weakref
from functools import partial

import pytest

import ruvmlx
from ruvmlx.api import call_thread
from ruvmlx.chats.learning import Learning


@pytest.fixture
def model(tiny_folder, home):
    with ruvmlx.open(tiny_folder, backend="reference", temperature=0, max_tokens=6) as opened:
        yield opened


class SlowPreparation:
    """A preparation of ratings that goes on until its event is set. cancels: the events of all preparations
    that began."""

    def __init__(self):
        self.cancels = []

    def settle(self, cancel, watch):
        self.cancels.append(cancel)
        assert cancel.wait(30)

    def has_begun(self, count):
        return len(self.cancels) == count


@pytest.fixture
def preparation(model, monkeypatch):
    slow = SlowPreparation()
    monkeypatch.setattr(model._runtime.learning, "settle", slow.settle)
    return slow


def wait_until(is_true):
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_pause_prepares_the_first_rating(model):
    """Without this preparation, the rating would wait for the measurements of the model."""
    reply = model.reply("hello")
    learner = model._runtime.learner
    wait_until(lambda: learner.active.is_measured and learner.rating_index.is_measured)
    wait_until(lambda: learner.traces.held[reply.id].stats is not None)
    assert reply.rate("up").applied


def test_a_call_ends_the_preparation_at_once(model, preparation):
    """The next pause begins the preparation again."""
    for count in (1, 2):
        assert model.reply("hello").token_ids
        wait_until(partial(preparation.has_begun, count))
        began = time.monotonic()
        assert model.learned().ratings == 0
        assert time.monotonic() - began < 5


def test_calls_in_a_row_are_not_interrupted_by_a_preparation(model, preparation, monkeypatch):
    monkeypatch.setattr(call_thread, "IDLE_AFTER", 3.0)  # a busy machine makes the next call sooner
    model.learned()
    preparation.cancels.clear()  # the first call could come after a pause of the usual length
    for _ in range(20):
        model.learned()
    assert not preparation.cancels
    wait_until(partial(preparation.has_begun, 1))


def test_closing_ends_the_preparation(model, preparation):
    model.reply("hello")
    wait_until(lambda: preparation.cancels)
    model.close()
    assert preparation.cancels[0].is_set()


def test_a_model_that_nobody_has_ends_its_preparation(tiny_folder, home, monkeypatch):
    began, ended = threading.Event(), threading.Event()

    def settle(learning, cancel, watch):
        began.set()
        assert cancel.wait(30)
        ended.set()

    monkeypatch.setattr(Learning, "settle", settle)
    model = ruvmlx.open(tiny_folder, backend="reference")
    model.learned()
    assert began.wait(30)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None and ended.wait(30)


def test_an_error_of_the_preparation_is_no_error_of_the_program(model, monkeypatch):
    failed = threading.Event()

    def settle(cancel, watch):
        failed.set()
        raise MemoryError

    monkeypatch.setattr(model._runtime.learning, "settle", settle)
    model.learned()
    assert failed.wait(30)
    assert model.reply("hello").token_ids

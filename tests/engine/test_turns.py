"""Streams of one scheduler that take turns in one thread, as the replies of a host do."""

import pytest

from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.engine.best_of import BestOf
from ruvmlx.engine.queue import Arrivals
from ruvmlx.engine.scheduler import Scheduler
from ruvmlx.engine.types import NO_NEWS, Chunk

from .test_batch import fresh
from .test_engine import request

SIZES = [("one", 31), ("three words here", 7), ("much longer " * 20, 18)]


class Turns:
    """Streams that take turns. A stream is (its request, its job, its iterator, its chunks)."""

    def __init__(self, engine: LLMInferenceEngine, monkeypatch: pytest.MonkeyPatch):
        self.engine, self.running = engine, Scheduler(engine)
        self.streams, self.steps, step = [], 0, Scheduler.step

        def count_step(scheduler):
            self.steps += 1
            assert self.steps < 1000, "a stream waits for ever"
            return step(scheduler)

        monkeypatch.setattr(Scheduler, "step", count_step)

    def begin(self, prompt, tokens):
        asked = request(prompt=prompt, max_new_tokens=tokens)
        job = BestOf(self.engine, [asked], None, [None])
        self.streams.append((asked, job, self.running.stream(asked, lambda: job), []))

    def round(self):
        """Give each stream one turn. Return the chunks of this round."""
        found = []
        for stream in list(self.streams):
            chunk = next(stream[2], None)
            if chunk is None:
                self.streams.remove(stream)
            else:
                stream[3].append(chunk)
                found.append(chunk)
        return found


def test_each_reply_is_as_alone_and_a_round_is_one_step(engine, monkeypatch):
    """Streams join in the middle. Each turn yields all tokens that were drawn before it. A stream alone runs
    steps until one gives it text, so only rounds after which several run are counted."""
    turns, all_streams = Turns(engine, monkeypatch), []
    for prompt, tokens in SIZES:
        turns.begin(prompt, tokens)
        all_streams.append(turns.streams[-1])
        for _ in range(4):
            before = turns.steps
            turns.round()
            assert turns.steps - before <= 1 or len(turns.running) < 2
    while turns.streams:
        before = turns.steps
        turns.round()
        assert turns.steps - before <= 1 or len(turns.running) < 2
        if len(turns.streams) > 1:
            for _, job, _, chunks in turns.streams:
                told = [chunk.generated for chunk in chunks if chunk != NO_NEWS]
                assert (
                    max(told, default=0) >= len(job.leader.ids) - 1
                )  # the last step can come after this turn
    monkeypatch.undo()
    for asked, _, _, chunks in all_streams:
        alone = fresh(engine).generate(asked)
        assert chunks[-1].response.token_ids == alone.token_ids
        assert "".join(chunk.text for chunk in chunks) == alone.text


def test_a_stream_that_waits_does_not_hold_up_the_others(engine, monkeypatch):
    """While it waits for its place, its turns have no news, and the other one gets a token in each round."""
    turns = Turns(engine, monkeypatch)
    turns.running.width = 1
    turns.begin("first", 12)
    turns.round()
    turns.begin("second", 3)
    for generated in range(1, 12):
        assert turns.running.counts == (1, 1) or generated == 1
        told, waiting = turns.round()
        assert told.generated == generated and waiting == NO_NEWS
    assert turns.round()[0].response is not None
    while turns.streams:
        turns.round()
    assert not turns.running


def test_an_error_of_a_step_reaches_each_stream(engine, monkeypatch):
    turns = Turns(engine, monkeypatch)
    turns.begin("first", 20)
    turns.begin("second", 20)
    for _ in range(4):
        turns.round()

    def fail(*_):
        monkeypatch.setattr(Scheduler, "_next_group", next_group)
        raise OSError("the disk is gone")

    next_group = Scheduler._next_group
    monkeypatch.setattr(Scheduler, "_next_group", fail)
    for _, _, chunks, _ in turns.streams:
        with pytest.raises(OSError, match="the disk is gone"):
            [next(chunks) for _ in range(3)]
    assert not turns.running


def test_chunks_that_came_together_are_one():
    arrived = Arrivals()
    assert arrived.drain_joined() is None
    for chunk in (Chunk("", 0, 5, 5, note="a model"), Chunk("a", 1, 5, 5), Chunk("b", 2, 5, 5)):
        arrived.take(chunk)
    assert arrived.drain_joined() == Chunk("ab", 2, 5, 5, note="a model")
    assert arrived.drain_joined() is None

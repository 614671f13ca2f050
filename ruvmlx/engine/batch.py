"""Continuous batching: several requests share every step, and one that is done makes room for the next.

    for response in generate_many(engine, requests, adapter):      # as they finish
        ...

A step reads the weights once, whoever takes part. Each request has its own cache, sampler and seed: its reply
is the one that it would get alone, up to rounding; and quantised weights on the native backend round alike.
(Yu et al. 2022, "Orca")
"""

from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ..backends.base import HeadAdapter
from ..errors import UsageError
from .engine import LLMInferenceEngine
from .run import Run, settled
from .source import StepSource
from .types import GenerationRequest, GenerationResponse

WIDTH = 16  # more gains little: the step is then bound by arithmetic, not by reading weights


AdapterOf = Callable[[GenerationRequest], HeadAdapter | None]


def generate_many(
    engine: LLMInferenceEngine,
    requests: Iterable[GenerationRequest],
    adapter: HeadAdapter | AdapterOf | None = None,
    width: int = WIDTH,
) -> Iterator[GenerationResponse]:
    """The responses in the order in which they finish; at most `width` requests are in flight.

    adapter: one for all, or a function that tells each request's own. A request is looked at when its turn
    comes; UsageError if it cannot be answered, or if its session is in flight already.
    """
    if width < 1:
        raise UsageError(f"the batch width is {width}; it must be 1 or more.")
    waiting, running = iter(requests), list[Run]()
    with settled(running):
        while _admit(engine, waiting, _by_request(adapter), running, width):
            for run in running:
                run.draw()
            done = [run.end() for run in running if run.over]
            running[:] = [run for run in running if not run.over]
            yield from (chunk.response for chunk in done if chunk.response is not None)
            _step(engine, running)


def _by_request(adapter: HeadAdapter | AdapterOf | None) -> AdapterOf:
    return adapter if callable(adapter) else lambda _: adapter


def _admit(
    engine: LLMInferenceEngine,
    waiting: Iterator[GenerationRequest],
    adapter_of: AdapterOf,
    running: list[Run],
    width: int,
) -> bool:
    """Fill the batch up with requests whose prompts are read; False when nothing is left to do."""
    while len(running) < width and (request := next(waiting, None)) is not None:
        if request.session_id and any(run.request.session_id == request.session_id for run in running):
            raise UsageError("a session answers one request at a time.")
        running.append(Run(engine, request, adapter_of(request), steps=True))
        for _ in running[-1].prefill():
            pass
    return bool(running)


def _step(engine: LLMInferenceEngine, running: list[Run]) -> None:
    """One more token for each."""
    if not running:
        return
    caches, own = [run.session.cache for run in running], [run.adapter for run in running]
    steps = engine.backend.decode_batch([run.ids[-1] for run in running], caches, own)
    for run, step in zip(running, steps, strict=True):
        cast(StepSource, run.source).take(step)

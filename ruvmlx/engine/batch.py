"""Continuous batching: several requests share every decode step; a finished one makes room for the next.

    for response in generate_many(engine, requests, adapter):      # as they finish
        ...

A step reads the weights once for all requests. Each request has its own cache, sampler and seed, so its reply
equals the reply without batching, up to rounding; with quantised weights on the native backend, exactly.
(Yu et al. 2022, "Orca")
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from ..backends.base import HeadAdapter, Together
from ..errors import UsageError
from .engine import LLMInferenceEngine
from .run import EngineParts, Recorder, Run, settled
from .source import StepSource
from .types import GenerationRequest, GenerationResponse

WIDTH = 16  # a wider batch gains little: then arithmetic, not reading weights, limits a step


AdapterOf = Callable[[GenerationRequest], HeadAdapter | None]
RecorderOf = Callable[[GenerationRequest], Recorder | None]


def generate_many(
    engine: LLMInferenceEngine,
    requests: Iterable[GenerationRequest],
    adapter: HeadAdapter | AdapterOf | None = None,
    width: int = WIDTH,
    recorder: RecorderOf = lambda _: None,
) -> Iterator[GenerationResponse]:
    """Yield responses as they finish; at most `width` requests run at a time.

    adapter: one for all requests, or a function from a request to its adapter. recorder: from a request to
    what receives its tokens. Each request is checked when it starts: UsageError if it cannot be answered, or
    if its session is already in use.
    """
    if width < 1:
        raise UsageError(f"the batch width is {width}; it must be 1 or more.")
    waiting, running = iter(requests), list[Run]()
    with settled(running):
        while _admit(engine, waiting, _by_request(adapter), recorder, running, width):
            draw_all(engine, running)
            done = [run.end() for run in running if run.over]
            running[:] = [run for run in running if not run.over]
            yield from (chunk.response for chunk in done if chunk.response is not None)
            decode_one(engine, running)


def _by_request(adapter: HeadAdapter | AdapterOf | None) -> AdapterOf:
    return adapter if callable(adapter) else lambda _: adapter


def _admit(
    engine: LLMInferenceEngine,
    waiting: Iterator[GenerationRequest],
    adapter_of: AdapterOf,
    recorder_of: RecorderOf,
    running: list[Run],
    width: int,
) -> bool:
    """Start and prefill waiting requests until the batch is full; False if no request is left."""
    while len(running) < width and (request := next(waiting, None)) is not None:
        if request.session_id and any(run.request.session_id == request.session_id for run in running):
            raise UsageError("a session answers one request at a time.")
        running.append(Run(engine, request, adapter_of(request), recorder_of(request), True))
        for _ in running[-1].prefill():
            pass
    return bool(running)


def draw_all(engine: EngineParts, running: Sequence[Run]) -> None:
    """Draw and record the next token of every run; several runs in parallel if the backend is a Together."""
    backend = engine.backend
    if len(running) < 2 or not isinstance(backend, Together):
        for run in running:
            run.draw()
        return
    backend.together([work for run in running if (work := run.draw_work()) is not None])
    for run in running:
        run.draw(record=False)
    backend.together([work for run in running for work in run.record_work()])


def decode_one(engine: EngineParts, running: Sequence[Run]) -> None:
    """Decode one token of every run."""
    if not running:
        return
    caches, own = [run.session.cache for run in running], [run.adapter for run in running]
    steps = engine.backend.decode_batch([run.ids[-1] for run in running], caches, own)
    for run, step in zip(running, steps, strict=True):
        cast(StepSource, run.source).take(step)

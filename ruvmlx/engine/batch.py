"""This module answers many requests, several at a time. When one request has finished, the next one starts.

for response in generate_many(engine, requests, adapter):      # in the order in which they finish
    ...
"""

from collections.abc import Callable, Iterable, Iterator

from ..backends.base import HeadAdapter
from ..errors import UsageError
from .recorder import Recorder
from .run import EngineParts
from .scheduler import Arrivals, Scheduler
from .types import GenerationRequest, GenerationResponse

AdapterOf = Callable[[GenerationRequest], HeadAdapter | None]
RecorderOf = Callable[[GenerationRequest], Recorder | None]

# The maximum number of replies in a batch. In a wider batch, the arithmetic and not the reading of the
# weights decides how long a step takes, so more replies save no time.
WIDTH = 16


def generate_many(
    engine: EngineParts,
    requests: Iterable[GenerationRequest],
    adapter: HeadAdapter | AdapterOf | None = None,
    width: int = WIDTH,
    recorder: RecorderOf = lambda _: None,
) -> Iterator[GenerationResponse]:
    """Yield each response when it is finished. At most `width` requests run at a time. The first error ends
    all requests.

    Each request is checked when it starts. Raises UsageError if the request cannot be answered, or if another
    running request uses its session.

    adapter: one adapter for all requests, or a function from a request to its adapter
    recorder: a function from a request to the recorder of its tokens
    """
    if width < 1:
        raise UsageError(f"the batch width is {width}; it must be 1 or more.")
    adapter_of = adapter if callable(adapter) else lambda _: adapter
    scheduler, arrived, waiting = Scheduler(engine, width, delay=None), Arrivals(), iter(requests)
    try:
        while True:
            while len(scheduler) < width and (request := next(waiting, None)) is not None:
                if request.session_id in scheduler.sessions:
                    raise UsageError("a session answers one request at a time.")
                scheduler.submit(request, arrived, adapter_of(request), recorder(request))
            if not scheduler:
                return
            scheduler.step()
            for chunk in arrived.drain():
                if chunk.response is not None:
                    yield chunk.response
            if arrived.error is not None:
                raise arrived.error
    finally:
        scheduler.drop_all()

"""This module lets the model write replies for several simulated users in one batch, each reply with the
weights of its user. The replies are saved in the store as in a chat, so that the users can rate them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.runtime import Runtime
from ruvmlx.sona.learner import Learner
from ruvmlx.sona.trace import Trace
from ruvmlx.store import ReplyRow


class Reader(Protocol):
    """A simulated user who reads replies. The user's runtime has a separate store and separate weights."""

    @property
    def runtime(self) -> Runtime: ...


AnyReader = TypeVar("AnyReader", bound=Reader)


def learner_of(reader: Reader) -> Learner:
    assert reader.runtime.learner is not None
    return reader.runtime.learner


class _Queue:
    """An iterator over the requests that wait. The iterator ends while no request waits, and continues after
    `put`."""

    def __init__(self) -> None:
        self._waiting = deque[GenerationRequest]()

    def put(self, request: GenerationRequest) -> None:
        self._waiting.append(request)

    def __iter__(self) -> Iterator[GenerationRequest]:
        return self

    def __next__(self) -> GenerationRequest:
        if not self._waiting:
            raise StopIteration
        return self._waiting.popleft()


def replies_to(
    readers: Sequence[AnyReader],
    request_of: Callable[[AnyReader], GenerationRequest],
    wants_more: Callable[[AnyReader], bool],
    states: dict[str, np.ndarray],
) -> Iterator[tuple[AnyReader, str, GenerationResponse]]:
    """Let the model write replies for all readers in one batch, save the replies, and yield (reader,
    question, reply). All readers must have the same base LoRA.

    Each reader has one request at a time. After a reply was yielded, its reader gets the next request at once
    if `wants_more` says so. A reader whose reply was short therefore does not wait for the other readers.

    request_of: a function that returns a reader's next request
    wants_more: a function that returns True if a reader, who has used the last reply, reads another reply
    states: the pooled hidden states of the questions. All readers share these states, because readers ask the
        same questions. The function adds a question that is not in it.
    """
    by_id: dict[str, tuple[AnyReader, GenerationRequest, Trace]] = {}
    queue = _Queue()

    def ask(reader: AnyReader) -> None:
        learner_of(reader).sync()
        request = request_of(reader)
        by_id[request.request_id] = reader, request, learner_of(reader).trace()
        queue.put(request)

    for reader in readers:
        ask(reader)
    for response in generate_many(
        readers[0].runtime.engine,
        queue,
        lambda request: learner_of(by_id[request.request_id][0]).micro,
        recorder=lambda request: by_id[request.request_id][2],
    ):
        reader, request, trace = by_id.pop(response.request_id)
        question = (request.messages or [])[-1].content
        if (
            question not in states
            and (state := learner_of(reader).rating_index.state_of(question)) is not None
        ):
            states[question] = state
        _commit(reader.runtime, request, response, trace, states.get(question))
        yield reader, question, response
        if wants_more(reader):
            ask(reader)


def _commit(
    runtime: Runtime,
    request: GenerationRequest,
    response: GenerationResponse,
    trace: Trace,
    state: np.ndarray | None,
) -> None:
    learner = runtime.learner
    assert learner is not None
    row = ReplyRow.of(
        response, request, runtime.model, id=response.request_id, model=runtime.model.name,
        adapter=learner.history.name, adapter_version=trace.version, query=state,
        prompt_ids=list(request.input_ids or []), sampled_ids=list(trace.tokens),
        prompt=(request.messages or [])[-1].content, logprob=trace.logprob,
    )  # fmt: skip
    runtime.store.replies.add(row, None)
    learner.traces.keep(row.id, trace)
    learner.rating_index.queue_reply(row)

"""This module lets the model write replies for several simulated users in one batch, each reply with the
weights of its user. The replies are saved in the store as in a chat, so that the users can rate them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

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


def next_replies(
    readers: Sequence[AnyReader], request_of: Callable[[AnyReader], GenerationRequest]
) -> Iterator[tuple[AnyReader, str, GenerationResponse]]:
    """Let the model write one reply for each reader in one batch, save the replies, and yield (reader,
    question, reply). All readers must have the same base LoRA. request_of: a function that returns a reader's
    request."""
    by_id: dict[str, tuple[AnyReader, GenerationRequest, Trace]] = {}
    for reader in readers:
        learner_of(reader).sync()
        request = request_of(reader)
        by_id[request.request_id] = reader, request, learner_of(reader).trace()
    responses = generate_many(
        readers[0].runtime.engine,
        [request for _, request, _ in by_id.values()],
        lambda request: learner_of(by_id[request.request_id][0]).micro,
        recorder=lambda request: by_id[request.request_id][2],
    )
    for response in list(responses):
        reader, request, trace = by_id[response.request_id]
        _commit(reader.runtime, request, response, trace)
        yield reader, (request.messages or [])[-1].content, response


def _commit(runtime: Runtime, request: GenerationRequest, response: GenerationResponse, trace: Trace) -> None:
    learner = runtime.learner
    assert learner is not None
    row = ReplyRow.of(
        response, request, runtime.model, id=response.request_id, model=runtime.model.name,
        adapter=learner.history.name, adapter_version=trace.version, query=None,
        prompt_ids=list(request.input_ids or []), sampled_ids=list(trace.tokens),
        prompt=(request.messages or [])[-1].content, logprob=trace.logprob,
    )  # fmt: skip
    runtime.store.replies.add(row, None)
    learner.traces.keep(row.id, trace)
    learner.rating_index.queue_reply(row)

"""Requests through a host: several stored replies at once, under their adapters, ratings between steps."""

import asyncio
import threading

import numpy as np
import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.engine.types import NO_NEWS, Chunk
from ruvmlx.errors import ModelClosed, NotFound, RuvmlxError, UsageError
from ruvmlx.host.host import Host
from ruvmlx.models.config.model import Message
from ruvmlx.progress import QUIET

GREEDY = Sampling(temperature=0)


def greedy_request(text="hello", n=12, **fields):
    return GenerationRequest(
        **{"messages": [Message("user", text)], "max_new_tokens": n, "sampling": GREEDY, "ignore_eos": True}
        | fields
    )


@pytest.fixture
async def host(open_tiny, tiny_backend):
    host = Host(open_tiny)
    await host.open(QUIET)
    yield host
    await host.close()
    tiny_backend.set_lora(None)


async def reply_to(host, request, session=None):
    """(the response, the streamed text)"""
    chunks = [chunk async for some in host.submit(request, session) for chunk in some]
    return chunks[-1].response, "".join(chunk.text for chunk in chunks)


async def read_first_token(arriving):
    """Read until the first token."""
    async for some in arriving:
        if some[-1].generated:
            return some[-1]


async def test_parallel_replies_are_stored_and_can_be_rated(host):
    alone = [(await reply_to(host, greedy_request(f"question {i}", 10 + i)))[0].token_ids for i in range(5)]
    requests = [greedy_request(f"question {i}", 10 + i) for i in range(5)]
    found = await asyncio.gather(*(reply_to(host, request) for request in requests))
    for (response, text), request, ids in zip(found, requests, alone, strict=True):
        assert response.request_id == request.request_id and response.text == text
        assert response.token_ids == ids
        row = await host.call(lambda runtime, id=request.request_id: runtime.store.replies.get(id))
        assert (row.text, row.adapter) == (text, "default")
        rated = await host.call_between(lambda runtime, id=row.id: runtime.rate(id, "up"))
        assert rated.applied


async def test_traces_of_parallel_replies_are_those_alone(host):
    """A rating moves the weights as if the reply had been written alone."""

    async def logprob_after_rating(first, *others):
        await host.call(lambda runtime: runtime.engine.sessions.clear())  # each reads its whole prompt
        await asyncio.gather(*(reply_to(host, request) for request in (first, *others)))
        return await host.call(
            lambda runtime: (runtime.rate(first.request_id, "up"), runtime.undo())[0].logprob_after
        )

    alone = await logprob_after_rating(greedy_request("one", 20))
    beside = await logprob_after_rating(
        greedy_request("one", 20), greedy_request("two", 30), greedy_request("three", 10)
    )
    assert beside == pytest.approx(alone, abs=1e-12)


async def test_a_rating_is_applied_between_two_steps(host):
    first, _ = await reply_to(host, greedy_request("first"))
    arriving = host.submit(greedy_request("long", 300))
    await read_first_token(arriving)
    rated = await host.call_between(lambda runtime: runtime.rate(first.request_id, "up"))
    turns = await host.call(lambda runtime: runtime.writer.last_reply_id)
    assert rated.applied and turns == first.request_id  # the long one goes on
    last = [some async for some in arriving][-1][-1]
    assert len(last.response.token_ids) == 300


async def test_every_request_has_its_adapter(host):
    """Ratings of one adapter change its next replies and those of no other."""
    same = "tell me something"

    async def texts():
        asked = [greedy_request(same, 24, adapter_id=name) for name in (None, "", "work", "home")]
        return [text for _, text in await asyncio.gather(*(reply_to(host, request) for request in asked))]

    untouched = await texts()
    assert len(set(untouched)) == 1
    for _ in range(4):
        response, _ = await reply_to(host, greedy_request(same, 24, adapter_id="work"))
        rated = await host.call_between(
            lambda runtime, id=response.request_id: runtime.rate(id, "down", adapter="work")
        )
        assert rated.applied
    in_use, none, work, home = await texts()
    assert in_use == none == home == untouched[0] and work != none
    labels = await host.call(
        lambda r: (r.learning.label, r.learning.of("work").version, r.learning.of("home").version)
    )
    assert labels == ("default@0", 4, 0)


async def test_a_reply_without_adapter_is_rated_for_a_named_one(host):
    response, _ = await reply_to(host, greedy_request(adapter_id=""))
    row = await host.call(lambda runtime: runtime.store.replies.get(response.request_id))
    assert row.adapter is None
    rated = await host.call_between(lambda runtime: runtime.rate(row.id, "up", adapter="work"))
    assert rated.applied and await host.call(lambda runtime: runtime.learning.label) == "default@0"


async def test_a_reader_that_leaves_ends_its_request(host):
    """Within one step; the reply is kept as cancelled, and others go on."""
    request, other = greedy_request("leave", 400), greedy_request("stay", 60)
    staying = asyncio.ensure_future(reply_to(host, other))
    arriving = host.submit(request)
    await read_first_token(arriving)
    await arriving.aclose()
    assert request.cancel.is_set()
    response, _ = await staying
    assert len(response.token_ids) == 60
    row = await host.call(lambda runtime: runtime.store.replies.get(request.request_id))
    assert row.finish_reason == "cancelled" and 0 < len(row.sampled_ids) < 400


async def test_bad_requests_fail_alone(host):
    staying = asyncio.ensure_future(reply_to(host, greedy_request("stay", 40)))
    with pytest.raises(UsageError, match="empty"):
        await reply_to(host, greedy_request(" "))
    with pytest.raises(UsageError, match="max-tokens is 0"):
        await reply_to(host, greedy_request(n=0))
    with pytest.raises(UsageError):
        await reply_to(host, greedy_request(adapter_id="a/b"))
    assert len((await staying)[0].token_ids) == 40


async def test_a_reply_that_fails_in_a_library_ends(host):
    """A panic of a library in Rust is no Exception. Its reader waited for ever."""

    class Panic(BaseException):
        pass

    def begin(runtime, cancel):
        yield Chunk("first", 1)
        raise Panic("index out of bounds")

    seen = []
    with pytest.raises(Panic):
        async with asyncio.timeout(20):
            async for some in host.write(begin):
                seen += some
    assert [chunk.text for chunk in seen] == ["first"]
    async with asyncio.timeout(20):  # the reader can get the error before the serving thread is free
        while host._serving.is_busy:
            await asyncio.sleep(0.01)
    assert (await reply_to(host, greedy_request("good")))[1]


async def test_idle_work_does_not_hold_up_requests(host):
    """It is cancelled by a request, and while requests are served it ends at once."""
    idle = asyncio.ensure_future(host.run_idle(lambda runtime, cancel: cancel.wait(60)))
    await asyncio.sleep(0)
    arriving = host.submit(greedy_request("long", 200))
    await read_first_token(arriving)
    assert await idle
    assert await host.run_idle(lambda runtime, cancel: cancel.is_set())
    async for _ in arriving:
        pass
    assert not await host.run_idle(lambda runtime, cancel: cancel.is_set())


async def test_the_chat_writes_beside_requests(host):
    """Both are in one batch: the request goes on while the chat's reply is written."""
    session = await host.call(lambda runtime: runtime.chats.new_chat())
    served = asyncio.ensure_future(reply_to(host, greedy_request("served", 30)))
    await asyncio.sleep(0)

    def say(runtime, cancel):
        return runtime.chats.say(session, "hi", sampling=GREEDY, max_new_tokens=400, cancel=cancel)

    async for chunks in host.write(say):
        last = chunks[-1]
        if served.done():
            host.stop()
    assert len(served.result()[0].token_ids) == 30
    assert last.response.finish_reason in ("cancelled", "stop", "length")


async def test_closing_ends_every_request_and_keeps_the_texts(open_tiny):
    host = Host(open_tiny)
    await host.open(QUIET)
    requests = [greedy_request(f"q{i}", 400) for i in range(3)]
    streams = [host.submit(request) for request in requests]
    for stream in streams:
        await read_first_token(stream)
    await host.close()
    responses = [[chunk async for batch in stream for chunk in batch][-1].response for stream in streams]
    assert {response.finish_reason for response in responses} == {"cancelled"}
    with open_tiny() as runtime:
        kept = [runtime.store.replies.get(request.request_id).text for request in requests]
        assert kept == [response.text for response in responses]


async def test_another_model_ends_the_requests(host, open_tiny):
    arriving = host.submit(greedy_request("long", 400))
    await read_first_token(arriving)
    with pytest.raises(RuvmlxError):  # this host has one model only
        await host.switch("other", "none", QUIET)
    with pytest.raises(ModelClosed, match="another model is being opened"):
        async for _ in arriving:
            pass
    assert (await reply_to(host, greedy_request()))[0].token_ids


async def test_token_ids_of_an_earlier_model_are_refused(host, monkeypatch):
    """The model was opened again after the request was encoded."""
    encode = host._serving.encode_request

    async def encode_then_open_again(request):
        request = await encode(request)
        await host.release()
        await host.open(QUIET)
        return request

    monkeypatch.setattr(host._serving, "encode_request", encode_then_open_again)
    with pytest.raises(ModelClosed, match="no model is open"):
        await reply_to(host, greedy_request())
    monkeypatch.undo()
    assert (await reply_to(host, greedy_request()))[0].token_ids


async def test_a_chats_reply_that_waits_for_its_turn_holds_up_nobody(host):
    """One place: the request has it. Meanwhile short calls run, and the chat's reader gets nothing."""

    async def read(arriving):
        return [chunk async for some in arriving for chunk in some]

    def begin(runtime, cancel):
        return runtime.writer.generate(greedy_request("chat", 4), session)

    session = await host.call(lambda runtime: runtime.chats.new_chat())
    await host.call(lambda runtime: setattr(runtime.writer.scheduler, "width", 1))
    served = host.submit(greedy_request("served", 200))
    await read_first_token(served)
    waiting = asyncio.ensure_future(read(host.write(begin)))
    while await host.call_between(lambda runtime: runtime.writer.scheduler.counts) != (1, 1):
        assert not waiting.done()
    assert (await read(served))[-1].response.generation_tokens == 200
    chunks = await waiting
    assert chunks[-1].response.generation_tokens == 4 and NO_NEWS not in chunks


def write_replies(runtime, *questions):
    """Ids of replies to these questions."""
    ids = []
    for question in questions:
        *_, last = runtime.writer.generate(greedy_request(question, 20))
        ids.append(last.response.request_id)
    return ids


def weights(runtime, adapter):
    micro = runtime.learning.of(adapter).micro
    return micro.lora_a.copy(), micro.lora_b.copy()


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_rating_that_is_taken_back_was_never_given(open_tiny, taken):
    """Of any reply, also one that was rated twice; preferences and ratings after it stay."""
    with open_tiny(adapter=None) as runtime:
        ids = write_replies(runtime, "one", "two", "three", "four", "four")
        ratings = [(ids[0], "up"), (ids[1], "down"), (ids[2], "5"), (ids[taken], "1")]
        for adapter in ("all", "less"):
            for reply, rating in ratings:
                if adapter == "all" or reply != ids[taken]:
                    runtime.rate(reply, rating, "why", adapter=adapter)
            runtime.learning.of(adapter).prefer(ids[3], ids[4], "compare")
        status = runtime.unrate(ids[taken], adapter="all")
        assert (status.ratings, status.preferences) == (2, 1)
        for got, want in zip(weights(runtime, "all"), weights(runtime, "less"), strict=True):
            np.testing.assert_array_equal(got, want)
        history = runtime.learning.of("all").history
        assert [(r.reply_id, r.note) for r in history.ratings()] == [
            (id, "why") for id in ids[:3] if id != ids[taken]
        ]
        with pytest.raises(NotFound, match="no rating to take back"):
            runtime.unrate(ids[taken], adapter="all")
        assert runtime.learning.label is None


def test_the_newest_rating_is_taken_back_as_by_undo(open_tiny):
    with open_tiny() as runtime:
        one, two = write_replies(runtime, "one", "two")
        runtime.rate(one, "up")
        before, version = weights(runtime, None), runtime.learner.version
        runtime.rate(two, "down")
        assert runtime.unrate(two).adapter_version == version
        for got, want in zip(weights(runtime, None), before, strict=True):
            np.testing.assert_array_equal(got, want)


def test_taking_back_is_one_transaction(open_tiny, monkeypatch):
    """If a later rating cannot be given again, nothing has changed."""
    with open_tiny() as runtime:
        ids = write_replies(runtime, "one", "two", "three")
        for reply in ids:
            runtime.rate(reply, "up")
        before, version = weights(runtime, None), runtime.learner.version
        rate, given = runtime.learner.commit_ratings, []

        def fails(ratings):
            if given:
                raise RuvmlxError("broken")
            given.append(rate(ratings))

        with monkeypatch.context() as m:
            m.setattr(runtime.learner, "commit_ratings", fails)
            with pytest.raises(RuvmlxError, match="broken"):
                runtime.unrate(ids[0])
        assert given
        assert runtime.status().adapter_version == runtime.learner.version == version
        assert runtime.status().ratings == 3
        for got, want in zip(weights(runtime, None), before, strict=True):
            np.testing.assert_array_equal(got, want)


async def test_an_adapter_is_needed_to_rate(open_tiny):
    with open_tiny(adapter=None) as runtime:
        *_, last = runtime.writer.generate(greedy_request())
        with pytest.raises(NotFound, match="no adapter"):
            runtime.rate(last.response.request_id, "up")
        assert runtime.rate(last.response.request_id, "up", adapter="work").applied
        assert runtime.learning.label is None and threading.active_count() >= 1


async def test_chats_and_requests_are_written_beside_each_other(host):
    """A reply of `write` holds up neither another one nor a request that comes later."""
    ended = []

    async def chat(name, n, others=0):
        """Write a reply that ends after the end of a number of other replies."""
        session = await host.call(lambda runtime: runtime.chats.new_chat())

        def begin(runtime, cancel):
            for chunk in runtime.chats.say(session, name, sampling=GREEDY, max_new_tokens=n, cancel=cancel):
                while chunk.response and len(ended) < others and not cancel.is_set():
                    yield NO_NEWS
                yield chunk

        chunks = [chunk async for some in host.write(begin) for chunk in some]
        ended.append(name)
        return chunks[-1].response

    async def request(name, n):
        response, _ = await reply_to(host, greedy_request(name, n))
        ended.append(name)
        return response

    async with asyncio.timeout(60):
        long = asyncio.ensure_future(chat("long", 300, others=2))
        while not host.is_writing and not long.done():
            await asyncio.sleep(0.001)
        await asyncio.gather(chat("short", 30), request("asked", 20))
        assert ended == ["asked", "short"] and not long.done()
        assert (await long).text and host.is_writing is False

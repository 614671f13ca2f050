"""A request that gets no reply is a row of the witness log, whoever asked and wherever it failed."""

import asyncio
import threading

import pytest

from ruvmlx.engine import GenerationRequest, Sampling
from ruvmlx.errors import RuvmlxError, StoreBusy, UsageError
from ruvmlx.host.host import Host
from ruvmlx.models.config.model import Message
from ruvmlx.progress import QUIET
from ruvmlx.store.audit import disagreement

GREEDY = Sampling(temperature=0)


def greedy_request(text="hello", n=8, **fields):
    return GenerationRequest(
        messages=[Message("user", text)], max_new_tokens=n, sampling=GREEDY, ignore_eos=True, **fields
    )


@pytest.fixture
def runtime(open_tiny, tiny_backend):
    with open_tiny() as opened:
        yield opened
    tiny_backend.set_lora(None)


def failures(runtime) -> dict[str, dict]:
    """Bodies of the rows, by request."""
    rows = runtime.store.witness.rows("failure")
    assert len({row.body["request"] for row in rows}) == len(rows), "a request has two rows"
    return {row.body["request"]: row.body for row in rows}


def test_a_refused_request_is_one_row_without_words(runtime):
    """Empty, too long, no tokens asked for, a wrong adapter: one row each, and the log still agrees."""
    size = runtime.model.context
    refused = {
        "BadPrompt": [greedy_request(" ")],
        "UsageError": [greedy_request(n=0), greedy_request(adapter_id="a/b")],
        "PromptTooLong": [greedy_request("secretword " * size)],
    }
    for error, requests in refused.items():
        for request in requests:
            with pytest.raises(UsageError):
                for _ in runtime.writer.generate(request):
                    pass
            body = failures(runtime)[request.request_id]
            assert body["error"] == error and body["model"] == runtime.model.fingerprint
            assert body["adapter"] == request.adapter_id
            assert error != "PromptTooLong" or body["prompt_tokens"] > size
    assert len(failures(runtime)) == 4
    assert not runtime.store.witness.rows("reply")
    raw = runtime.store.db.value("SELECT group_concat(body) FROM witness")
    assert "secretword" not in raw and disagreement(runtime.store) == ""
    assert runtime.store.witness.check().broken is None


def test_an_error_in_the_middle_of_a_reply_is_a_row(runtime, monkeypatch):
    """The row has the number of prompt tokens; the error reaches whoever asked."""
    request, chunks = greedy_request(n=40), []
    arriving = runtime.writer.generate(request)
    while not chunks or not chunks[-1].generated:
        chunks.append(next(arriving))
    monkeypatch.setattr(runtime.backend, "decode", raise_gpu_error)
    with pytest.raises(RuvmlxError, match="the GPU is gone"):
        list(arriving)
    body = failures(runtime)[request.request_id]
    assert body["error"] == "RuvmlxError" and body["prompt_tokens"] == chunks[-1].prompt_tokens > 0


def raise_gpu_error(*_, **__):
    raise RuvmlxError("the GPU is gone")


def test_a_message_that_a_chat_refuses_is_a_row(runtime):
    session, cancel = runtime.chats.new_chat(), threading.Event()
    with pytest.raises(UsageError):
        list(runtime.chats.say(session, "word " * runtime.model.context, max_new_tokens=4, cancel=cancel))
    assert [body["error"] for body in failures(runtime).values()] == ["PromptTooLong"]


def test_a_stopped_reply_is_a_reply_and_no_failure(runtime):
    request = greedy_request(n=300)
    for chunk in runtime.writer.generate(request):
        if chunk.generated:
            request.cancel.set()
    assert not failures(runtime) and len(runtime.store.witness.rows("reply")) == 1


def test_a_store_that_is_busy_does_not_hide_the_error(runtime, monkeypatch):
    def raise_busy(*_):
        raise StoreBusy("locked")

    monkeypatch.setattr(runtime.store.witness, "note", raise_busy)
    with pytest.raises(UsageError, match="empty"):
        list(runtime.writer.generate(greedy_request(" ")))


async def test_a_failed_request_of_a_server_is_a_row(open_tiny, tiny_backend):
    """Refused while its text is encoded, when its turn comes, and by the store at its end."""
    host = Host(open_tiny)
    await host.open(QUIET)
    requests = [greedy_request(" "), greedy_request(n=0), greedy_request("end")]

    def refuse_replies(runtime):
        def raise_busy(*_, **__):
            raise StoreBusy("locked")

        runtime.store.replies.add = raise_busy

    await host.call(refuse_replies)

    async def error_of(request) -> str:
        try:
            async for _ in host.submit(request):
                pass
        except RuvmlxError as error:
            return type(error).__name__
        return "none"

    said = await asyncio.gather(*map(error_of, requests))
    noted = await host.call(failures)
    assert [noted[request.request_id]["error"] for request in requests] == said
    assert said == ["BadPrompt", "UsageError", "StoreBusy"]
    await host.close()
    tiny_backend.set_lora(None)


def test_another_adapter_in_use_is_a_row(runtime):
    """The name before and after; the same adapter again is no change."""
    for name in ("work", "work", None):
        runtime.learning.use(name)
    rows = [(row.body["before"], row.body["adapter"]) for row in runtime.store.witness.rows("use")]
    assert rows == [("default", "work"), ("work", None)]

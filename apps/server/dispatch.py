"""This module runs one endpoint for one HTTP request. The module reads and checks the body, sends the answer,
updates the metrics and writes the log."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ruvmlx.errors import RuvmlxError

from .access import headers_of
from .body_budget import HeldBody
from .decoding import Decoded, decode, decode_query
from .endpoint import Call, Endpoint, EventStream, error_shape
from .errors import ApiError, ErrorShape, InternalError, request_error
from .memory_share import PooledModel
from .model_pool import ModelPool
from .request_fields import ignored_betas
from .sending import ClientGone, Receive, Send, Sender, read_body, unless_gone
from .serving import RecentRequest

Scope = Mapping[str, Any]
JSON, FORM = "application/json", "application/x-www-form-urlencoded"
# the maximum number of requests in progress at once; a request whose body is still arriving is in progress
MOST_CALLS = 256
LONG_BODY = 100_000  # bytes; a thread beside the event loop decodes a longer body


class Dispatcher:
    """An ASGI application that runs one endpoint. `Gate` (gate.py) has already checked the host, the origin
    and the API key of the request."""

    def __init__(self, models: ModelPool, endpoint: Endpoint):
        self._models, self._serving, self._endpoint = models, models.first.serving, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        serving, endpoint = self._serving, self._endpoint
        started, facts = time.monotonic(), dict[str, float]()
        errors = error_shape(endpoint, headers_of(scope))
        sender = Sender(send, serving.limits, scope["state"].get("headers", ()))
        serving.calls += 1
        gone, held, failed = False, HeldBody(serving.bodies), ""
        try:
            await self._answer(scope, receive, sender, facts, held)
        except ClientGone:
            gone = True
            _abort(scope)
        except RuvmlxError as error:
            failed = await _send_refusal(sender, error, endpoint.body, errors)
        except TimeoutError:
            message = f"the answer took longer than {serving.limits.reply_seconds:g} seconds."
            await _send_error(sender, ApiError(408, message, code="timeout"), errors)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is no Exception
            # the client gets an id, and the log gets the place
            failure = InternalError.of(error)
            failure.write_to(serving.log)
            await _send_error(sender, failure.answer, errors)
        finally:
            held.release()
            serving.calls -= 1
            seconds = time.monotonic() - started
            self._count(sender.status, gone, seconds, facts, failed, scope["state"])

    async def _answer(
        self, scope: Scope, receive: Receive, sender: Sender, facts: dict[str, float], held: HeldBody
    ) -> None:
        serving, endpoint, headers = self._serving, self._endpoint, headers_of(scope)
        serving.refuse_if_stopping()
        if serving.calls > MOST_CALLS:
            raise ApiError(429, f"{MOST_CALLS} requests are being answered; try again.", code="busy")
        decoded: Decoded[Any] = Decoded(None, [])
        if endpoint.body is not None:
            _check_media_type(headers)
            data = await read_body(receive, headers.get("content-length"), serving.limits, held)
            if len(data) <= LONG_BODY:
                decoded = decode(data, endpoint.body)
            else:  # the decoding of many small objects can take seconds
                decoded = await asyncio.to_thread(decode, data, endpoint.body)
        ignored = [*decoded.ignored, *ignored_betas(headers.get("anthropic-beta", ""))]
        sender.name_ignored(ignored)
        call = Call(
            serving,
            self._models,
            decoded.body,
            names=dict(scope.get("path_params", {})),
            salt=scope["state"]["salt"],
            facts=facts,
            is_anthropic="anthropic-version" in headers,
            query=endpoint.query and decode_query(scope.get("query_string", b""), endpoint.query),
            ignored=ignored,
        )
        await unless_gone(receive, self._within_time(call, sender))

    async def _within_time(self, call: Call, sender: Sender) -> None:
        if not self._endpoint.is_look:
            call.serving.host.interrupt()
        needs_model = hasattr(call.body, "model") and self._endpoint.opens(call.body)
        async with asyncio.timeout(call.serving.limits.reply_seconds):
            if not needs_model:
                await sender.answer(await self._endpoint.handle(call))
                return
            name = call.body.model
            embeds = self._endpoint.embeds
            model = self._models.first if name is None else await self._models.find(name, embeds)
            waiting = None if self._models.is_ready(model) else self._endpoint.waiting(call.body)
            if waiting is not None:
                await sender.answer(EventStream(self._events(call, model), waiting))
                return
            async with self._models.using(model) as serving:
                await sender.answer(await self._endpoint.handle(replace(call, serving=serving)))

    async def _events(self, call: Call, model: PooledModel) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer. Before the first event, open the model of the request."""
        async with self._models.using(model) as serving:
            answer = await self._endpoint.handle(replace(call, serving=serving))
            assert isinstance(answer, EventStream), "`waiting` says that it streams"
            async with aclosing(answer.events) as events:
                async for event in events:
                    yield event

    def _count(
        self, status: int, gone: bool, seconds: float, facts: Mapping[str, float], failed: str,
        state: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Count and log an answer.

        failed: the code of the error that is the answer, or ""
        state: the state that `Gate` gave the request: its id and the salt of its API key
        """
        endpoint, metrics = self._endpoint, self._serving.metrics
        word = "gone" if gone else str(status)
        metrics.add("ruvmlx_requests_total", endpoint=endpoint.path, method=endpoint.method, status=word)
        metrics.add("ruvmlx_request_seconds_total", seconds, endpoint=endpoint.path)
        if gone and "generated_tokens" in facts:
            metrics.add("ruvmlx_cancelled_total")
        shown = {"method": endpoint.method, "path": endpoint.path, "status": word}
        reason = {"reason": failed} if failed else {}
        self._serving.log.write(
            "request", {"id": state["id"], **shown, **reason, "ms": round(1e3 * seconds), **facts}
        )
        if endpoint.method != "GET":
            told: dict[str, Any] = {**shown, "ms": round(1e3 * seconds), **facts}
            self._serving.recent.append((state["salt"], RecentRequest(time=time.time(), **told)))


async def _send_error(sender: Sender, error: ApiError, shape: ErrorShape) -> None:
    try:
        await sender.error(error, shape)
    except ClientGone:
        return


async def _send_refusal(sender: Sender, error: RuvmlxError, body: type | None, shape: ErrorShape) -> str:
    """Send an error of ruvmlx, and return its code, or "". This is a function of its own, because a local
    variable of the frame that caught the error would keep the error, and the error keeps that frame."""
    refusal = request_error(error, body)
    await _send_error(sender, refusal, shape)
    return refusal.code or ""


def _check_media_type(headers: Mapping[str, str]) -> None:
    """Raise ApiError, 415, if the request says that its body is not JSON. By default, the program `curl -d`
    says that the body is a form, so the server accepts a form. But the server refuses a form from a web page,
    which the headers `Origin` or `Sec-Fetch-Site` of the browser show."""
    media = headers.get("content-type", JSON).partition(";")[0].strip().lower()
    is_curl = media == FORM and not {"origin", "sec-fetch-site"} & {*headers}
    if media != JSON and not is_curl:
        raise ApiError(415, "the body must be application/json.", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "the body must not be compressed.", code="unsupported_media_type")


def _abort(scope: Scope) -> None:
    """Close the client's connection at once, although the client has not read all the data."""
    connection = scope["state"].get("connection")
    if connection is not None:
        connection.transport.abort()

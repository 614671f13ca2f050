"""This module is the outermost layer of the server's application. The module checks the host, the origin and
the API key of each request, answers CORS preflight requests, and sends the errors of these checks."""

import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import unquote

from starlette.routing import compile_path

from .access import Access, headers_of
from .endpoint import Endpoint, error_shape
from .errors import ApiError
from .sending import Receive, Send, Sender, refuse_websocket
from .serving import Serving

REQUEST_ID = "x-request-id", "request-id"  # the names that the clients of OpenAI and of Anthropic read
_AUTHORITY = re.compile(rb"https?://([^/]*)", re.IGNORECASE)
App = Callable[[Any, Any, Any], Awaitable[None]]


class Gate:
    """An ASGI application around the router of the endpoints. Only requests that pass the checks reach the
    router."""

    def __init__(
        self,
        app: App,
        serving: Serving,
        access: Access,
        endpoints: Sequence[Endpoint],
        sockets: Sequence[str],
    ):
        """sockets: the paths at which the server has a WebSocket."""
        self._app, self._serving, self._access, self._sockets = app, serving, access, sockets
        # The router finds the endpoint of a request with the same expressions in the same order. With other
        # expressions, a request could reach an endpoint without the checks of this endpoint.
        self._endpoints = [(compile_path(endpoint.path)[0], endpoint) for endpoint in endpoints]

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        _use_origin_form(scope)
        if scope["type"] == "websocket":
            await self._attach(scope, receive, send)
            return
        headers, endpoint = headers_of(scope), self._find(scope)
        state = scope.setdefault("state", {})
        state["id"] = uuid.uuid4().hex[:12]  # the id of the request in its answer's headers and in the log
        answer_headers = [(name, state["id"]) for name in REQUEST_ID]
        try:
            self._check_size(scope)
            self._access.check_host(headers)
            self._access.check_origin(headers)
            answer_headers += self._access.cors(headers)
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await self._sender(send, answer_headers).empty(self._access.preflight(headers))
                return
            if endpoint is not None and endpoint.is_control:
                self._access.check_chat(headers)
            if endpoint is not None and endpoint.is_private:
                self._access.check_private(headers)
            state["salt"], state["headers"] = self._access.check_key(headers, endpoint), answer_headers
            await self._app(scope, receive, send)
        except ApiError as error:
            path = endpoint.path if endpoint is not None else ""
            self._serving.note_refusal(error, path, state["id"])
            await self._sender(send, answer_headers).error(error, error_shape(endpoint, headers))

    def _check_size(self, scope: dict[str, Any]) -> None:
        """Raise ApiError, 431, if the request's header is too large. The library h11 limits the size of the
        header only if the header arrives in several parts."""
        fields = [(scope.get("raw_path", b""), scope.get("query_string", b"")), *scope["headers"]]
        if sum(len(name) + len(value) for name, value in fields) > self._serving.limits.header:
            message = f"the header is larger than {self._serving.limits.header} bytes."
            raise ApiError(431, message, code="header_too_large")

    async def _attach(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Pass a WebSocket of the chat app to the router. No web page can connect, and the client needs a key
        of the chat app, because the chat app shows all chats."""
        headers = headers_of(scope)
        try:
            self._check_size(scope)
            self._access.check_host(headers)
            if scope["path"] not in self._sockets:
                message = "there is no WebSocket at this path; send a request without `Upgrade`."
                raise ApiError(404, message, code="unknown_path")
            self._access.check_chat(headers)
            await self._app(scope, receive, send)
        except ApiError as error:
            self._serving.note_refusal(error)
            await refuse_websocket(send, error)

    def _sender(self, send: Send, headers: Sequence[tuple[str, str]]) -> Sender:
        return Sender(send, self._serving.limits, headers)

    def _find(self, scope: dict[str, Any]) -> Endpoint | None:
        """Return the endpoint for the path and the method of the request. For a HEAD request, return the
        endpoint of the method GET, as the router does. If no endpoint of the path has this method, return the
        first endpoint of the path. Return None for an unknown path."""
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        here = [endpoint for rule, endpoint in self._endpoints if rule.match(scope["path"])]
        return next((e for e in here if e.method == method), here[0] if here else None)


def _use_origin_form(scope: dict[str, Any]) -> None:
    """If the request line has a whole URL, keep only its path. The host of the URL takes the place of the
    Host header. (RFC 9112, section 3.2.2: clients send such a request line to a proxy, and a server must
    accept it.)"""
    target = scope.get("raw_path", b"")
    if found := _AUTHORITY.match(target):
        path = target[found.end() :] or b"/"
        scope["raw_path"], scope["path"] = path, unquote(path.decode("ascii"))
        others = [field for field in scope["headers"] if field[0] != b"host"]
        scope["headers"] = [(b"host", found[1]), *others]

"""This module builds the server's application. The application has all endpoints. Before a request reaches an
endpoint, the application checks the request's host, origin and, unless the endpoint is open to all, API
key."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, WebSocketRoute

from . import (
    chat,
    chats,
    completions,
    embeddings,
    health,
    infill,
    llama_cpp,
    messages,
    models,
    ollama_chat,
    ollama_models,
    open_models,
    openapi,
    page,
    page_texts,
    ratings,
    rerank,
    responses,
    stored_responses,
)
from .access import Access
from .dispatch import Dispatcher
from .endpoint import Endpoint, error_shape
from .errors import ApiError, ErrorShape
from .gate import Gate
from .model_pool import ModelPool
from .ollama_chat import ollama_error
from .sending import Receive, Send, Sender
from .serving import Serving

# To add an endpoint, add a row to the list ENDPOINTS of the module that answers the endpoint. The routes and
# the OpenAPI document are made from the lists ENDPOINTS of all modules.
ENDPOINTS: list[Endpoint] = [
    *chat.ENDPOINTS,
    *completions.ENDPOINTS,
    *messages.ENDPOINTS,
    *responses.ENDPOINTS,
    *stored_responses.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *rerank.ENDPOINTS,
    *ratings.ENDPOINTS,
    *models.ENDPOINTS,
    *open_models.ENDPOINTS,
    *ollama_chat.ENDPOINTS,
    *ollama_models.ENDPOINTS,
    *llama_cpp.ENDPOINTS,
    *infill.ENDPOINTS,
    *health.ENDPOINTS,
    *page.ENDPOINTS,
    *page_texts.ENDPOINTS,
    *chats.ENDPOINTS,
]


def make_app(models: ModelPool, access: Access, sockets: Sequence[WebSocketRoute] = ()) -> Gate:
    """Build the ASGI application of the server. sockets: the WebSocket routes through which the chat app uses
    terminals (apps/attach/)."""
    endpoints, serving = [*ENDPOINTS, openapi.endpoint(ENDPOINTS)], models.first.serving
    routes = [Route(e.path, Dispatcher(models, e), methods=[e.method]) for e in endpoints]
    refused = {HTTPException: _not_routed(serving, endpoints, routes)}
    router = Starlette(routes=[*routes, *sockets], exception_handlers=refused)
    router.router.redirect_slashes = False
    return Gate(router, serving, access, endpoints, [socket.path for socket in sockets])


def _not_routed(serving: Serving, endpoints: Sequence[Endpoint], routes: Sequence[Route]) -> Any:
    """Return a handler for requests whose path or method is unknown. The handler answers with an error. For
    an unknown method, the header `Allow` of the answer lists all methods of the path."""

    async def answer(request: Any, error: HTTPException) -> Any:
        headers, code, known = {}, "unknown_path", {e.path for e in endpoints}
        # The log gets an unknown path only if it is a known path without /v1: a client can send any words.
        path = request.url.path if f"/v1{request.url.path}" in known else ""
        meant = _meant_path(request.url.path, known)
        message = f"there is no such path; {meant or 'GET /openapi.json lists all'}."
        if error.status_code == 405:
            path = next(r.path for r in routes if r.matches(request.scope)[0] != Match.NONE)
            code = "unknown_method"
            methods = {method for route in routes if route.path == path for method in route.methods or ()}
            headers["Allow"] = ", ".join(sorted(methods))
            message = "this path does not have this method; GET /openapi.json lists all."
        failure = ApiError(error.status_code, message, code=code)
        serving.note_refusal(failure, path, request.scope["state"]["id"])
        return _Failure(serving, failure, headers, _shape(request, endpoints))

    return answer


def _meant_path(path: str, known: Container[str]) -> str:
    """Return the part of an error that names the path that the client probably means. Return "" if no path
    is probable. A client adds its path to a base URL. Often the base URL has the part /v1 or a slash too
    many, or lacks /v1."""
    steps = [step for step in path.split("/") if step]
    for start in range(len(steps)):
        end = "".join(f"/{step}" for step in steps[start:])
        if end in known:
            return f"the path is {end}"
        if f"/v1{end}" in known:
            return f"the path is /v1{end}, so the base URL must end in /v1"
    return ""


def _shape(request: Any, endpoints: Sequence[Endpoint]) -> ErrorShape:
    """Return the form (OpenAI's, Anthropic's or ollama's) in which the server answers with an error for the
    path of this request. A path that begins with /api/ has ollama's form. For another path, the first
    endpoint in the list whose path is this path or a parent path decides (`error_shape`)."""
    path = request.url.path
    if path.startswith("/api/"):
        return ollama_error
    found = (e for e in endpoints if path == e.path or path.startswith(f"{e.path}/"))
    return error_shape(next(found, None), request.headers)


class _Failure:
    """An ASGI application that answers a request with an error."""

    def __init__(self, serving: Serving, error: ApiError, headers: Mapping[str, str], shape: ErrorShape):
        self._serving, self._error, self._headers, self._shape = serving, error, headers, shape

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        headers = [*scope["state"].get("headers", ()), *self._headers.items()]
        await Sender(send, self._serving.limits, headers).error(self._error, self._shape)

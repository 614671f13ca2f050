"""This module sends requests to a running `ruvmlx serve`, for the verbs (commands) that need a server."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ruvmlx.errors import RuvmlxError, UsageError

from .options import SERVER

F = TypeVar("F", bound=Callable[..., Any])
START = "Check the address, or start a server with `ruvmlx serve`."


def server_options(function: F) -> F:
    """Add the flags --server and --api-key, for the server's address and key, to a verb."""
    server = click.option(
        "--server", default=SERVER, show_default=True, metavar="URL", help="Where `ruvmlx serve` answers."
    )
    key = click.option(
        "--api-key", envvar="RUVMLX_API_KEY", metavar="KEY", help="The server's key, if it asks for one."
    )
    return server(key(function))


def saved_key(server: str, api_key: str | None) -> str | None:
    """Return the key `api_key` if the user gave it. If the user gave no key and the server is on this
    machine, return the first key of the chat app in this machine's key file, or None if the file has none. If
    the user gave no key and the server is on another machine, return None."""
    from ..attach.client import is_here
    from ..server.keys import saved_chat_keys

    return next(iter(saved_chat_keys()), None) if api_key is None and is_here(server) else api_key


def root_of(server: str) -> str:
    """Return the address without the ending /v1, with which `ruvmlx serve` prints the address."""
    return server.rstrip("/").removesuffix("/v1")


def answer_of(
    server: str,
    path: str,
    key: str | None,
    body: Any = None,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
    advice: str = START,
) -> Any:
    """Send a request to the server and return the JSON of the answer. method: the HTTP method; None: POST if
    there is a body, else GET. advice: what the error tells the user if no server answers. Raise RuvmlxError
    if the server refuses or does not answer, and UsageError for a key or an address that no server can
    have."""
    from ..attach.client import address_parts

    address_parts(server)
    if key and not (key.isascii() and key.isprintable()):  # a header of HTTP cannot hold the key
        raise UsageError("the API key has a character that is not printable ASCII; give the server's key.")
    url, sent = f"{root_of(server)}{path}", {"content-type": "application/json", **(headers or {})}
    sent |= {"authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, sent, method=method), timeout=timeout
        ) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise _refusal(server, bool(key), error) from None
    except (OSError, ValueError, http.client.HTTPException):
        raise RuvmlxError(_no_answer(server, advice)) from None


def _no_answer(server: str, advice: str) -> str:
    """Return the error's text for a server that does not answer. The text names the flag --server only
    for the default address."""
    other = " `--server URL` asks a server at another address." if server == SERVER else ""
    return f"no server answers at {server}. {advice}{other}"


def _refusal(server: str, has_key: bool, error: urllib.error.HTTPError) -> RuvmlxError:
    """Return the error for an answer of the server that is no success. has_key: True if the request had a
    key."""
    if error.code == 401 and has_key:
        return RuvmlxError(
            f"the server at {server} does not accept the key. Give another of its keys by --api-key; a key "
            "with an adapter of its own can neither stop models nor see chats."
        )
    if error.code == 401:
        return RuvmlxError(f"the server at {server} asks for a key: give --api-key.")
    try:
        return UsageError(f"the server refuses: {json.load(error)['error']['message']}")
    except (OSError, ValueError, KeyError, TypeError):
        return RuvmlxError(f"the server at {server} cannot be used: it answers {error.code}.")

"""Questions to a running `ruvmlx serve`, for the verbs that ask it something."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from ruvmlx.errors import RuvmlxError, UsageError

from .options import SERVER

F = TypeVar("F", bound=Callable[..., Any])


def server_options(function: F) -> F:
    """The flags that name the server and its key."""
    server = click.option(
        "--server", default=SERVER, show_default=True, metavar="URL", help="Where `ruvmlx serve` answers."
    )
    key = click.option(
        "--api-key", envvar="RUVMLX_API_KEY", metavar="KEY", help="The server's key, if it asks for one."
    )
    return server(key(function))


def saved_key(server: str, api_key: str | None) -> str | None:
    """The key that was given, else the one that this machine keeps for its own server."""
    from ..attach.client import is_here
    from ..server.keys import saved_keys

    return next(iter(saved_keys()), None) if api_key is None and is_here(server) else api_key


def answer_of(
    server: str,
    path: str,
    key: str | None,
    body: Any = None,
    timeout: float = 60.0,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> Any:
    """The server's JSON to GET, or with a body to POST, or to another method. RuvmlxError, one line, if it
    refuses, or if none answers."""
    url, sent = f"{server.rstrip('/')}{path}", {"content-type": "application/json", **(headers or {})}
    sent |= {"authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, sent, method=method), timeout=timeout
        ) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from None
    except (OSError, ValueError):
        raise RuvmlxError(f"no ruvmlx answers at {url}; start `ruvmlx serve`, or give --server.") from None


def _refusal(url: str, error: urllib.error.HTTPError) -> RuvmlxError:
    if error.code == 401:
        return RuvmlxError(f"the server at {url} asks for a key: give --api-key.")
    try:
        return UsageError(f"the server refuses: {json.load(error)['error']['message']}")
    except (OSError, ValueError, KeyError, TypeError):
        return RuvmlxError(f"the server at {url} cannot be used: it answers {error.code}.")

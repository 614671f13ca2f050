"""This module decides which clients can use the server. The gate (gate.py) applies the rules of this module
to the Host header, the Origin header and the API key of each request."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from .endpoint import Endpoint
from .errors import ApiError
from .keys import matching, salt_digest

Headers = Mapping[str, str]
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^:\[\]@/\s]+)(:\d{1,5})?")
METHODS = "GET, POST, DELETE, OPTIONS"


@dataclass(frozen=True)
class Access:
    """The access rules of one server.

    keys: the valid API keys; if empty, clients need no key. chat_keys: the valid keys for the chat app, which
    always needs a key because it shows all chats and writes files. hosts: the names that a Host header can
    have besides localhost and IP addresses. localhost and IP addresses are always allowed, because an
    attacker's name server cannot assign these names. origins: the web pages of other machines that can use
    the server, for example https://chat.example; "*" means all web pages. Web pages with an origin on this
    machine (localhost) do not have to be in `origins`.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    chat_keys: Sequence[str] = ()

    def check_key(self, headers: Headers, endpoint: Endpoint | None) -> str:
        """Check the client's API key, and return the salt for the client's KV caches. Clients share a KV
        cache only if their salts are equal. If the server or the endpoint needs no key, return "". Raise
        ApiError, 401, if the key is not valid."""
        if not self.keys or (endpoint is not None and endpoint.is_open):
            return ""
        return salt_digest(_key(headers, self.keys))

    def check_chat(self, headers: Headers) -> None:
        """Raise ApiError if the client is a web page or has no valid key of the chat app."""
        if "origin" in headers:
            raise ApiError(403, "no web page may use the chat app.", code="origin_not_allowed")
        _key(headers, self.chat_keys)

    def check_private(self, headers: Headers) -> None:
        """Raise ApiError if the client is a web page other than the server's own page, or has no valid key of
        the chat app."""
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, headers.get("host", "")):
            raise ApiError(403, "only the server's own page may see the chats.", code="origin_not_allowed")
        _key(headers, self.chat_keys)

    def check_host(self, headers: Headers) -> None:
        """Raise ApiError if the Host header is missing, or has neither localhost nor an IP address nor a name
        in `hosts`. This check stops attackers who let the name of their own web page point to this server's
        address (DNS rebinding)."""
        found = _HOST.fullmatch(headers.get("host", ""))
        name = found["name"].lower().rstrip(".") if found else ""
        if not (_is_local(name) or _is_address(name) or name in self.hosts):
            message = "the Host header does not name this server; `serve --allow-host NAME` allows a name."
            raise ApiError(403, message, code="host_not_allowed")

    def check_origin(self, headers: Headers) -> None:
        """Raise ApiError if the client is a web page, unless it is a page of this machine, the server's own
        page, or a page whose origin is in `origins`. Call `check_host` first, because it refuses a Host
        header with the name of a foreign page."""
        origin = headers.get("origin")
        if origin is not None and not self._allows(origin) and not _is_own(origin, headers.get("host", "")):
            message = "this web page may not ask; `serve --allow-origin ORIGIN` allows one."
            raise ApiError(403, message, code="origin_not_allowed")

    def _allows(self, origin: str) -> bool:
        if origin in self.origins or "*" in self.origins:
            return True
        try:
            parts = urlsplit(origin)
            return parts.scheme in ("http", "https") and _is_local_host(parts.hostname or "")
        except ValueError:
            return False

    @staticmethod
    def cors(headers: Headers) -> list[tuple[str, str]]:
        """Return the CORS headers that let an allowed web page read the server's answer. Return no headers if
        the client is not a web page."""
        origin = headers.get("origin")
        if origin is None:
            return []
        return [
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", "retry-after, x-request-id, request-id, x-ruvmlx-ignored"),
            ("vary", "origin"),
        ]

    @staticmethod
    def preflight(headers: Headers) -> list[tuple[str, str]]:
        """Return the CORS headers that let an allowed web page send a request to the server."""
        asked = headers.get("access-control-request-headers", "authorization, content-type")
        return [
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", asked),
            ("access-control-max-age", "600"),
        ]


def _key(headers: Headers, keys: Sequence[str]) -> str:
    """Return the client's API key if the key is in `keys`.

    A request can have two keys: the bearer token, and the key in the header `x-api-key`. One valid key is
    enough, because a proxy can add its own token to the request. If both keys are valid, return the bearer
    token. If the request has no valid key, raise ApiError, 401.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    sent = [token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    sent_keys = [key.strip() for key in sent if key.strip()]
    for key in sent_keys:
        if matching(key, keys) is not None:
            return key
    message = "an API key is needed, as in `Authorization: Bearer KEY`; this one is not valid."
    if not sent_keys:
        message = "an API key is needed, as in `Authorization: Bearer KEY`."
    raise ApiError(401, message, code="invalid_api_key")


def _is_own(origin: str, host: str) -> bool:
    """Return True if the web pages of this origin come from this server."""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def is_loopback(host: str) -> bool:
    """Return True if only programs on this machine can reach a server that listens on this address."""
    return _is_local_host(host)


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _is_local_host(name: str) -> bool:
    if _is_local(name.lower()):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def headers_of(scope: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping from the lower-case names of headers to their values. If a header occurs several
    times, the mapping has its first value."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found

"""Who may ask: the Host header, the Origin header, the API key. Runs before anything else of a request."""

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
    """The rules of one server.

    keys: valid API keys; none: no key is asked for. chat_keys: those for the chat app, which shows all
    chats and writes files, and so always asks for one. hosts: names that the Host header may have, besides
    localhost and IP addresses, which no attacker's name server can hand out. origins: web pages that may ask,
    as in https://chat.example, besides those of this machine.
    """

    keys: Sequence[str] = ()
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    chat_keys: Sequence[str] = ()

    def check_key(self, headers: Headers, endpoint: Endpoint | None) -> str:
        """The salt of the caller's caches; ApiError 401."""
        if not self.keys or (endpoint is not None and endpoint.is_open):
            return ""
        return salt_digest(_key(headers, self.keys))

    def check_chat(self, headers: Headers) -> None:
        """Refuse web pages, of whatever origin, and whoever has no key; ApiError."""
        if "origin" in headers:
            raise ApiError(403, "no web page may use the chat app.", code="origin_not_allowed")
        _key(headers, self.chat_keys)

    def check_private(self, headers: Headers) -> None:
        """Refuse other web pages, also of this machine, and whoever has no key of the chat app; ApiError."""
        origin = headers.get("origin")
        if origin is not None and not _is_own(origin, headers.get("host", "")):
            raise ApiError(403, "only the server's own page may see the chats.", code="origin_not_allowed")
        _key(headers, self.chat_keys)

    def check_host(self, headers: Headers) -> None:
        """Refuse a name that is not this server's: a web page may have pointed its own name here."""
        found = _HOST.fullmatch(headers.get("host", ""))
        name = found["name"].lower().rstrip(".") if found else ""
        if not (_is_local(name) or _is_address(name) or name in self.hosts):
            message = "the Host header does not name this server; `serve --allow-host NAME` allows a name."
            raise ApiError(403, message, code="host_not_allowed")

    def check_origin(self, headers: Headers) -> None:
        """Refuse web pages that are not of this machine and not this server's own. Call `check_host` before:
        it makes sure that the Host header is no name of somebody else's page."""
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
        """Headers that let an allowed web page read the answer."""
        origin = headers.get("origin")
        if origin is None:
            return []
        return [
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", "retry-after, x-ruvmlx-ignored"),
            ("vary", "origin"),
        ]

    @staticmethod
    def preflight(headers: Headers) -> list[tuple[str, str]]:
        """Headers that let an allowed web page ask."""
        asked = headers.get("access-control-request-headers", "authorization, content-type")
        return [
            ("access-control-allow-methods", METHODS),
            ("access-control-allow-headers", asked),
            ("access-control-max-age", "600"),
        ]


def _key(headers: Headers, keys: Sequence[str]) -> str:
    """The key that was given, if it is one of these; ApiError 401."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    found = matching(given.strip(), keys)
    if found is None:
        message = "an API key is needed, as in `Authorization: Bearer KEY`; this one is not valid."
        if not given:
            message = "an API key is needed, as in `Authorization: Bearer KEY`."
        raise ApiError(401, message, code="invalid_api_key")
    return found


def _is_own(origin: str, host: str) -> bool:
    """Is it an origin of pages that this server serves?"""
    return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def is_loopback(host: str) -> bool:
    """Is an address to listen on reachable from this machine alone?"""
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
    """Header values by lower-case name. If a header is repeated, its first value counts."""
    found: dict[str, str] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1"), value.decode("latin-1"))
    return found

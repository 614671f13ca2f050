"""This module reads the list of the user's tool servers from the file `mcp.json` in the data folder. Other
MCP clients use the same format:

{"mcpServers": {
    "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]},
    "search": {"url": "http://127.0.0.1:8000/mcp", "headers": {"Authorization": "Bearer ..."}}
}}
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruvmlx import settings
from ruvmlx.chats.chat_file import read_bytes
from ruvmlx.errors import NotFound, UsageError
from ruvmlx.text import did_you_mean, one_line

MAX_BYTES = 1 << 20  # the maximum size of the file in bytes
CALL_SECONDS = 60.0  # the default time limit of a tool call
_NAME = re.compile(r"[\w.-]{1,40}")
_FIELDS = ("command", "args", "env", "url", "headers", "timeout")
# Other programs write these fields into the file; this module ignores the fields.
_IGNORED = ("type", "disabled", "autoApprove", "alwaysAllow", "description")


@dataclass(frozen=True)
class ToolServer:
    """A tool server: a program to start (command, args, env), or an address (url, headers). timeout: the time
    limit of a tool call in seconds."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = CALL_SECONDS

    @property
    def line(self) -> str:
        """The server's command or address on one line, without `env` and `headers`, whose values can be
        secret."""
        return one_line(self.url or " ".join([self.command, *self.args]))


def path() -> Path:
    return settings.home() / "mcp.json"


def servers() -> dict[str, ToolServer]:
    """Return the tool servers of the file by name, or {} if there is no file. Raise UsageError if the file
    has a wrong format or cannot be read."""
    file = path()
    if not file.exists():
        return {}
    try:
        found = json.loads(read_bytes(file, MAX_BYTES))
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{file} is not JSON: {one_line(str(e))}.") from e
    rows = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(rows, dict):
        raise UsageError(f'{file} must be {{"mcpServers": {{"NAME": {{"command": "..."}}}}}}.')
    return {name: _server(name, row, file) for name, row in rows.items()}


def find(name: str) -> ToolServer:
    """Return the tool server with this name. Raise NotFound if the file has no such server."""
    known = servers()
    if name not in known:
        there = f"{path()} has: {', '.join(known)}" if known else f"{path()} has none; /tools says how"
        raise NotFound(f"no tool server {name[:40]!r}.{did_you_mean(name, known)} {there}")
    return known[name]


def _server(name: str, row: Any, file: Path) -> ToolServer:
    where = f"{file}: the server {name[:40]!r}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where} needs a name of 1 to 40 letters, digits, - . or _.")
    if not isinstance(row, dict):
        raise UsageError(f"{where} must be an object with a command or a url.")
    unknown = next((key for key in row if key not in (*_FIELDS, *_IGNORED)), None)
    if unknown is not None:
        raise UsageError(f"{where} has {unknown[:40]!r}; it may have {', '.join(_FIELDS)}.")
    command, url = row.get("command", ""), row.get("url", "")
    if not (_is_text(command) and _is_text(url) and bool(command) != bool(url)):
        raise UsageError(f"{where} needs either a command or a url, as text.")
    if url and not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{where} has the url {one_line(url)[:60]!r}; it must begin with http:// or https://."
        )
    arguments, timeout = row.get("args", []), row.get("timeout", CALL_SECONDS)
    if not isinstance(arguments, list) or not all(map(_is_text, arguments)):
        raise UsageError(f"{where} has args that are no list of texts.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 3600:
        raise UsageError(f"{where} has the timeout {one_line(str(timeout))[:40]}; it is 1 to 3600 seconds.")
    env, headers = _texts(row, "env", where), _texts(row, "headers", where)
    return ToolServer(name, command, tuple(arguments), env, url, headers, float(timeout))


def _texts(row: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    found = row.get(key, {})
    if not isinstance(found, dict) or not all(map(_is_text, found.values())):
        raise UsageError(f"{where} has {key} that are no names with texts.")
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value

"""The command `ruvmlx mcp` runs an MCP server over standard input and output. Through this server, an agent
rates replies of the running `ruvmlx serve`, takes ratings back, and searches the user's chats."""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import click

from ruvmlx import __version__
from ruvmlx.errors import RuvmlxError, extra_missing

from .running_server import answer_of, saved_key, server_options
from .verb import Verb

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

INSTRUCTIONS = """\
These tools teach the user's own local model. Rate a reply only when the user says what they think of it:
find its id with `replies`, then call `rate`. `undo` takes that rating back."""
Rating = Literal["up", "down", "1", "2", "3", "4", "5"]


@click.command("mcp", cls=Verb)
@server_options
def mcp(server: str, api_key: str | None) -> None:
    """Offer ratings and the search of chats to an agent, as an MCP server on standard input and output.

    It asks the running `ruvmlx serve`, with a key of the chat app.
    """
    agent_server(server, api_key).run("stdio")


def agent_server(server: str, api_key: str | None) -> "MCPServer":
    """Return the MCP server with its tools. api_key: the key that the user gave, or None. Raise RuvmlxError
    if the Python package mcp is missing."""
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError:
        raise RuvmlxError(f"`ruvmlx mcp` needs the package mcp, version 2; {extra_missing('mcp')}.") from None
    made = MCPServer("ruvmlx", version=__version__, instructions=INSTRUCTIONS, log_level="WARNING")
    ask = partial(_ask, server, api_key)

    @made.tool()
    def replies(limit: int = 10) -> list[dict[str, Any]]:
        """The newest replies of the local model: id, question, beginning of the text, rating."""
        found: list[dict[str, Any]] = ask("/v1/replies")["replies"]
        return found[: max(1, limit)]

    @made.tool()
    def rate(reply_id: str, rating: Rating, note: str = "") -> dict[str, Any]:
        """Rate a reply as the user does: up, down, or 1 to 5. The model's weights change at once. note: why,
        in the user's words."""
        return dict(ask("/v1/ratings", {"id": reply_id, "rating": rating, "note": note or None}))

    @made.tool()
    def undo(reply_id: str) -> dict[str, Any]:
        """Take the rating of a reply back, as if it had never been given."""
        return dict(ask(f"/v1/ratings/{quote(reply_id, safe='')}", method="DELETE"))

    @made.tool()
    def search_chats(words: str, limit: int = 20) -> list[dict[str, Any]]:
        """Messages and titles of the user's chats that have all of these words, the newest first."""
        body = {"words": words, "limit": max(1, min(limit, 200))}
        return list(ask("/v1/chats/search", body)["hits"])

    return made


def _ask(server: str, api_key: str | None, path: str, body: Any = None, method: str | None = None) -> Any:
    """Send a request to `ruvmlx serve` and return its answer. If the server refuses the request or does not
    answer, raise ToolError, whose text the agent reads."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        key = saved_key(server, api_key)  # a server that starts after this program can make a key
        return answer_of(server, path, key, body, method=method)
    except RuvmlxError as error:
        raise ToolError(str(error)) from None


VERBS = [mcp]

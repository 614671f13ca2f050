"""`ruvmlx mcp`: an agent rates replies, takes ratings back and searches chats, over the kept MCP client."""

import json
import os
import sys

import pytest
from ruvmlx.apps.cli.agent_tools import agent_server

from ruvmlx.errors import RuvmlxError

from .conftest import CHAT_KEY
from .test_chats import say

mcp = pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
pytest.importorskip("mcp.server.mcpserver", reason="mcp 2 is not installed")


def address(running):
    return f"http://127.0.0.1:{running.port}"


async def call(client, name, **arguments):
    """A tool's structured result, or the text of its error."""
    found = await client.call_tool(name, arguments)
    if found.is_error:
        return found.content[0].text
    return found.structured_content.get("result", found.structured_content)


async def test_an_agent_teaches(serve):
    """It finds a reply, rates it, takes that back, and searches the chats."""
    running = serve()
    done = running.chat("a rare zebra").json
    said = say(running, "a common dog")
    async with mcp.Client(agent_server(address(running), CHAT_KEY)) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        assert tools == {"replies", "rate", "undo", "search_chats"}
        newest = await call(client, "replies", limit=2)
        assert [row["id"] for row in newest] == [said[0]["reply_id"], done["id"]]
        assert newest[1]["question"] == "a rare zebra" and newest[1]["rating"] is None
        rated = await call(client, "rate", reply_id=done["id"], rating="up", note="short")
        assert rated["applied"] is True and rated["rating"] == "up"
        assert (await call(client, "replies"))[1]["rating"] == "up"
        assert (await call(client, "undo", reply_id=done["id"]))["deleted"] is True
        [hit] = [h for h in await call(client, "search_chats", words="common dog") if h["role"] == "user"]
        assert hit["chat"] == said[0]["chat"] and hit["content"] == "a common dog"
        wrong = await call(client, "rate", reply_id="nonsense", rating="up")
        assert "there is no such reply" in wrong and "\n" not in wrong


async def test_without_the_key_it_says_so(serve):
    running = serve()
    async with mcp.Client(agent_server(address(running), None)) as client:
        assert "asks for a key" in await call(client, "search_chats", words="dog")


async def test_a_key_that_the_server_makes_later_is_used(serve, home):
    """An agent can start this program before the first `ruvmlx serve` makes a key."""
    running = serve()
    async with mcp.Client(agent_server(address(running), None)) as client:
        assert "asks for a key" in await call(client, "replies")
        keys = home / "api_keys"
        keys.write_text(f"{CHAT_KEY}\n")
        keys.chmod(0o600)
        assert await call(client, "replies") == []


async def test_over_standard_input(serve):
    """The verb itself, as an agent starts it."""
    running = serve()
    arguments = ["-m", "ruvmlx", "mcp", "--server", address(running), "--api-key", CHAT_KEY]
    started = mcp.StdioServerParameters(command=sys.executable, args=arguments, env=dict(os.environ))
    async with mcp.Client(started) as client:
        assert await call(client, "replies") == []


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(RuvmlxError, match=r"uv sync --inexact --extra mcp"):
        agent_server("http://127.0.0.1:1", None)


def test_replies_are_those_of_one_key(serve):
    """The list has words, so it asks for a key of the chat app, and shows no other key's."""
    keys = ["a" * 20, "b" * 20]
    running = serve(keys=keys)
    body = json.dumps(running.body(messages=[{"role": "user", "content": "hello"}])).encode()
    running.ask("POST", "/v1/chat/completions", body, authorization=f"Bearer {keys[0]}")
    lists = [running.ask("GET", "/v1/replies", None, authorization=f"Bearer {key}").json for key in keys]
    assert [len(found["replies"]) for found in lists] == [1, 0]
    assert running.ask("GET", "/v1/replies").status == 401

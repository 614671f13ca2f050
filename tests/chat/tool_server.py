"""A small tool server over standard input and output, from the kept SDK. Run as a program."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("small", log_level="ERROR")


@server.tool()
def forecast(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny, 24 degrees"


@server.tool()
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Always an error."""
    raise ValueError("no such\nplace")


@server.tool()
def big() -> str:
    """A megabyte of text."""
    return "word " * 200_000


@server.tool()
def slow() -> str:
    """It never answers."""
    time.sleep(600)
    return "late"


@server.tool()
def die() -> str:
    """The server ends."""
    os._exit(3)


@server.tool()
def secrets() -> str:
    """The variables that the server sees."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if sys.argv[1:] == ["broken"]:
        print("something else\nthe reason", file=sys.stderr)
        sys.exit(1)
    server.run("stdio")

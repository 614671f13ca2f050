"""A small tool server over standard input and output, from the kept SDK. Run as a program; its arguments are
the tools that it has, all of them if there are none."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("small", log_level="ERROR")


def tool(function):
    if len(sys.argv) == 1 or sys.argv[1] == "http" or function.__name__ in sys.argv[1:]:
        server.tool()(function)
    return function


@tool
def forecast(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny, 24 degrees"


@tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@tool
def fail() -> str:
    """Always an error."""
    raise ValueError("no such\nplace")


@tool
def big() -> str:
    """A megabyte of text."""
    return "word " * 200_000


@tool
def slow() -> str:
    """It never answers."""
    time.sleep(600)
    return "late"


@tool
def die() -> str:
    """The server ends."""
    os._exit(3)


@tool
def secrets() -> str:
    """The variables that the server sees."""
    return " ".join(sorted(os.environ))


if __name__ == "__main__":
    if sys.argv[1:] == ["broken"]:
        print("something else\nthe reason", file=sys.stderr)
        sys.exit(1)
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    server.run("stdio")

"""This module has the tools of one chat: the tool servers that are on, the tools that the model can call, and
the tool calls that the user must allow."""

import json
import re
import threading
from dataclasses import dataclass, field

from ruvmlx.chats.tool_turns import ToolOffer
from ruvmlx.errors import Interrupted, NotFound, RuvmlxError, UsageError
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.text import did_you_mean, one_line

from . import server_file
from .connections import Connections, ServerTool
from .server_file import ToolServer

MOST_CALLS = 10  # the maximum number of tool calls for one answer of the model
NOT_ALLOWED = "(The user did not allow this call.)"
STOPPED = "(The user stopped this call.)"
TOO_MANY = f"(Not run: an answer may make at most {MOST_CALLS} calls.)"
_SHOWN = 60  # the maximum number of characters of a tool's description in a list
_OTHER = re.compile(r"[^\w.-]", re.ASCII)


@dataclass
class ChatTools:
    """The tool servers and the permissions of one chat. At first, all servers are off. `ChatState.open_chat`
    turns all servers off again."""

    may_run: bool = True  # False if the user cannot turn on servers, because the app runs in `ruvmlx serve`
    _connections: Connections = field(default_factory=Connections)
    _on: dict[str, list[ServerTool]] = field(default_factory=dict)
    # server and name of each tool that runs without asking the user
    _always: set[tuple[str, str]] = field(default_factory=set)
    _started: dict[str, ToolServer] = field(default_factory=dict)  # each server as it was started last
    _made: int = 0  # the number of tool calls so far for the present answer

    # Methods that turn tool servers on and off

    def turn_on(self, name: str, cancel: threading.Event) -> list[str]:
        """Start a tool server for this chat, and return the names of its tools. cancel: an event; once it is
        set, the start ends."""
        if not self.may_run:
            raise UsageError(
                "tools do not run in a chat on a server; use `ruvmlx chat` without --server for them."
            )
        server = server_file.find(name)
        self.turn_off(name)
        if self._started.get(name) != server:  # the user has allowed calls of another program or address
            self._always = {place for place in self._always if place[0] != name}
        self._started[name] = server
        found = self._connections.start(server, cancel)
        self._on[name] = found
        return [shown for shown, tool in self.by_name().items() if tool.server == name]

    def turn_off(self, name: str) -> bool:
        """Stop a tool server. Return False if the server was not on."""
        self._connections.stop(name)
        return self._on.pop(name, None) is not None

    def turn_all_off(self) -> None:
        for name in list(self._on):
            self.turn_off(name)
        self._always.clear()

    def close(self) -> None:
        """Stop all tool servers, and wait a few seconds until they have ended."""
        self._connections.close()

    @property
    def is_on(self) -> bool:
        return bool(self._on)

    def by_name(self) -> dict[str, ServerTool]:
        """Return the tools by the names that the model uses: at most 100 letters, digits, "_", "." and "-".
        If two tools have the same name, the second tool's name begins with the name of its server."""
        found: dict[str, ServerTool] = {}
        for tools in self._on.values():
            for tool in tools:
                name = _OTHER.sub("_", tool.name)[:100]
                found[name if name not in found else f"{_OTHER.sub('_', tool.server)}.{name}"] = tool
        return found

    def lines(self) -> list[str]:
        """Return the lines that /tools shows: a line for each server, and lines for the tools of the servers
        that are on."""
        known = server_file.servers()
        if not known:
            return [
                f"No tool servers. Write them into {server_file.path()}, as in",
                '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "SERVER", "FOLDER"]}}}',
            ]
        names, width = self.by_name(), max(map(len, known))
        rows = list[str]()
        for name, server in known.items():
            rows.append(f"{name:<{width}}  {'on ' if name in self._on else 'off'}  {server.line}")
            rows += [
                f"    {shown}  {_short(tool.description)}".rstrip()
                for shown, tool in names.items()
                if tool.server == name
            ]
        return [*rows, "/tools on NAME starts a server for this chat, /tools off NAME stops it."]

    # Methods for the tools that the model can call

    def offer(self, function: str = "") -> ToolOffer:
        """Return the tools that the next reply can call. After MOST_CALLS calls, the offer's field `is_over`
        says that the reply can call no tool. function: the name of the tool that the reply must call, or "".
        Raise UsageError if this tool is off."""
        tools = self.by_name()
        if function and function not in tools:
            there = f"These are on: {', '.join(tools)}" if tools else "No tool is on: try /tools on NAME"
            raise UsageError(f"there is no tool {function[:40]!r}.{did_you_mean(function, tools)} {there}")
        rows = [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": tool.schema},
            }
            for name, tool in tools.items()
        ]
        return ToolOffer(tuple(rows), function, is_over=self._made >= MOST_CALLS)

    # Methods for tool calls of the model

    def begin_answer(self) -> None:
        """Begin a new answer of the model, which can make up to MOST_CALLS tool calls."""
        self._made = 0

    def refusal(self, call: ParsedCall) -> str:
        """Return a result that refuses the tool call without asking the user. Return "" if the call is
        possible. A call is refused if the model has already made MOST_CALLS calls for this answer, or if the
        tool does not exist."""
        if self._made >= MOST_CALLS:
            return TOO_MANY
        return "" if call.name in self.by_name() else f"(There is no tool {call.name}.)"

    def needs_question(self, call: ParsedCall) -> bool:
        return self._place_of(call) not in self._always

    def always_allow(self, call: ParsedCall) -> None:
        self._always.add(self._place_of(call))

    def _place_of(self, call: ParsedCall) -> tuple[str, str]:
        """Return the server and the name of the called tool. After a server goes off or on, `call.name` can
        mean the tool of another server."""
        tool = self.by_name()[call.name]
        return tool.server, tool.name

    def run(self, call: ParsedCall, cancel: threading.Event) -> str:
        """Run a tool call. Return the tool's result, or one line in brackets with the error. Raise
        Interrupted if the event `cancel` is set before the tool answers."""
        self._made += 1
        tool = self.by_name().get(call.name)
        try:
            if tool is None:
                raise NotFound(f"there is no tool {call.name}.")
            return self._connections.call(tool.server, tool.name, json.loads(call.arguments), cancel)
        except Interrupted:
            raise
        except RuvmlxError as error:
            return f"({one_line(str(error))})"


def _short(description: str) -> str:
    line = one_line(description)
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1].rstrip()}…"

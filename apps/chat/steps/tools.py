"""This module has the steps of two commands. `/tools` lists tool servers and turns them on or off for the
chat. `/tool` sends a message that the model must answer with a tool call."""

import threading

from ruvmlx.chats.tool_turns import ToolResult, offered_text
from ruvmlx.errors import UsageError
from ruvmlx.host.serving import BeginReply
from ruvmlx.models.text.tool_calls import ParsedCall
from ruvmlx.runtime import Runtime, Turn

from ..state import ChatState, Outcome, text_outcome
from ..tools.chat_tools import NOT_ALLOWED, STOPPED
from .write import place, say, with_tools

TOOLS_USAGE = "/tools [on|off NAME]"
ONCE, ALWAYS, NO = "once", "always", "no"


def tools(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """List the tool servers and their tools, or turn a server on or off for this chat."""
    if argument:
        return text_outcome(switch(state, argument, state.cancel))
    lines = state.tools.lines()
    if state.tools.is_on:
        size = runtime.chats.count_tokens(offered_text(state.tools.offer()))
        lines.append(f"What is on takes {size:,} of {runtime.model.context:,} tokens of each message.")
    return text_outcome("\n".join(lines))


def switch(state: ChatState, argument: str, cancel: threading.Event) -> str:
    """Turn a tool server on or off, and return a sentence for the user. The function can take a minute, so it
    uses no runtime and can run in another thread.

    argument: "on NAME" or "off NAME". cancel: an event; once it is set, the start of the server ends.
    """
    word, _, name = argument.partition(" ")
    if word not in ("on", "off") or not name.strip():
        raise UsageError(f"{TOOLS_USAGE}: got {argument[:40]!r}")
    name = name.strip()
    if word == "off":
        return f"{name} is off." if state.tools.turn_off(name) else f"{name} was not on."
    names = ", ".join(state.tools.turn_on(name, cancel))
    return f"{name} is on for this chat: {names or 'it has no tools'}. Each call is shown and asked about."


def call_tool(runtime: Runtime, state: ChatState, argument: str) -> Outcome:
    """Send a message that the model must answer with a call of one tool. argument: "NAME TEXT", the name of
    the tool and the message."""
    name, text = named_question(argument)
    return Outcome(reply=say(state, text, function=name), then=place)


def named_question(argument: str) -> tuple[str, str]:
    """Split the argument of /tool into the tool's name and the message: "forecast In Rome?" -> ("forecast",
    "In Rome?")."""
    name, _, text = argument.partition(" ")
    if not text.strip():
        raise UsageError("which tool, and what is the message? As in /tool forecast How warm is it in Rome?")
    return name, text.strip()


def answer_results(state: ChatState) -> BeginReply:
    """Return a function that streams the model's reply to the results of its tool calls."""
    session, options, how = state.session, state.options, with_tools(state)
    return lambda runtime, cancel: runtime.chats.answer_results(session, **options.for_reply(cancel), **how)


def outcome_of(state: ChatState, call: ParsedCall, answer: str, cancel: threading.Event) -> str:
    """Run a tool call if the user allows it, and return the call's result as text. Raise Interrupted if the
    user stops the call. answer: the user's answer to the question, ONCE, ALWAYS or NO."""
    if answer == NO:
        return NOT_ALLOWED
    if answer == ALWAYS:
        state.tools.always_allow(call)
    return state.tools.run(call, cancel)


def save_results(runtime: Runtime, session: str, results: list[tuple[ParsedCall, str]]) -> list[Turn]:
    return runtime.chats.add_results(session, [ToolResult(call, text) for call, text in results])


def stopped_results(calls: tuple[ParsedCall, ...]) -> list[tuple[ParsedCall, str]]:
    """Return a result that says "stopped" for each call in `calls`: the call that the user stopped and the
    calls after it."""
    return [(call, STOPPED) for call in calls]

"""This module has the app's actions for tools. The actions turn tool servers on and off. The actions also
show each tool call, ask the user for permission unless the user has allowed this tool for the whole chat, and
run the call."""

import asyncio
import threading
from functools import partial

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.errors import Interrupted
from ruvmlx.models.text.tool_calls import ParsedCall

from ..commands import COMMANDS
from ..context import ChatContext
from ..messages import Notice, ToolMessage
from ..steps.tools import NO, ONCE, outcome_of, save_results, stopped_results, switch
from ..tool_screen import ToolScreen
from ..tools.described import call_lines


class ToolActions:
    def __init__(self, chat: ChatContext) -> None:
        self._chat = chat
        # if this event is set, the newest tool call or a server's start ends
        self._cancel = threading.Event()

    async def list_or_switch(self, argument: str) -> None:
        """List the tools, or turn a tool server on or off. The method does not wait for a server's start,
        which can take a minute, because the app would handle no key during this wait."""
        chat = self._chat
        if not argument:
            outcome = await chat.host.call_between(
                lambda runtime: COMMANDS["tools"].step(runtime, chat.state, "")
            )
            await chat.transcript.add(Notice(outcome.notice))
            return
        self._cancel = threading.Event()
        chat.phase, chat.status.message = "replying", "Starting the tool server; Esc stops"
        chat.start(partial(self._switch, argument))

    async def _switch(self, argument: str) -> None:
        chat = self._chat
        session = chat.state.session
        try:
            said = await asyncio.to_thread(switch, chat.state, argument, self._cancel)
        finally:
            if chat.phase == "replying":
                chat.phase = "idle"
            chat.status.message = ""
        if session == chat.state.session:
            await chat.transcript.add(Notice(said))

    def stop(self) -> None:
        """End the tool call or the start of a tool server that runs now. After a stopped tool call, the app
        does not ask the model to continue its answer."""
        self._cancel.set()

    async def run_calls(self, session: str, response: GenerationResponse) -> bool:
        """Show the tool calls of a reply, run them, and save their results. Return True if the model must
        write a reply to the results."""
        if response.finish_reason == "cancelled" or not response.calls:
            return False
        self._cancel = threading.Event()
        shown, results = list[ToolMessage](), list[tuple[ParsedCall, str]]()
        for place, call in enumerate(response.calls):
            shown.append(ToolMessage(call))
            await self._chat.transcript.add(shown[-1])
            try:
                results.append((call, await self._result_of(call, shown[-1])))
            except Interrupted:
                results += stopped_results(response.calls[place:])
                shown += [ToolMessage(later) for later in response.calls[place + 1 :]]
                await self._chat.transcript.add(*shown[place + 1 :])
                break

        turns = await self._chat.host.call(lambda runtime: save_results(runtime, session, results))
        for message, turn in zip(shown, turns, strict=True):
            message.place(turn)
        return not self._cancel.is_set()

    async def _result_of(self, call: ParsedCall, shown: ToolMessage) -> str:
        chat, tools = self._chat, self._chat.state.tools
        if refusal := tools.refusal(call):
            return refusal
        answer = ONCE
        if tools.needs_question(call):
            server = tools.by_name()[call.name].server
            answer = await chat.ask(ToolScreen(call_lines(call), server)) or NO
        if self._cancel.is_set():
            raise Interrupted("stopped.")
        shown.state = "runs · Esc stops it"
        return await asyncio.to_thread(outcome_of, chat.state, call, answer, self._cancel)

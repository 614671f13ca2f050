"""This module runs tool calls in plain mode. The module prints each call, and asks the user before the call
runs, unless the user has allowed this tool for the whole chat."""

import threading

from ruvmlx.engine.types import GenerationResponse
from ruvmlx.errors import Interrupted
from ruvmlx.host.model_holder import ModelHolder
from ruvmlx.models.text.tool_calls import ParsedCall

from .interrupts import Interrupts
from .plain_streams import PlainStreams
from .state import ChatState
from .steps.tools import ALWAYS, NO, ONCE, outcome_of, save_results, stopped_results
from .tools.described import call_lines, short_lines

QUESTION = "Run it? o once, a always in this chat, n no: "
_ANSWERS = {"o": ONCE, "once": ONCE, "a": ALWAYS, "always": ALWAYS, "n": NO, "no": NO}


class PlainCalls:
    def __init__(
        self, holder: ModelHolder, state: ChatState, streams: PlainStreams, interrupts: Interrupts
    ) -> None:
        self._holder, self._state, self._streams, self._interrupts = holder, state, streams, interrupts

    def run(self, response: GenerationResponse) -> bool:
        """Run the tool calls of a reply. Return True if the model must write a reply to the results of the
        calls."""
        if response.finish_reason == "cancelled":
            return False
        session, results, is_stopped = self._state.session, list[tuple[ParsedCall, str]](), False
        for place, call in enumerate(response.calls):
            text = self._result_of(call)
            if text is None:
                results += stopped_results(response.calls[place:])
                is_stopped = True
                break
            results.append((call, text))
        for turn in save_results(self._holder.opened_runtime, session, results):
            for line in short_lines(turn.content):
                self._streams.print(f"  {line}")
        return not is_stopped

    def _result_of(self, call: ParsedCall) -> str | None:
        """Print a tool call, ask the user for permission if necessary, run the call, and return the result of
        the call. Return None if the user stops the call."""
        for n, line in enumerate(call_lines(call)):
            self._streams.print(f"Tool: {line}" if n == 0 else line)
        if refusal := self._state.tools.refusal(call):
            return refusal
        answer = self._ask() if self._state.tools.needs_question(call) else ONCE
        if answer is None:
            return None
        cancel = threading.Event()
        try:
            with self._interrupts.setting(cancel):
                return outcome_of(self._state, call, answer, cancel)
        except Interrupted:
            return None

    def _ask(self) -> str | None:
        """Ask the user whether the tool call is allowed to run. Return ONCE, ALWAYS or NO. Return None if the
        input ends or the user presses Ctrl-C."""
        while (line := self._streams.read(QUESTION)) is not None:
            if answer := _ANSWERS.get(line.strip().lower()):
                return answer
            self._streams.note("Answer o, a or n.")
        return None

"""This module is plain mode, the chat for pipes and screen readers. Plain mode reads lines, prints words, and
never moves the cursor.

Every step of the chat and every reply runs in the main thread. Other threads run only helpers, such as the
connections to tool servers. During a reply, Ctrl-C stops the reply and keeps its text. While the files of a
message are read, Ctrl-C stops the message. At the prompt, Ctrl-C ends the chat. While the store saves a
rating or a message, Ctrl-C has no effect until the store has saved the data. A closed terminal, SIGTERM or a
closed pipe also stops the reply, keeps its text, and then ends the chat. Answers go to stdout, and errors go
to stderr.

Plain mode does not train the model in idle time, because the thread that owns the runtime waits for the
user's next line. The app and the command `ruvmlx learn consolidate` train the model.
"""

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

from ruvmlx.engine.repetition import REPEATS
from ruvmlx.engine.types import Chunk
from ruvmlx.errors import Interrupted, NotFound
from ruvmlx.host.model_holder import ModelHolder, Opener, OpenRuntime, StoppableWatch
from ruvmlx.host.serving import BeginReply
from ruvmlx.models.text.thinking import AnswerFilter
from ruvmlx.runtime import Runtime, Turn
from ruvmlx.text import Sanitizer, sanitize

from ..progress import watching
from . import describe, exit_signals, models
from .commands import COMMANDS, Command, message_text, parse
from .interrupts import Interrupts
from .mentions import has_mention, with_files
from .options import ChatOptions, start_place
from .plain_calls import PlainCalls
from .plain_streams import PlainStreams, without_keys
from .state import ChatState, Outcome, system_prompt_of
from .steps.branch import return_to, turns_with
from .steps.tools import answer_results
from .steps.write import message_lines, place, say

_ENDS = {"cancelled": "stopped", "length": "cut at the length limit", "repeats": REPEATS.rstrip(".")}
EMPTY = "Standard input is empty: nothing was asked."


class PlainChat:
    """A chat over two text streams, `source` and `sink`. `run` returns the exit code."""

    def __init__(
        self, runtime: Runtime | ModelHolder, options: ChatOptions, source: TextIO, sink: TextIO
    ) -> None:
        self._holder = runtime if isinstance(runtime, ModelHolder) else ModelHolder.of_runtime(runtime)
        self._interrupts = Interrupts()
        self._streams = PlainStreams(source, sink, self._interrupts)
        self._options, self._state = options, ChatState(options)
        self._calls = PlainCalls(self._holder, self._state, self._streams, self._interrupts)
        self._left = self._has_read = False
        self._end: int | None = None  # the id of the last message that this terminal knows; None: no message

    @property
    def _runtime(self) -> Runtime:
        return self._holder.opened_runtime

    def run(self) -> int:
        with self._interrupts:
            self._attempt(self._begin)
            while self._state.session and not (self._left or self._streams.closed):
                line = self._streams.read()
                if line is None:
                    self._tell_of_no_input()
                    break
                self._has_read = True
                self._attempt(partial(self._handle, line))
        self._state.tools.close()
        if self._interrupts.ended_by:
            return exit_signals.exit_code(self._interrupts.ended_by)
        # If a script runs plain mode, or if no chat could be opened, return the exit code of the first error.
        # If a chat was opened at a terminal, a person has read its errors, so return 0.
        return self._streams.failure if not (self._streams.interactive and self._state.session) else 0

    def _tell_of_no_input(self) -> None:
        """Say that the input had no line. Without this text, a script could take the empty output for an
        answer of the model."""
        if not (self._has_read or self._streams.interactive or self._interrupts.ended_by):
            self._streams.note(EMPTY)

    def _begin(self) -> None:
        session, message = start_place(self._runtime, self._options)
        turns = self._runtime.chats.turns(session)
        self._warn()
        self._retell(turns, message)
        self._state.open_chat(session, system_prompt_of(turns))
        self._note_end()

    def _warn(self) -> None:
        if caveat := self._runtime.backend.caveat:
            self._streams.note(f"Note: {sanitize(caveat)}")

    def _attempt(self, work: Callable[[], None]) -> None:
        """Call `work`. If `work` raises an error, show the error as one line, so that the chat continues."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._streams.complain(error)

    def _handle(self, line: str) -> None:
        line, told = without_keys(line)
        if told:
            self._streams.note(told)
        line = sanitize(line).strip()
        if not line:
            return
        self._return_to_end()
        try:
            if command := parse(line):
                self._obey(command)
            else:
                self._send(message_text(line))
        finally:
            self._note_end()

    def _return_to_end(self) -> None:
        """Continue after the last message that this terminal knows. If another program has deleted the chat,
        do nothing. The next message then raises NotFound. Commands such as /new still work."""
        if self._end is not None:
            with contextlib.suppress(NotFound):
                return_to(self._runtime, self._state.session, self._end)

    def _note_end(self) -> None:
        """Keep the id of the last message of the branch in use, which this terminal has just printed. Another
        terminal can add messages to the same chat before the next line."""
        self._end = None
        if self._left or self._holder.runtime is None:
            return
        with contextlib.suppress(NotFound):  # another program has deleted the chat
            if turns := self._runtime.chats.turns(self._state.session):
                self._end = turns[-1].id

    def _send(self, text: str) -> None:
        if has_mention(text):
            count = self._runtime.chats.count_tokens
            with self._stoppable(True):
                found = with_files(text, self._state.options.files, count)
            if self._state.cancel.is_set():
                raise Interrupted("stopped; nothing was sent.")
            text = found.text
            for note in found.notes:
                self._streams.note(note)
        self._reply(say(self._state, text))
        if continued := self._runtime.choices.take_continuation(self._state.session):
            self._state.lesson = continued.learned
            self._streams.note(describe.preference_words(continued.learned, describe.WENT_ON))
        self._tell(place(self._runtime, self._state, ""))

    def _obey(self, command: Command) -> None:
        """Run the command's step, then the steps that the outcomes name as the next steps."""
        step = COMMANDS[command.name].step
        with self._stoppable(command.name == "tools"):
            outcome = step(self._runtime, self._state, command.argument)
        self._tell(outcome)
        while outcome.then:
            outcome = outcome.then(self._runtime, self._state, command.argument)
            self._tell(outcome)

    @contextlib.contextmanager
    def _stoppable(self, is_stoppable: bool) -> Iterator[None]:
        """Let Ctrl-C end the work within the `with` block, because this work can take long: a step that waits
        for a server, or the read of a file."""
        if not is_stoppable:
            yield
            return
        self._state.cancel = threading.Event()
        with self._interrupts.setting(self._state.cancel):
            yield

    def _tell(self, outcome: Outcome) -> None:
        if outcome.opens:
            self._open(outcome)
        elif outcome.words:
            self._streams.tell(outcome.words)
        if outcome.reply:
            self._reply(outcome.reply, outcome.earlier)
        if outcome.model:
            self._switch(outcome.model)
        self._left = self._left or outcome.leaves

    def _open(self, outcome: Outcome) -> None:
        """Switch to the chat that the outcome names."""
        turns = self._runtime.chats.turns(outcome.opens)
        self._state.open_chat(outcome.opens, system_prompt_of(turns))
        self._streams.print(outcome.words)
        if outcome.retell:
            self._retell(turns, outcome.message)

    def _retell(self, turns: list[Turn], message: int | None = None) -> None:
        """Print the earlier messages of the chat if a person at a terminal reads them. message: the id of the
        first message to print; None: print all."""
        if self._streams.interactive:
            begins = (n for n, turn in enumerate(turns) if message is not None and turn.id == message)
            first = next(begins, 0)
            for line in message_lines(turns[first:]):
                self._streams.print(line)

    def _reply(self, begin: BeginReply, earlier: str = "") -> None:
        """Let the model write a reply. While the newest reply has tool calls, run these calls and let the
        model write the next reply. earlier: the text of the reply that the model continues, or ""."""
        while True:
            cancel, self._state.response = threading.Event(), None
            with self._interrupts.setting(cancel):
                self._stream(begin(self._runtime, cancel), earlier)
            response = self._state.response
            if response:
                turns_with(self._runtime, self._state.session, response.request_id)
            if not (response and response.calls and self._calls.run(response)):
                break
            begin, earlier = answer_results(self._state), ""
        self._tell_left_out()
        self._runtime.learning.settle()

    def _tell_left_out(self) -> None:
        """Tell the user when the context of the model is nearly full, and when the model no longer reads the
        oldest messages."""
        state, limit = self._state, self._state.options.max_new_tokens
        chats = self._runtime.chats
        found = chats.room(state.session, chats.turns(state.session), limit)
        gone = found.unread
        if gone > state.left_out:
            self._streams.note(
                f"Note: the context is full; the model does not read {describe.oldest(gone)}. "
                "/summarize lets it read notes on them."
            )
        state.left_out = gone
        used, room = state.response.cache_tokens if state.response else 0, self._runtime.model.context
        if (is_full := used > describe.NEARLY_FULL * room) and not (state.told_full or gone):
            offer = " /summarize lets the model read notes on the oldest." if found.can_sum_up else ""
            self._streams.note(f"Note: the context is nearly full.{offer}")
        state.told_full = is_full

    def _stream(self, reply: Iterator[Chunk], earlier: str) -> None:
        """Print the words of a reply as they arrive. Print the label "Assistant:" only with the first word,
        so that an error before the first word is printed on a separate line. earlier: the text of the reply
        that `reply` continues, which can end within the thought."""
        safe, answer, begun, end = Sanitizer(), AnswerFilter(), False, ""
        answer.feed(earlier)
        try:
            for chunk in reply:
                if chunk.note:
                    self._streams.note(chunk.note)
                was_thinking = answer.is_thinking
                text = answer.feed(safe.feed(chunk.text))
                if answer.is_thinking and not was_thinking:
                    self._streams.note("Thinking ...")
                if chunk.response:
                    text += answer.flush()
                if text or (chunk.response and not chunk.response.calls):
                    self._streams.write(text if begun else f"Assistant: {text.lstrip()}")
                    begun = True
                if chunk.response:
                    end, self._state.response = chunk.response.ending, chunk.response
        finally:
            if begun:
                self._streams.write("\n")
        if end in _ENDS:
            self._streams.print(f"({_ENDS[end]})")

    def _switch(self, name: str) -> None:
        """Switch to another model. If the user presses Ctrl-C, stop the switch and keep the model in use."""
        with watching(still=True) as watch:
            stoppable = StoppableWatch(watch)
            with self._interrupts.setting(stoppable.stopped):
                try:
                    self._holder.switch(name, self._state.session, stoppable)
                finally:
                    # If the holder has no runtime, the old model was closed and could not be opened again, so
                    # the chat must end.
                    self._left = self._holder.runtime is None
        models.remember(name)
        self._state.model_changed()
        self._streams.tell(models.switch_text(self._runtime))
        self._warn()


def run_plain(open_runtime: OpenRuntime, options: ChatOptions) -> int:
    """Run a chat over stdin and stdout, and return the exit code. Raise an error if the model cannot be
    opened."""
    # Python sets a closed stream to None
    source, sink = sys.stdin or io.StringIO(), sys.stdout or io.StringIO()
    for stream in (source, sink):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    holder = ModelHolder(Opener.of(open_runtime))
    with watching(still=True) as watch:
        holder.open(watch)
    try:
        return PlainChat(holder, options, source, sink).run()
    finally:
        holder.close()
        exit_signals.let_go(sys.stdout, sys.stderr)

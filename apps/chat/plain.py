"""The linear chat, for pipes and screen readers: lines in, words out, nothing that moves.

Everything runs in the main thread. Ctrl-C stops a reply and keeps its text; at the prompt it ends the
chat. While a rating or a turn is being committed it waits. A closed terminal, SIGTERM and a reader that
leaves do the same and end the chat. Answers go to stdout, errors to stderr.

Nothing is learned in idle time: a thread that waits for a line cannot train, and the runtime belongs to it.
`ruvmlx learn consolidate` does it, and so does the app.
"""

import contextlib
import errno
import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import error_line
from ruvmlx.host import BeginReply, ModelHolder, Opener, OpenRuntime, StoppableWatch
from ruvmlx.models.thinking import AnswerFilter
from ruvmlx.runtime import Runtime, Turn
from ruvmlx.text import Sanitizer, sanitize

from ..progress import watching
from . import ending, models
from .commands import COMMANDS, Command, message_text, parse
from .interrupts import Interrupts
from .options import ChatOptions, start_session
from .state import ChatState, Outcome, system_prompt_of
from .steps.write import say, spoken


class PlainStreams:
    """Lines in, words out. `closed`: the reader of what is written here has gone."""

    def __init__(self, source: TextIO, sink: TextIO, interrupts: Interrupts) -> None:
        self._source, self._sink, self._interrupts = source, sink, interrupts
        self.interactive = source.isatty()
        self.closed = False
        self.failure = 0  # the first error's exit code

    def read(self) -> str | None:
        """The next line; None at the end of input, on Ctrl-C, and when the terminal has gone."""
        if self.interactive:
            self.write("You: ", self._sink if self._sink.isatty() else sys.stderr)
        try:
            with self._interrupts.raising():
                line = self._source.readline()
        except (KeyboardInterrupt, OSError):
            line = ""
        if not line and self.interactive:
            self.print("")
        return line or None

    def print(self, text: str) -> None:
        self.write(sanitize(text) + "\n")

    def write(self, text: str, where: TextIO | None = None) -> None:
        """Once the reader has gone nothing is written, and a reply is stopped and kept."""
        if self.closed:
            return
        try:
            (where or self._sink).write(text)
            (where or self._sink).flush()
        except OSError as error:
            self.closed = True
            self._interrupts.stop()
            if error.errno not in (errno.EPIPE, errno.EIO):  # a full disk is no reader that left
                self.complain(error)

    def complain(self, error: Exception) -> None:
        self.failure = self.failure or getattr(error, "exit_code", 1)
        self.note(f"Error: {error_line(error)}")

    @staticmethod
    def note(line: str) -> None:
        """On stderr: stdout has the replies."""
        with contextlib.suppress(OSError):  # nobody is there to read it
            print(line, file=sys.stderr, flush=True)


class PlainChat:
    """One conversation over two text streams. `run` returns the exit code."""

    def __init__(
        self, runtime: Runtime | ModelHolder, options: ChatOptions, source: TextIO, sink: TextIO
    ) -> None:
        self._holder = runtime if isinstance(runtime, ModelHolder) else ModelHolder.of_runtime(runtime)
        self._interrupts = Interrupts()
        self._streams = PlainStreams(source, sink, self._interrupts)
        self._options, self._state = options, ChatState(options)
        self._left = False

    @property
    def _runtime(self) -> Runtime:
        return self._holder.opened

    def run(self) -> int:
        with self._interrupts:
            self._attempt(self._begin)
            while self._state.session and not (self._left or self._streams.closed):
                line = self._streams.read()
                if line is None:
                    break
                self._attempt(partial(self._handle, line))
        if self._interrupts.ended_by:
            return ending.exit_code(self._interrupts.ended_by)
        # A script wants to know of an error; a person has read it.
        return self._streams.failure if not (self._streams.interactive and self._state.session) else 0

    def _begin(self) -> None:
        session = start_session(self._runtime, self._options)
        turns = self._runtime.chats.turns(session) if self._options.session != "new" else []
        self._state.system = system_prompt_of(turns) or self._state.system
        self._warn()
        self._retell(turns)
        self._state.session = session

    def _warn(self) -> None:
        if caveat := self._runtime.backend.caveat:
            self._streams.note(f"Note: {sanitize(caveat)}")

    def _attempt(self, work: Callable[[], None]) -> None:
        """An error is one line, and the chat goes on."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._streams.complain(error)

    def _handle(self, line: str) -> None:
        line = sanitize(line).strip()
        command = parse(line) if line else None
        if command:
            self._obey(command)
        elif line:
            self._reply(say(self._state, message_text(line)))

    def _obey(self, command: Command) -> None:
        """Take the command's step, and those that follow from it."""
        step = COMMANDS[command.name].step
        outcome = step(self._runtime, self._state, command.argument)
        self._tell(outcome)
        while outcome.then:
            outcome = outcome.then(self._runtime, self._state, command.argument)
            self._tell(outcome)

    def _tell(self, outcome: Outcome) -> None:
        if outcome.opens:
            self._open(outcome)
        elif outcome.words:
            self._streams.print(outcome.words)
        if outcome.reply:
            self._reply(outcome.reply)
        if outcome.model:
            self._switch(outcome.model)
        self._left = self._left or outcome.leaves

    def _open(self, outcome: Outcome) -> None:
        """Go on with another session."""
        self._state.session = outcome.opens
        turns = self._runtime.chats.turns(outcome.opens)
        self._state.system = system_prompt_of(turns)
        self._streams.print(outcome.words)
        if outcome.retell:
            self._retell(turns)

    def _retell(self, turns: list[Turn]) -> None:
        """What was said before; only a person wants to read it."""
        if self._streams.interactive:
            for line in spoken(turns):
                self._streams.print(line)

    def _reply(self, begin: BeginReply) -> None:
        cancel = threading.Event()
        with self._interrupts.setting(cancel):
            self._stream(begin(self._runtime, cancel))
        self._runtime.settle()

    def _stream(self, reply: Iterator[Chunk]) -> None:
        """Words as they come. The label waits for the first of them, so an error stands on its own line."""
        safe, answer, begun, reason = Sanitizer(), AnswerFilter(), False, ""
        try:
            for chunk in reply:
                was_thinking = answer.is_thinking
                text = answer.feed(safe.feed(chunk.text))
                if answer.is_thinking and not was_thinking:
                    self._streams.note("Thinking ...")
                if chunk.response:
                    text += answer.flush()
                if text or chunk.response:
                    self._streams.write(text if begun else f"Assistant: {text.lstrip()}")
                    begun = True
                if chunk.response:
                    reason, self._state.kv = chunk.response.finish_reason, chunk.response.kv
        finally:
            if begun:
                self._streams.write("\n")
        ends = {"cancelled": "(stopped)", "length": "(cut: the limit of new tokens is reached)"}
        if reason in ends:
            self._streams.print(ends[reason])

    def _switch(self, name: str) -> None:
        """Go on with another model; Ctrl-C keeps the one in use."""
        with watching(still=True) as watch:
            stoppable = StoppableWatch(watch)
            with self._interrupts.setting(stoppable.stopped):
                try:
                    self._holder.switch(name, self._state.session, stoppable)
                finally:
                    # The old model was closed to make room and cannot be opened again.
                    self._left = self._holder.runtime is None
        self._state.model_changed()
        self._streams.print(models.told(self._runtime))
        self._warn()


def run_plain(open_runtime: OpenRuntime, options: ChatOptions) -> int:
    """Chat over stdin and stdout. Errors while opening are the caller's to show."""
    source, sink = sys.stdin or io.StringIO(), sys.stdout or io.StringIO()  # None: `<&-`, `>&-`
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
        ending.let_go(sys.stdout, sys.stderr)

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
from typing import Any, TextIO

from ruvmlx.engine.types import Chunk
from ruvmlx.errors import NotFound
from ruvmlx.kv.cache import KVStats
from ruvmlx.platform.sensors import Sensors
from ruvmlx.runtime import Turn
from ruvmlx.text import Sanitizer, sanitize

from ..progress import watching
from . import chat_files, clipboard, commands, compare, describe, ending, models, panel
from .code import code_blocks
from .contract import ChatOptions, ChatRuntime, OpenRuntime, start_session, swap_adapter
from .interrupts import Interrupts
from .opener import Holder, Opener, Stoppable


class PlainChat:
    """One conversation over two text streams. `run` returns the exit code."""

    def __init__(
        self, runtime: ChatRuntime | Holder, options: ChatOptions, source: TextIO, sink: TextIO
    ) -> None:
        self._holder = runtime if isinstance(runtime, Holder) else Holder.fixed(runtime)
        self.options = options
        self.source = source
        self.sink = sink
        self.interactive = source.isatty()
        self.system = options.system
        self.session = ""
        self.candidates: list[compare.Candidate] = []  # of the newest comparison
        self.kv: KVStats | None = None  # of the newest reply's cache
        self.deleted: list[str] = []  # chats that /restore brings back, the last at the end
        self.failure = 0  # the first error's exit code; a script wants to know, a person has read it
        self.done = False
        self.unread = False  # the reader of what is written here has gone
        self.interrupts = Interrupts()
        self.sensors = Sensors()

    @property
    def runtime(self) -> ChatRuntime:
        return self._holder.opened

    def run(self) -> int:
        with self.interrupts:
            self._attempt(self._begin)
            while not self.done and self.session:
                line = self._read()
                if line is None:
                    break
                self._attempt(partial(self._handle, line))
        if self.interrupts.ended_by:
            return ending.exit_code(self.interrupts.ended_by)
        return self.failure if not (self.interactive and self.session) else 0

    def _begin(self) -> None:
        session = start_session(self.runtime, self.options)
        turns = self.runtime.chats.turns(session) if self.options.session != "new" else []
        self.system = next((t.content for t in turns if t.role == "system"), self.system)
        self._warn()
        self._tell(turns if self.interactive else [])
        self.session = session

    def _warn(self) -> None:
        """On stderr: stdout has the replies."""
        if caveat := self.runtime.backend.caveat:
            with contextlib.suppress(OSError):
                print(f"Note: {sanitize(caveat)}", file=sys.stderr, flush=True)

    def _read(self) -> str | None:
        """The next line; None at the end of input, on Ctrl-C, and when the terminal has gone."""
        if self.interactive:
            self._prompt()
        try:
            with self.interrupts.raising():
                line = self.source.readline()
        except (KeyboardInterrupt, OSError):
            line = ""
        if not line and self.interactive:
            self._print("")
        return line or None

    def _prompt(self) -> None:
        self._write("You: ", self.sink if self.sink.isatty() else sys.stderr)

    def _attempt(self, step: Callable[[], None]) -> None:
        """An error is one line, and the chat goes on."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        self.failure = self.failure or getattr(error, "exit_code", 1)
        with contextlib.suppress(OSError):  # nobody is there to read it
            print(f"Error: {describe.error_line(error)}", file=sys.stderr, flush=True)

    def _handle(self, line: str) -> None:
        line = sanitize(line).strip()
        command = commands.parse(line) if line else None
        if command:
            getattr(self, f"do_{command.name}")(command.argument)
        elif line:
            self._say(commands.message_text(line))

    def _say(self, text: str, **instead: int) -> None:
        self._reply(lambda cancel: self.runtime.chats.say(self.session, text, **self._how(cancel), **instead))

    def _how(self, cancel: threading.Event) -> dict[str, Any]:
        return {
            "sampling": self.options.sampling,
            "max_new_tokens": self.options.max_new_tokens,
            "cancel": cancel,
        }

    def _reply(self, begin: Callable[[threading.Event], Iterator[Chunk]]) -> None:
        cancel = threading.Event()
        with self.interrupts.setting(cancel):
            self._stream(begin(cancel))
        self.runtime.settle()

    def _stream(self, reply: Iterator[Chunk]) -> None:
        """Words as they come. The label waits for the first of them, so an error stands on its own line."""
        safe, begun, reason = Sanitizer(), False, ""
        try:
            for chunk in reply:
                text = safe.feed(chunk.text)
                if text or chunk.response:
                    self._write(text if begun else f"Assistant: {text.lstrip()}")
                    begun = True
                if chunk.response:
                    reason, self.kv = chunk.response.finish_reason, chunk.response.kv
        finally:
            if begun:
                self._write("\n")
        ends = {"cancelled": "(stopped)", "length": "(cut: the limit of new tokens is reached)"}
        if reason in ends:
            self._print(ends[reason])

    def do_rate(self, argument: str) -> None:
        rating, note = commands.parse_rating(argument)
        reply = self.runtime.last_reply_id or self._last_stored()
        self._print(describe.effect_words(self.runtime.rate(reply, rating, note)))

    def _last_stored(self) -> str:
        """After -c the newest reply is one of an earlier run."""
        replies = [turn.reply_id for turn in self._turns() if turn.reply_id]
        if not replies:
            raise NotFound("there is no reply to rate yet")
        return replies[-1]

    def do_undo(self, _: str) -> None:
        self._print(describe.undone(self.runtime.undo()))

    def do_rollback(self, argument: str) -> None:
        self._print(describe.rolled_back(self.runtime.rollback(commands.parse_version(argument))))

    def do_learning(self, _: str) -> None:
        for line in panel.lines(panel.View.of(self.runtime).later(self.sensors.read()), self.kv):
            self._print(line)

    # Replies in other words

    def do_again(self, _: str) -> None:
        self._reply(lambda cancel: self.runtime.chats.again(self.session, **self._how(cancel)))
        self._tell_place()

    def do_more(self, _: str) -> None:
        """The rest alone is written: what came before was read."""
        self._reply(lambda cancel: self.runtime.chats.continue_reply(self.session, **self._how(cancel)))

    def do_edit(self, argument: str) -> None:
        question = next((t for t in reversed(self._turns()) if t.role == "user"), None)
        if question is None or question.id is None:
            raise NotFound("there is no question to put in other words yet")
        if not argument:
            self._print(f"Your question: {question.content}\nIn other words: /edit and the new text.")
        else:
            self._say(argument, instead_of=question.id)

    def do_next(self, _: str, step: int = 1) -> None:
        self.runtime.chats.next_sibling(self.session, step)
        self._tell(self._turns()[-2:])
        self._tell_place()

    def do_prev(self, _: str) -> None:
        self.do_next("", -1)

    def _tell_place(self) -> None:
        last = self._turns()[-1]
        if last.branches > 1:
            self._print(f"({last.branch} of {last.branches} replies in this place; /next, /prev)")

    def do_compare(self, argument: str) -> None:
        compare.check(self.runtime, self.session, argument)
        self.candidates = []
        for number, learned in enumerate(compare.order(), 1):
            begin = compare.writing(self.session, argument, number == 1, learned, self._how)
            self._print(f"Reply {number}.")
            self._reply(partial(begin, self.runtime))
            self.candidates.append(compare.candidate(self.runtime, self.session, learned))
        self._print("Which is better? /choose 1 or /choose 2")

    def do_choose(self, argument: str) -> None:
        chosen = compare.choice(argument, self.candidates)
        result = self.runtime.chats.prefer(self.session, chosen.message)
        self._print(f"{compare.told(chosen)}. {describe.effect_words(result)}")

    def do_copy(self, argument: str) -> None:
        reply = next((t.content for t in reversed(self._turns()) if t.role == "assistant"), None)
        if reply is None:
            raise NotFound("there is no reply to copy yet")
        blocks = code_blocks(sanitize(reply))
        number = commands.parse_number(argument, len(blocks), "code blocks")
        clipboard.copy(sanitize(reply) if number is None else blocks[number - 1])
        self._print("Copied." if number is None else f"Copied code block {number} of {len(blocks)}.")

    # Chats

    def do_chats(self, argument: str) -> None:
        for line in chat_files.lines(self.runtime, argument):
            self._print(line)

    def do_open(self, argument: str) -> None:
        self._open(chat_files.find(self.runtime, argument))

    def _open(self, session: str) -> None:
        self.session, turns = session, self.runtime.chats.turns(session)
        self.system = next((t.content for t in turns if t.role == "system"), None)
        self._print(f"Chat: {chat_files.title(self.runtime, session)}")
        self._tell(turns if self.interactive else [])

    def _tell(self, turns: list[Turn]) -> None:
        for turn in turns:
            if turn.role != "system":
                self._print(f"{'You' if turn.role == 'user' else 'Assistant'}: {turn.content}")

    def _turns(self) -> list[Turn]:
        return self.runtime.chats.turns(self.session)

    def do_new(self, _: str) -> None:
        self.session = self.runtime.chats.new_chat(self.system)
        self._print("New chat.")

    def do_title(self, argument: str) -> None:
        self._print(chat_files.rename(self.runtime, self.session, argument))

    def do_fork(self, _: str) -> None:
        self.session = self.runtime.store.chats.fork(self.session)
        self._print("This is the copy; the other chat stays as it was.")

    def do_delete(self, _: str) -> None:
        self.runtime.deleted_chats.soft_delete(self.session)
        self.deleted.append(self.session)
        self.session = self.runtime.chats.new_chat(self.system)
        self._print("Deleted. /restore brings it back, until you leave. This is a new chat.")

    def do_restore(self, _: str) -> None:
        if not self.deleted:
            raise NotFound("nothing was deleted since you came")
        self.runtime.deleted_chats.restore(self.deleted[-1])
        self._open(self.deleted.pop())

    def do_export(self, argument: str) -> None:
        self._print(chat_files.export(self.runtime, self.session, argument))

    def do_import(self, argument: str) -> None:
        self._open(chat_files.take_up(self.runtime, argument))

    # The model

    def do_system(self, argument: str) -> None:
        if argument:
            self.system = None if argument == "none" else argument
            self.runtime.chats.set_system(self.session, self.system)
        self._print(describe.system_prompt(self.system))

    def do_adapter(self, argument: str) -> None:
        swap_adapter(self.runtime, argument)
        self._print(describe.adapter(self.runtime))

    def do_adapters(self, _: str) -> None:
        self._print("\n".join(models.adapter_lines(self.runtime)))

    def do_model(self, argument: str) -> None:
        """Ctrl-C keeps the model in use."""
        if not argument:
            self._print(models.in_use_line(self.runtime.model))
            return
        name = models.find_model(argument, self.runtime.model)
        with watching(still=True) as watch:
            stoppable = Stoppable(watch)
            with self.interrupts.setting(stoppable.stopped):
                self._switch(name, stoppable)
        self._print(models.told(self.runtime))
        self._warn()

    def _switch(self, name: str, watch: Stoppable) -> None:
        try:
            self._holder.switch(name, self.session, watch)
        finally:
            self.done = self._holder.runtime is None  # it made room, and cannot come back
        self.candidates, self.kv = [], None

    def do_models(self, _: str) -> None:
        self._print("\n".join(models.model_lines(self.runtime.model)))

    def do_status(self, _: str) -> None:
        for line in describe.status_lines(self.runtime):
            self._print(line)

    def do_help(self, _: str) -> None:
        for line in commands.help_lines():
            self._print(line)

    def do_quit(self, _: str) -> None:
        self.done = True

    def _print(self, text: str) -> None:
        self._write(sanitize(text) + "\n")

    def _write(self, text: str, where: TextIO | None = None) -> None:
        """Once the reader has gone nothing is written: a reply is stopped and kept, and the chat ends."""
        if self.unread:
            return
        try:
            (where or self.sink).write(text)
            (where or self.sink).flush()
        except OSError as error:
            self.unread = self.done = True
            self.interrupts.stop()
            if error.errno not in (errno.EPIPE, errno.EIO):  # a full disk is no reader that left
                self._complain(error)


def run_plain(open_runtime: OpenRuntime, options: ChatOptions) -> int:
    """Chat over stdin and stdout. Errors while opening are the caller's to show."""
    source, sink = sys.stdin or io.StringIO(), sys.stdout or io.StringIO()  # None: `<&-`, `>&-`
    for stream in (source, sink):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    holder = Holder(Opener.of(open_runtime))
    with watching(still=True) as watch:
        holder.open(watch)
    try:
        return PlainChat(holder, options, source, sink).run()
    finally:
        holder.close()
        ending.let_go(sys.stdout, sys.stderr)

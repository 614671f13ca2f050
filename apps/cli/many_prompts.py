"""The command `ruvmlx generate --prompts` answers each line of a file, several lines at a time, and writes
the replies in the file's order.

The scheduler of the runtime batches the requests (engine/scheduler.py). With 4-bit or 8-bit weights on the
native backend, a reply is the same as without a batch. The store keeps each reply, so the user can rate it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ruvmlx.errors import Interrupted, RuvmlxError, UsageError, error_line
from ruvmlx.models.config.model import Message
from ruvmlx.progress import Told
from ruvmlx.settings import Settings

from ..progress import watching
from .interrupt import ctrl_c_sets
from .options import open_runtime, unknown_adapter
from .output import log, print_json
from .prompt_lines import NUMBERS, PromptLine, count_prompts, opened_prompts, prompt_lines
from .prompt_results import Tally, result_file, skip_answered, write_line

if TYPE_CHECKING:
    from ruvmlx.chats.reply_writer import Chunks
    from ruvmlx.engine.types import GenerationRequest, GenerationResponse
    from ruvmlx.runtime import Runtime

AHEAD = 64  # the maximum number of prompts in progress, or answered but not yet written
COMMON = ("raw", "stop", "ignore_eos", "logprobs")  # flags that apply to every prompt
Write = Callable[[dict[str, Any]], None]
RequestOf = Callable[[PromptLine], "GenerationRequest"]


def answer_file(
    prompts: str, out: Path | None, settings: Settings, seed: int | None, as_json: bool, flags: dict[str, Any]
) -> None:
    """Answer the prompts of the file `prompts`. Write the results to the file `out`; if `out` is None, print
    the results as lines on standard output."""
    if as_json and out is None:
        raise UsageError("--json with --prompts needs --out; without it, the results are JSON lines already.")
    target: AbstractContextManager[BinaryIO | None] = result_file(out) if out else nullcontext()
    with opened_prompts(prompts, out) as file, target as results:
        tally, begun = Tally(), time.monotonic()
        total, lines = count_prompts(file), prompt_lines(file)
        if results is not None:
            skip_answered(results, str(out), lines, tally)
        try:
            if (first := next(lines, None)) is not None:
                _answer_lines(chain([first], lines), total, results, settings, seed, flags, tally)
        finally:
            seconds = time.monotonic() - begun
            log(tally.sentence(seconds))
    if as_json:
        print_json({"file": str(out), "seconds": round(seconds, 3)} | vars(tally))
    if tally.failed:
        raise click.exceptions.Exit(1)


def _answer_lines(
    lines: Iterator[PromptLine], total: int, results: BinaryIO | None, settings: Settings, seed: int | None,
    flags: dict[str, Any], tally: Tally,
) -> None:  # fmt: skip
    with open_runtime(settings) as runtime, watching() as watch:
        if runtime.backend.caveat:
            log(f"note: {runtime.backend.caveat}")
        told, cancel = Told(watch, "Answering", total, "prompts"), threading.Event()
        told.begin("Answering", total, tally.kept)
        common = {name: flags[name] for name in COMMON} | {"max_tokens": settings.max_tokens}
        request_of = request_maker(runtime, settings.system, seed, **common)
        write: Write = print_json if results is None else partial(write_line, results)
        with ctrl_c_sets(cancel):
            answer_all(runtime, lines, request_of, write, tally, cancel, told.add)


def request_maker(runtime: "Runtime", system: str | None, seed: int | None, **common: Any) -> RequestOf:
    """Return a function that makes the request for a line of the file of prompts. This function raises
    UsageError if the line names an adapter that does not exist.

    system: the system prompt for lines with the field `prompt`, except with --raw. seed: the random seed of
    line 1; line n has seed + n - 1 if it names no seed. common: the flags in COMMON, and the maximum number
    of tokens of a reply whose line names no maximum.
    """
    from ruvmlx.engine.types import GenerationRequest

    known = {row.name for row in runtime.adapters()} | {"default"}
    known |= {runtime.learner.history.name} if runtime.learner else set()

    def make(line: PromptLine) -> "GenerationRequest":
        given = line.fields
        asked: dict[str, Any] = {"seed": None if seed is None else seed + line.number - 1}
        asked |= {name: given[name] for name in NUMBERS & given.keys()}
        name = given.get("adapter")
        if name not in (None, "none", *known):
            raise UsageError(unknown_adapter(str(name), sorted(known)))
        raw, messages = common.get("raw", False), [Message(**turn) for turn in given.get("messages", ())]
        if "prompt" in given and not raw:
            messages = [*([Message("system", system)] if system else []), Message("user", given["prompt"])]
        return GenerationRequest(
            prompt=given["prompt"] if raw and not messages else None,
            messages=messages or None,
            sampling=runtime.writer.sampling(**asked),
            adapter_id="" if name == "none" else name,
            max_new_tokens=given.get("max_tokens", common["max_tokens"]),
            **{name: value for name, value in common.items() if name not in ("raw", "max_tokens")},
        )

    return make


class _Answer:
    """The reply to one line of the file of prompts, or the line's error."""

    def __init__(self, line: PromptLine, begin: Callable[[PromptLine], "Chunks"]):
        """begin: a function that streams the reply"""
        self.line, self.error = line, line.error
        self.response: GenerationResponse | None = None
        self._chunks: Chunks | None = None
        if not line.error:
            try:
                self._chunks = begin(line)
            except RuvmlxError as error:
                self.error = error_line(error)

    def take_turn(self) -> None:
        """Take the next chunk of the reply."""
        try:
            if self._chunks is not None and not self.is_done:
                chunk = next(self._chunks)
                self.response = chunk.response
                if chunk.note:
                    log(f"line {self.line.number}: {chunk.note}")
        except Exception as error:  # noqa: BLE001 - the line of the results has the error
            self.error = error_line(error)

    def close(self) -> None:
        """End the reply if it is not complete."""
        if self._chunks is not None:
            self._chunks.close()

    @property
    def is_done(self) -> bool:
        return bool(self.error) or self.response is not None

    def facts(self) -> dict[str, Any]:
        """Return the facts about the reply, or the error, as the line for the file of results."""
        if self.response is None:
            return {"id": self.line.id, "line": self.line.number, "error": self.error}
        found = self.response
        facts: dict[str, Any] = {
            "id": self.line.id,
            "reply_id": found.request_id,
            "text": found.text,
            "token_ids": found.token_ids,
            "prompt_tokens": found.prompt_tokens,
            "generation_tokens": found.generation_tokens,
            "finish_reason": found.finish_reason,
            "repeats": found.repeats,
            "adapter": f"{found.adapter}@{found.adapter_version}" if found.adapter else None,
        }
        if found.logprobs:
            facts["logprobs"] = [vars(token) for token in found.logprobs]
        return facts


def answer_all(
    runtime: "Runtime",
    lines: Iterator[PromptLine],
    request_of: RequestOf,
    write: Write,
    tally: Tally,
    cancel: threading.Event,
    progress: Callable[[int], None],
) -> None:
    """Answer lines of the file of prompts, at most AHEAD lines at a time, and write their results in the
    order of the lines.

    request_of: a function that makes the request for a line. write: a function that writes one result. tally:
    the counts of results. progress: a function that adds its argument to the number of finished lines.

    Raise Interrupted when `cancel` is set. The next run of the command then answers all lines whose results
    are not written yet.
    """
    pending = deque[_Answer]()
    try:
        while True:
            while len(pending) < AHEAD and (line := next(lines, None)) is not None:
                pending.append(_Answer(line, lambda line: runtime.writer.generate(request_of(line))))
            if not pending:
                return
            if pending[0].is_done:
                pending[0].close()
                _write_result(pending.popleft(), write, tally)
                progress(1)
            elif cancel.is_set():
                raise Interrupted("stopped; the same command goes on where the results end.")
            else:
                for answer in pending:
                    answer.take_turn()
    finally:
        for answer in pending:
            answer.close()


def _write_result(answer: _Answer, write: Write, tally: Tally) -> None:
    write(answer.facts())
    if answer.response is None:
        tally.failed += 1
    else:
        tally.answered += 1
        tally.generation_tokens += answer.response.generation_tokens

"""The command `ruvmlx generate` writes one reply to a prompt, or the replies to a file of prompts."""

import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ruvmlx.errors import Interrupted, RuvmlxError, UsageError, unreadable
from ruvmlx.text import Sanitizer

from .interrupt import ctrl_c_sets
from .number_types import WholeNumber
from .options import model_options, open_runtime, resolve, sampling_options
from .output import json_option, log, print_json
from .path_types import OutputFile
from .verb import Verb

if TYPE_CHECKING:
    from ruvmlx.engine.types import Chunk, GenerationResponse
    from ruvmlx.models.config.model import Message
    from ruvmlx.runtime import Runtime

MAX_STDIN_BYTES = 8 << 20  # the maximum number of bytes of standard input; usual contexts hold less text


@click.command(cls=Verb)
@click.argument("prompt", required=False)
@click.option("--prompts", metavar="FILE", help="Answer each line of a JSONL file of prompts, in batches.")
@click.option(
    "--out",
    "-o",
    type=OutputFile(path_type=Path),
    help="With --prompts: the file of results; a run that ended early goes on in it.",
)
@model_options
@sampling_options
@click.option("--seed", type=WholeNumber(min=0), help="The same seed gives the same reply.")
@click.option("--stop", multiple=True, help="End the reply before this text; may be given several times.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option("--ignore-eos", is_flag=True, help="Continue past the model's own end of the reply.")
@click.option(
    "--logprobs", type=WholeNumber(0, 100), default=0, help="With --json: also the K likeliest tokens."
)
@json_option
def generate(
    prompt: str | None,
    prompts: str | None,
    out: Path | None,
    raw: bool,
    seed: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write one reply to PROMPT, or the best of several; or a reply to each line of a file.

    With - the prompt is standard input. A text that is piped in stands before any other prompt, as in
    `cat letter.txt | ruvmlx generate "Answer this letter."`.
    """
    from ruvmlx.engine.types import GenerationRequest

    if (prompt is None) == (prompts is None):
        raise UsageError(
            "give either a prompt (- reads it from a pipe) or --prompts FILE, as in "
            '`ruvmlx generate "Name three rivers."`; '
            "`ruvmlx generate --help` has more examples."
        )
    if flags["logprobs"] and prompts is None and not as_json:
        raise UsageError("--logprobs needs --json, because the reply's text has no place for them.")
    if out is not None and prompts is None:
        raise UsageError("--out goes with --prompts; one reply goes to standard output.")
    if sys.stdout is None and out is None:
        raise RuvmlxError("standard output is closed; give a file or a pipe that can take the reply.")
    settings = resolve(flags, selects=prompts is None)
    if prompts is not None:
        from .many_prompts import answer_file

        answer_file(prompts, out, settings, seed, as_json, flags | {"raw": raw})
        return
    text = _read_stdin() if prompt == "-" else f"{_piped_text()}{prompt}"
    if not text.strip():
        raise UsageError("the prompt is empty; give some text.")
    with open_runtime(settings) as runtime:
        if runtime.backend.caveat:
            log(f"note: {runtime.backend.caveat}")
        asked, cancel = _messages(text, settings.system), threading.Event()

        def write(chosen: "Runtime") -> "Iterator[Chunk]":
            request = GenerationRequest(
                prompt=text if raw else None,
                messages=None if raw else asked,
                max_new_tokens=settings.max_tokens,
                sampling=chosen.writer.sampling(seed=seed),
                stop=flags["stop"],
                ignore_eos=flags["ignore_eos"],
                logprobs=flags["logprobs"],
                cancel=cancel,
            )
            return chosen.writer.generate(request)

        with ctrl_c_sets(cancel):
            response = _print_reply(runtime.reply_chunks(asked, write, seed=seed), quiet=as_json)
        if response.repeats:
            from ruvmlx.engine.repetition import REPEATS

            log(f"note: {REPEATS}")
        runtime.learning.settle()
        if as_json:
            print_json(_report(runtime, response))
        elif response.finish_reason == "length" and sys.stderr is not None and sys.stderr.isatty():
            is_limit = response.generation_tokens >= settings.max_tokens
            log(
                "note: cut off at --max-tokens."
                if is_limit
                else "note: cut off, because the context is full."
            )
    if response.finish_reason == "cancelled":
        raise Interrupted("stopped; the text so far is kept and can be rated.")


def _piped_text() -> str:
    """Return the text that a pipe or a file gives to standard input, with an empty line after it. Return ""
    if this text is empty. Also return "" if standard input is something else, for example a terminal, because
    its text possibly has no end."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # standard input is closed, or is no file
        return ""
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
        return ""
    text = _read_stdin().rstrip("\n")
    return f"{text}\n\n" if text.strip() else ""


def _read_stdin() -> str:
    from ruvmlx.chats.chat_file import read_limited

    if sys.stdin is None:
        raise UsageError("standard input is closed; give the prompt as an argument.")
    try:
        return read_limited(sys.stdin.buffer, "standard input", MAX_STDIN_BYTES).decode("utf-8")
    except UnicodeDecodeError as e:
        raise unreadable("standard input", e) from e


def _messages(text: str, system: str | None) -> "list[Message]":
    from ruvmlx.models.config.model import Message

    return [*([Message("system", system)] if system else []), Message("user", text)]


def _print_reply(chunks: "Iterator[Chunk]", quiet: bool) -> "GenerationResponse":
    from ruvmlx.models.text.thinking import AnswerFilter

    sanitizer, answer, several, is_line_open = Sanitizer(), AnswerFilter(), False, False
    try:
        for chunk in chunks:
            if chunk.note:
                log(chunk.note)
            if chunk.replies > 1 and not (several or quiet):
                log(f"writing {chunk.replies} replies ...")
            several = several or chunk.replies > 1
            was_thinking, text = answer.is_thinking, answer.feed(sanitizer.feed(chunk.text))
            if answer.is_thinking and not was_thinking and not quiet:
                log("thinking ...")
            if chunk.response is not None:
                response, text = chunk.response, text + answer.flush()
            if not quiet:
                click.echo(text, nl=False)
                sys.stdout.flush()
                is_line_open = is_line_open or bool(text)
    except RuvmlxError:
        if is_line_open:
            click.echo("")  # so that the error is on a line of its own
        raise
    if not quiet:
        click.echo("")
    return response


def _report(runtime: Any, response: "GenerationResponse") -> dict[str, Any]:
    """Return the facts about the reply as the fields of --json, which docs/scripts.md lists."""
    from ruvmlx.platform import memory

    report = {
        "reply_id": response.request_id,
        "text": response.text,
        "token_ids": response.token_ids,
        "prompt_tokens": response.prompt_tokens,
        "generation_tokens": response.generation_tokens,
        "prompt_tps": round(response.prompt_tps, 2),
        "generation_tps": round(response.generation_tps, 2),
        "ttft_ms": round(response.ttft_ms, 2),
        "finish_reason": response.finish_reason,
        "repeats": response.repeats,
        "quality": response.quality,
        "quality_parts": dict(response.quality_parts),
        "model": runtime.model.name,
        "backend": runtime.backend.name,
        "kernels": runtime.backend.kernels,
        "adapter": runtime.learning.label,
        "examples": list(response.examples),
        "others": [
            {"reply_id": other.request_id, "text": other.text, "finish_reason": other.finish_reason}
            for other in response.others
        ],
        "kv": response.kv.facts(),
        "speculation": {"drafted": response.drafted, "accepted": response.accepted},
        "peak_rss_bytes": memory.peak(),
    }
    if response.others:
        count = 1 + len(response.others)
        report["best_of"] = {"n": count, "predicted": response.predicted_stars}
    if response.route is not None:
        report["router"] = {"arm": response.route.arm, "probability": response.route.probability}
    if response.choice is not None:
        report["selector"] = response.choice.facts
    if response.logprobs:
        report["logprobs"] = [
            {"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in response.logprobs
        ]
    return report


VERBS = [generate]

"""This module runs the chat app on a terminal for the chat suite of `ruvmlx bench` (chat.py). The command is
`python -m ruvmlx.apps.bench.chatter SETTINGS`.

This app differs from the user's app. It samples greedily, and can send paced replies (replies that are
written in advance) in place of the model's replies. It writes events to the file `events`, one JSON value on
each line: the app's phases, the times of the tokens of paced replies, and the bytes of the KV cache. It can
start to train after less than a second without input, and this training never ends.
"""

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruvmlx.chats.reply_writer import Chunks
from ruvmlx.chats.stored_replies import ReplyArchive
from ruvmlx.engine.types import Chunk, GenerationRequest, GenerationResponse, Sampling
from ruvmlx.kv.cache import KVStats
from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings as RuntimeSettings

from ..chat import run_chat

Tell = Callable[[dict[str, Any]], None]

QUESTIONS = ["Name a river.", "What is a fjord?", "Say hello.", "Why does ice float?", "Name three birds."]
REPLY_TOKENS = 8  # the maximum number of tokens of each rated reply
ENDLESS = 100_000  # the number of training steps, which is so large that the training never ends

# A Markdown document with the constructs that models often write: headings, lists, code, tables and emphasis.
# Each {} becomes a numbered word, which is one token together with the text beside it.
_SENTENCE = [*["{} "] * 14, "**{}** ", "`{}` ", "{}, ", *["{} "] * 8, "*{}*.\n\n"]
_ITEM = ["- {} ", *["{} "] * 6, "{}\n"]
_LINES = [*["    {} = ", "{}(", "{})  # ", "{}\n"] * 6, "```\n\n"]
_CODE = ["```python\n", *_LINES, "```\n", *_LINES]
_TABLE = ["| {} | ", "{} |\n|---|---|\n", *["| {} | ", "{} |\n"] * 5, "\n"]
BLOCKS = ["## {} ", "{}\n\n", *_SENTENCE * 2, *_ITEM * 4, "\n", *_CODE, *_SENTENCE, *_TABLE]


@dataclass(frozen=True)
class ChatterSettings:
    """The settings of the chat app for the chat suite.

    events: the path of the file to which the app writes events
    tokens: the maximum number of tokens of a reply
    rate: the tokens a second of paced replies (replies that are written in advance); 0: the model writes
        replies
    ratings: the number of ratings that are given before the chat opens, so that training is due
    idle_after: the app trains after this number of seconds without a key, a click, a reply or a rating
    """

    model: str
    backend: str
    threads: int
    events: str
    tokens: int
    rate: float = 0.0
    ratings: int = 0
    idle_after: float = 1e6


def pieces(first: int, count: int) -> Iterator[str]:
    """Yield `count` tokens of a Markdown document. Each token has a numbered word, such as w00007. first: the
    number of the first word."""
    number = itertools.count(first)
    blocks = itertools.cycle(BLOCKS)
    for _ in range(count):
        text = ""
        while "{}" not in (block := next(blocks)):
            text += block
        yield text + block.format(f"w{next(number):05d}")


class PacedReplies:
    """A writer of paced replies: replies that are written in advance and come at an even pace. The function
    `generate` of an object of this class replaces the function `generate` of the runtime's writer. The store
    keeps paced replies like replies of the model, but without a trace (the data from which a rating learns),
    so a rating changes no weights."""

    def __init__(self, runtime: Runtime, rate: float, tell: Tell):
        self._prepared = runtime.writer.prepare_request
        self._archive = ReplyArchive(
            runtime.store, runtime.model, runtime.tiers, runtime.optimizer, lambda: 1
        )
        self._rate, self._tell = rate, tell
        self._given = 0

    def generate(self, request: GenerationRequest, session_id: str | None = None) -> Chunks:
        request = self._prepared(request)
        prompt = len(request.input_ids or ())
        started, times, words = time.monotonic(), list[float](), list[str]()
        for n, piece in enumerate(pieces(self._given, request.max_new_tokens), 1):
            time.sleep(max(0.0, started + n / self._rate - time.monotonic()))
            if request.cancel.is_set():
                break
            times.append(time.monotonic())
            words.append(piece)
            yield Chunk(piece, generated=n, prefilled=prompt, prompt_tokens=prompt)
        self._tell({"first": self._given, "given": times})
        self._given += len(times)
        ended = "cancelled" if request.cancel.is_set() else "stop"
        response = GenerationResponse(
            request.request_id, request.session_id, "".join(words), [], prompt, 0, len(words), ended,
            1.0, 1e3 * (time.monotonic() - started), 0.0, self._rate, prompt + len(words),
            KVStats.all_f16("tiered", prompt + len(words), 0, 0),
        )  # fmt: skip
        self._archive.commit(PacedRun(request), None, None, response, session_id)  # type: ignore[arg-type]
        yield Chunk("", len(words), response=response)


@dataclass(frozen=True)
class PacedRun:
    """An object in place of the engine's class Run, with only the fields that the archive of replies
    reads."""

    request: GenerationRequest
    drawn: tuple[int, ...] = ()
    recorder: None = None
    shared: bool = False


def open_runtime(settings: ChatterSettings, tell: Tell) -> Runtime:
    adapter = "bench" if settings.ratings else "none"
    runtime = Runtime.open(
        RuntimeSettings(
            model=settings.model,
            backend=settings.backend,
            adapter=adapter,
            threads=settings.threads,
            kv_disk=None,
        )
    )
    if settings.rate:
        replies = PacedReplies(runtime, settings.rate, tell)
        runtime.writer.generate = replies.generate  # type: ignore[method-assign]
    if settings.ratings:
        _rate_replies(runtime, settings.ratings)
        _train_without_end(runtime)
    _report_cache_bytes(runtime, tell)
    return runtime


def _report_cache_bytes(runtime: Runtime, tell: Tell) -> None:
    generate = runtime.writer.generate

    def tell_bytes(*request: Any) -> Iterator[Chunk]:
        for chunk in generate(*request):
            if chunk.response:
                tell({"cache": chunk.response.kv.bytes})
            yield chunk

    runtime.writer.generate = tell_bytes  # type: ignore[method-assign, assignment]


def _rate_replies(runtime: Runtime, ratings: int) -> None:
    """Let the model write short replies, and rate the replies down and up in turn."""
    for i in range(ratings):
        chat = runtime.chats.new_chat()
        for _ in runtime.chats.say(
            chat,
            QUESTIONS[i % len(QUESTIONS)],
            sampling=Sampling(0.8, seed=i),
            max_new_tokens=REPLY_TOKENS,
            cancel=threading.Event(),
        ):
            pass
        runtime.rate("last", "up" if i % 2 else "down")


def _train_without_end(runtime: Runtime) -> None:
    from ruvmlx.sona.background import TrainingSettings as Training

    consolidate, endless = runtime.learning.consolidate, Training(steps=ENDLESS)
    runtime.learning.consolidate = lambda progress, cancel: consolidate(  # type: ignore[method-assign, misc, assignment]
        progress, cancel, endless
    )


def main() -> int:
    settings = ChatterSettings(**json.loads(sys.argv[1]))
    from ..chat import idle
    from ..chat.app import ChatApp

    idle.IDLE_AFTER = settings.idle_after
    with Path(settings.events).open("a", encoding="ascii", buffering=1) as events:

        def tell(event: dict[str, Any]) -> None:
            events.write(json.dumps(event) + "\n")

        watched = ChatApp.watch_phase

        def watch_phase(app: ChatApp) -> None:
            watched(app)
            tell({"phase": app.phase, "at": time.monotonic()})

        ChatApp.watch_phase = watch_phase  # type: ignore[method-assign, assignment]
        greedy = Sampling(temperature=0.0)
        return run_chat(lambda: open_runtime(settings, tell), sampling=greedy, max_new_tokens=settings.tokens)


if __name__ == "__main__":
    sys.exit(main())

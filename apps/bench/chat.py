"""This module is the chat suite of `ruvmlx bench`. The suite runs the chat app on a pseudo-terminal. The
suite measures the delay from a key, a reply's token or Esc to its effect, and the growth of the app's
memory."""

import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ruvmlx.errors import RuvmlxError

from .chatter import ChatterSettings
from .pseudo_terminal import PseudoTerminal, Typist
from .rows import Row, at_most, left_out, median_row

RATE = 300.0  # tokens a second of a paced reply: a reply that is written in advance and comes at an even pace
KEY, STOP = 50.0, 200.0  # ms; the limits (targets) of the time from a key to its echo, and from Esc to idle
FRAME = 1e3 / 30  # ms; the limit for the growth of the screen's lag from a reply's first quarter to its last
# MB; the limit for the growth of the app's memory, without the KV cache, after a fifth of a chat's turns
FLAT = 10.0
ANSWERED = 60.0  # seconds; the chat must accept a message within this time
TYPING = 0.08  # seconds; the mean time between two keys
RATINGS_DUE = 16  # the number of ratings after which training is due
ATTEMPTS = 3  # the maximum number of replies for each key or Esc, because a reply can end before the key
TOO_SHORT = "the model's replies are too short"
STORY = "Write a long story about a ship and the sea."

Log = Callable[[str], None]


@dataclass(frozen=True)
class Size:
    """How many replies, tokens, keys, presses of Esc and turns the benchmark measures.

    replies, tokens: the number of paced replies, and the number of tokens of each
    keys, trained: the number of keys that are typed while the model replies, and the number while the model
        trains
    stops: the number of times that Esc is pressed during a reply
    turns: the number of turns of the chat whose memory is measured; 0 to leave out this measurement
    """

    replies: int
    tokens: int
    keys: int
    trained: int
    stops: int
    turns: int


SIZES = {
    "quick": Size(1, 900, 40, 0, 8, 0),
    "whole": Size(2, 2000, 100, 40, 30, 0),
    "alone": Size(5, 2000, 300, 100, 100, 500),  # these measurements take minutes
}


class BenchChat:
    """A running chat app with its terminal, and the events that the app writes to a file (chatter.py)."""

    def __init__(self, source: ChatterSettings):
        self._scratch = tempfile.TemporaryDirectory(prefix="ruvmlx-bench-")
        events = Path(self._scratch.name) / "events"
        events.touch()
        self._file, self._events = events.open(encoding="ascii"), list[dict[str, Any]]()
        settings = vars(source) | {"events": str(events)}
        argv = [sys.executable, "-m", "ruvmlx.apps.bench.chatter", json.dumps(settings)]
        self.terminal = PseudoTerminal(argv, {"RUVMLX_HOME": self._scratch.name})

    def __enter__(self) -> Self:
        self.until("idle", 600)
        return self

    def __exit__(self, *error: Any) -> None:
        self.terminal.__exit__(*error)
        self._file.close()
        self._scratch.cleanup()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events so far that have the key `kind`."""
        while (place := self._file.tell(), line := self._file.readline())[1].endswith("\n"):
            self._events.append(json.loads(line))
        self._file.seek(place)  # the app has not yet written the whole line; read the line again later
        return [event for event in self._events if kind in event]

    @property
    def phase(self) -> str:
        changes = self.events("phase")
        return changes[-1]["phase"] if changes else ""

    def until(self, phase: str, seconds: float = 120) -> float:
        """Wait until the app is in the phase `phase`. Return the time.monotonic() at which the phase
        began."""
        deadline = time.monotonic() + seconds
        while self.phase != phase:
            if time.monotonic() > deadline or self.terminal.process.poll() is not None:
                raise RuvmlxError(
                    f"the chat is {self.phase or 'not open'}, not {phase}; see what `ruvmlx chat` shows."
                )
            self.terminal.watch(0.005)
        return self.events("phase")[-1]["at"]

    def ask(self, text: str) -> None:
        """Send a message, and wait until the app's phase changes, because the reply begins."""
        before, deadline = len(self.events("phase")), time.monotonic() + ANSWERED
        self.terminal.send(f"{text}\r")
        while len(self.events("phase")) == before:
            if time.monotonic() > deadline:
                raise RuvmlxError(
                    f"the chat ({self.phase}) took no message in {ANSWERED:.0f} s; try `ruvmlx chat`."
                )
            self.terminal.watch(0.005)

    @property
    def resident(self) -> int:
        rss = subprocess.check_output(["ps", "-o", "rss=", "-p", str(self.terminal.process.pid)])
        return int(rss) * 1024


def run(model: str, backend: str, threads: int, how: str, log: Log) -> list[Row]:
    """Run the suite, and return its rows of the report. The chats are in temporary folders, so the suite
    never touches the user's chats. how: the size of the measurements, a key of SIZES."""
    size, rng = SIZES[how], random.Random(0)

    def source(tokens: int, **more: Any) -> ChatterSettings:
        return ChatterSettings(model, backend, threads, "", tokens, **more)

    rows = _paced_rows(source(size.tokens, rate=RATE), size)
    log("a paced reply: measured")
    rows += _replying(source(1000), size.keys)
    log("the model's replies: measured")
    rows += _stop_rows(source(1000), size.stops, rng)
    log("Esc: measured")
    rows += _training(source(32, ratings=RATINGS_DUE, idle_after=0.2), size.trained)
    log("training: measured")
    rows += _memory("paced replies", source(60, rate=1000.0), size.turns, log)
    rows += _memory("this model's replies", source(8), size.turns, log)
    return rows


def _keys(doing: str, took: Sequence[float], condition: str) -> list[Row]:
    name, note = f"key while {doing}", f"{len(took)} keys"
    if not took:
        return [left_out(f"{name}: median", "ms", TOO_SHORT, KEY)]
    return [
        median_row(f"{name}: median", took, "ms", KEY, note=note, better="lower", condition=condition),
        at_most(f"{name}: p99", float(np.percentile(took, 99)), "ms", KEY, note),
        at_most(f"{name}: worst", max(took), "ms", KEY, note),
    ]


# -- measurements with paced replies, which come at an even pace -------------------------------------------


def _paced_rows(source: ChatterSettings, size: Size) -> list[Row]:
    with BenchChat(source) as chat:
        typist, took = Typist(chat.terminal), list[float]()
        for _ in range(size.replies):
            chat.ask("Go on.")
            took += _type_while(chat, typist)
        chat.terminal.quiet(0.5)  # wait until the app has drawn the last words
        given = chat.events("given")
        first, last, rate = _lags(given, chat.terminal.arrived)
    condition = f"{rate:.0f} tok/s, keys between"
    behind = f"screen behind a reply of {size.tokens:,} tokens"
    return [
        *_keys(f"a reply comes at {RATE:.0f} tok/s", took, f"{rate:.0f} tok/s"),
        _lag_row(f"{behind}: first quarter", first, condition),
        _lag_row(f"{behind}: last quarter", last, condition),
        at_most(
            f"{behind}: growth", statistics.median(last) - statistics.median(first), "ms", FRAME,
            "target: a frame",
        ),
    ]  # fmt: skip


def _type_while(chat: BenchChat, typist: Typist, most: int = 1 << 30) -> list[float]:
    """Type keys until the reply ends, at most `most` keys. Return the delay of each key's echo in ms. Leave
    out a key that was typed after the end of the reply."""
    before = len(typist.took)
    while chat.phase == "replying" and len(typist.took) - before < most:
        typist.type(TYPING)
        typist.make_room()
    took = typist.took[before:] if chat.phase == "replying" else typist.took[before:-1]
    chat.until("idle")
    typist.make_room(1)
    return took


def _lag_row(name: str, lags: Sequence[float], condition: str) -> Row:
    note = f"p99 {np.percentile(lags, 99):.0f} ms, most {max(lags):.0f} ms"
    return median_row(name, lags[:: max(1, len(lags) // 200)], "ms", None, note=note, better="lower",
                    condition=condition)  # fmt: skip


def _lags(
    given: Sequence[dict[str, Any]], arrived: Sequence[tuple[float, bytes]]
) -> tuple[list[float], list[float], float]:
    """Return the lags of tokens: the ms from the creation of a token to its appearance on the screen, for the
    first quarter and for the last quarter of each reply. Also return the median over the replies of the
    tokens a second.

    given: the events with the times at which the tokens of each reply were created
    arrived: (time, bytes) of each piece of the app's output
    """
    drawn = _times_of_words(arrived)
    first, last, rates = list[float](), list[float](), list[float]()
    for reply in given:
        times = reply["given"]
        lags = [(drawn[reply["first"] + n] - at) * 1e3 for n, at in enumerate(times)]
        quarter = len(lags) // 4
        first, last = first + lags[:quarter], last + lags[-quarter:]
        rates.append((len(times) - 1) / (times[-1] - times[0]))
    return first, last, statistics.median(rates)


def _times_of_words(arrived: Sequence[tuple[float, bytes]]) -> list[float]:
    """Return the times at which the words w00000, w00001, ... appeared on the screen. If a later word appears
    before a word, the word gets the time of the later word."""
    times: list[float] = []
    tail = b""
    for at, data in arrived:
        tail = tail[-5:] + data  # a word can be split between two pieces of output
        newest = max(map(int, re.findall(rb"w(\d{5})", tail)), default=-1)
        times += [at] * (newest + 1 - len(times))
    return times


# -- measurements with replies of the model ------------------------------------------------------------------


def _replying(source: ChatterSettings, keys: int) -> list[Row]:
    with BenchChat(source) as chat:
        typist, took = Typist(chat.terminal), list[float]()
        for _ in range(ATTEMPTS * keys):
            if len(took) < keys:
                chat.ask(STORY)
                took += _type_while(chat, typist, keys - len(took) + 1)
    return _keys("this model replies", took, "")


def _stop_rows(source: ChatterSettings, stops: int, rng: random.Random) -> list[Row]:
    """Measure the ms from Esc until the app is idle, and return the rows. Esc is pressed at a random moment
    of a reply's first second."""
    took: list[float] = []
    with BenchChat(source) as chat:
        for _ in range(ATTEMPTS * stops):
            if len(took) < stops:
                took += _stop(chat, rng.random())
    if not took:
        return [left_out("Esc in a reply, until idle: median", "ms", TOO_SHORT, STOP)]
    note = f"{stops} times; 100 ms of it wait for the rest of a longer key code"
    return [
        median_row("Esc in a reply, until idle: median", took, "ms", STOP, note=note, better="lower"),
        at_most("Esc in a reply, until idle: worst", max(took), "ms", STOP, note),
    ]


def _stop(chat: BenchChat, after: float) -> list[float]:
    """Ask for a reply, and press Esc `after` seconds later. Return a list with the ms from Esc until the app
    is idle. The list is empty if the reply ended before Esc."""
    chat.ask(STORY)
    chat.terminal.watch(after)
    took = []
    if chat.phase == "replying":
        sent = chat.terminal.send("\x1b")
        took.append((chat.until("idle") - sent) * 1e3)
    chat.until("idle")
    chat.terminal.quiet()
    return took


def _training(source: ChatterSettings, keys: int) -> list[Row]:
    """Measure the delay of keys that are typed while the background loop trains, and return the rows. A key
    stops the training; the next key is typed after the training has resumed."""
    if not keys:
        return [left_out("key while it trains", "ms", "not in a quick run", KEY)]
    with BenchChat(source) as chat:
        typist = Typist(chat.terminal)
        while len(typist.took) < keys:
            chat.terminal.wait_for("learning in the background", 120)
            typist.type(0.5)
            chat.terminal.send("\x15")
    return _keys("it trains", typist.took, "training in the background; each key interrupts it")


# -- measurements of memory ----------------------------------------------------------------------------------


def _memory(what: str, source: ChatterSettings, turns: int, log: Log) -> list[Row]:
    """Measure how much the app's memory without the KV cache grows after the first fifth of the chat's turns,
    and return the row. After a fifth of the turns, the app has made its one-time allocations."""
    name = f"memory, {what}: growth"
    if not turns:
        return [left_out(name, "MB", "`bench chat` measures it", FLAT)]
    marks = {turns // 5: (0.0, 0.0), turns * 3 // 5: (0.0, 0.0), turns: (0.0, 0.0)}
    with BenchChat(source) as chat:
        for turn in range(1, turns + 1):
            chat.ask(f"Tell me of number {turn}.")
            chat.until("idle")
            if turn in marks:
                chat.terminal.quiet(1.0)
                marks[turn] = chat.resident / 1e6, chat.events("cache")[-1]["cache"] / 1e6
    log(f"memory, {what}: measured")
    (held, cache), *_, (held_last, cache_last) = marks.values()
    said = ", ".join(f"{h:.0f} MB after {n} turns" for n, (h, _) in marks.items())
    note = f"{said}; the KV cache, not counted: {cache:.1f} to {cache_last:.1f} MB"
    return [at_most(name, (held_last - cache_last) - (held - cache), "MB", FLAT, note)]

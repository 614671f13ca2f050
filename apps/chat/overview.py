"""This module describes the state of learning and of the machine as rows of text. The side panel shows these
rows, and a screen reader can read them aloud."""

import re
from dataclasses import dataclass, field, replace
from typing import Self

from ruvmlx.errors import NotFound
from ruvmlx.kv.cache import KVStats
from ruvmlx.optimizer.optimizer import RealtimeOptimizer
from ruvmlx.platform import memory
from ruvmlx.platform.memory import MemoryUse
from ruvmlx.platform.sensors import SensorReading
from ruvmlx.runtime import LearningState, Runtime
from ruvmlx.text import count, one_line, size

from ..learning_words import share_text
from ..optimizer_words import KNOBS
from . import describe
from .describe import AGES, bar

BAR = 4  # terminal cells of the bar that shows a tier's share of the cache's bytes
LIKES = 2  # the maximum number of rows about what the user likes
DETAILS = ("model", "caches", "learned", "rest")  # labels of rows that a panel of few lines leaves out


@dataclass(frozen=True)
class Overview:
    """The state of learning and memory, which the runtime's thread reads. learning: None if the runtime has
    no adapter."""

    learning: LearningState | None
    held: MemoryUse
    reading: SensorReading = field(default_factory=SensorReading)
    speed: "Rows" = field(default_factory=list)  # the rows of `speed_rows`

    @classmethod
    def of(cls, runtime: Runtime) -> Self:
        try:
            learning = runtime.learning.state()
        except NotFound:
            learning = None
        return cls(learning, runtime.memory_use(), speed=speed_rows(runtime.optimizer))

    def later(self, reading: SensorReading) -> "Overview":
        """Return a copy of the overview with the sensors' figures `reading` and new figures of the memory
        that the process uses. Any thread can call this method."""
        now = replace(self.held, resident=memory.resident(), peak=memory.peak())
        return replace(self, held=now, reading=reading)


Rows = list[tuple[str, str]]  # a list of rows: (label, text)
Sections = list[tuple[str, Rows]]


def learning_rows(state: LearningState) -> Rows:
    status, memory = state.status, state.memory
    seen = f", seen {count(memory.hits, 'time')}" if memory.hits else ""
    pairs = f" + {count(status.preferences, 'pair')}" if status.preferences else ""
    return [
        ("adapter", f"{one_line(state.adapter)}, version {status.adapter_version}"),
        ("ratings", f"{status.ratings}{pairs}, {status.updates} used"),
        ("limit", f"{share_text(status.kl, status.kl_cap)} used"),
        ("topics", f"{memory.patterns}{seen}"),
        ("training", _training(state.missing)),
        ("trained", count(status.consolidations, "time") if status.consolidations else "not yet"),
        *(("likes", words) for words in state.likes[:LIKES]),
    ]


def _training(missing: int | None) -> str:
    if missing is None:
        return "not for this model"
    return f"after {missing} more" if missing else "in your next pause"


def recent_rows(state: LearningState) -> Rows:
    """Return a row for each of the newest ratings. The row's text is the note of the rating, or else the
    question of the rated reply."""
    return [
        (describe.rating_mark(r.rating), one_line(r.note) or one_line(r.question) or "(deleted)")
        for r in state.recent
    ]


def cache_rows(kv: KVStats | None) -> Rows:
    """Return a row for each tier of the chat's KV cache, with the tier's share of the bytes, and a row for
    the whole cache. A tier is a part of the cache with one precision."""
    if kv is None:
        return []
    total = kv.bytes or 1
    rows = [
        (age, f"{bar(nbytes / total, BAR)} {size(nbytes)}, {tokens:,} tok")
        for age, nbytes, tokens in zip(AGES, kv.tier_bytes, kv.tokens, strict=True)
    ]
    return [*reversed(rows), ("cache", f"{size(kv.bytes)} (full: {size(kv.f16_bytes)})")]


def memory_rows(held: MemoryUse) -> Rows:
    """Return rows with the process's memory, the memory budget, and the parts of the memory."""
    limit = f" of {size(held.kv_budget)}" if held.kv_budget else ""
    return [
        ("memory", f"{bar(held.resident / held.budget if held.budget else 0.0)} {size(held.resident)}"),
        ("budget", f"{size(held.budget)}, peak {size(held.peak)}"),
        ("model", size(held.model)),
        ("caches", size(held.kv) + limit),
        ("learned", size(held.adapters)),
        ("rest", size(held.rest)),
    ]


def speed_rows(optimizer: RealtimeOptimizer) -> Rows:
    """Return rows with the speed and the estimated quality of the newest replies, what the optimizer has put
    in force, and its newest action."""
    figures, action = optimizer.monitor.facts, optimizer.log.newest
    rows: Rows = []
    if figures["tokens_per_second"] is not None:
        rows.append(("speed", f"{figures['tokens_per_second']:.0f} tokens a second"))
    if figures["quality"] is not None:
        rows.append(("quality", f"{figures['quality']:.0%} by estimate"))
    rows += [("tuned", f"{KNOBS[knob]}: {value}") for knob, value in optimizer.in_force.items()]
    if action is not None:
        rows.append(("action", f"{KNOBS[action.knob]}: {action.outcome}"))
    return rows


def sensor_rows(reading: SensorReading) -> Rows:
    """Return rows with the machine's heat and power, as far as the platform reports them."""
    rows: Rows = []
    if reading.celsius is not None:
        rows.append(("heat", f"{reading.celsius:.0f} °C"))
    elif reading.heat:
        rows.append(("heat", reading.heat))
    if reading.watts:
        rows.append(("power", f"{reading.watts:.1f} W, {reading.drawn_by}"))
    return rows


def sections(view: Overview, kv: KVStats | None) -> Sections:
    learning = view.learning
    shown: Sections = [("Learning", learning_rows(learning) if learning else [("none", "")])]
    if learning and learning.recent:
        shown.append(("Recent ratings", recent_rows(learning)))
    machine = [*view.speed, *cache_rows(kv), *memory_rows(view.held), *sensor_rows(view.reading)]
    return [*shown, ("Machine", machine)]


def fit_sections(shown: Sections, height: int) -> Sections:
    """Shorten the sections so that they fit into `height` lines, if possible. If not all rows fit, leave out
    the rows whose labels are in DETAILS, and then the last rows of the recent ratings."""
    if sum(len(rows) + 2 for _, rows in shown) <= height:
        return shown
    brief = [(title, [row for row in rows if row[0] not in DETAILS]) for title, rows in shown]
    over = sum(len(rows) + 1 for _, rows in brief) - height
    return [(t, rows[: max(1, len(rows) - over)] if t == "Recent ratings" else rows) for t, rows in brief]


def spoken_lines(view: Overview, kv: KVStats | None) -> list[str]:
    """Return each row of the overview as a line that a screen reader can read aloud."""
    shown = ((title, row) for title, rows in sections(view, kv) for row in rows)
    return [f"{title}: {word} {_expand_units(text)}".rstrip() for title, (word, text) in shown]


def _expand_units(text: str) -> str:
    """Return a row's text for a screen reader, without the bar and with whole words: "▰▱▱▱ 7 MB, 319 tok" ->
    "7 MB, 319 tokens"."""
    return re.sub(r"(\d) tok$", r"\1 tokens", re.sub("^[▰▱]+ ", "", text))

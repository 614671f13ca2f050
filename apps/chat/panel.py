"""The side panel (F2): what was learned and what the machine does, as it is now."""

import resource
import sys
from dataclasses import dataclass

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ruvmlx.errors import NotFound
from ruvmlx.kv.cache import KVStats
from ruvmlx.runtime import LearningState
from ruvmlx.text import one_line

from . import describe
from .contract import ChatRuntime
from .status import bar

WIDTH = 34  # cells, of which the frame takes four
QUESTION = 18  # cells of a rated question


@dataclass(frozen=True)
class View:
    """What the panel shows, gathered in the runtime's thread. learning: None without an adapter."""

    learning: LearningState | None
    peak_bytes: int  # of memory, since the start

    @classmethod
    def of(cls, runtime: ChatRuntime) -> "View":
        try:
            learning = runtime.learning()
        except NotFound:
            learning = None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return cls(learning, peak if sys.platform == "darwin" else peak * 1024)


def size(count: float) -> str:
    """Bytes as people read them: "512 KiB", "1.2 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


Rows = list[tuple[str, str]]  # a word, and what stands beside it


def learning_rows(state: LearningState) -> Rows:
    status, memory = state.status, state.memory
    share = status.kl / status.kl_cap if status.kl_cap else 0.0
    return [
        ("adapter", f"{one_line(state.adapter)}, version {status.adapter_version}"),
        ("ratings", f"{status.ratings}, {status.updates} used"),
        ("KL", f"{bar(share)} {status.kl:.3f} of {status.kl_cap:g}"),
        ("patterns", f"{memory.patterns}, {memory.hits} hits"),
        ("training", f"after {state.missing} more" if state.missing else "when you rest"),
        ("trained", f"{status.consolidations} times" if status.consolidations else "not yet"),
    ]


def recent_rows(state: LearningState) -> Rows:
    """The newest ratings, and what they were about."""
    return [
        (describe.rating_mark(r.rating), one_line(r.note) or one_line(r.question) or "(deleted)")
        for r in state.recent
    ]


def machine_rows(kv: KVStats | None, peak_bytes: int) -> Rows:
    """The tiers of the KV cache by their share of its tokens, and its bytes."""
    rows: Rows = []
    if kv:
        tiers = {"hot": kv.hot_tokens, "warm": kv.warm_tokens, "cold": kv.cold_tokens}
        total = sum(tiers.values()) or 1
        rows = [(name, f"{bar(tokens / total)} {tokens:,} tokens") for name, tokens in tiers.items()]
        rows.append(("cache", f"{size(kv.bytes)} (f16: {size(kv.f16_bytes)})"))
    return [*rows, ("memory", f"{size(peak_bytes)} at most")]


def sections(view: View, kv: KVStats | None) -> list[tuple[str, Rows]]:
    learning = view.learning
    shown: list[tuple[str, Rows]] = [("Learning", learning_rows(learning) if learning else [("none", "")])]
    if learning and learning.recent:
        shown.append(("Recent ratings", recent_rows(learning)))
    return [*shown, ("Machine", machine_rows(kv, view.peak_bytes))]


def lines(view: View, kv: KVStats | None) -> list[str]:
    """The same in words, a line each, for the plain mode."""
    return [f"{title}: {word} {text}".rstrip() for title, rows in sections(view, kv) for word, text in rows]


class Panel(VerticalScroll, can_focus=False):
    """Out of sight until it is wanted."""

    def __init__(self) -> None:
        super().__init__(Static(markup=False))
        self.display = False

    def show(self, view: View, kv: KVStats | None) -> None:
        parts: list[Content] = []
        for title, rows in sections(view, kv):
            parts.append(Content.styled(title, "bold $primary"))
            width = max(len(word) for word, _ in rows)
            parts += [
                Content.assemble((f"{word:<{width}}  ", "$secondary"), text).truncate(
                    WIDTH - 4, ellipsis=True
                )
                for word, text in rows
            ]
            parts.append(Content(""))
        if view.learning and view.learning.status.versions:
            known = sorted({0, *view.learning.status.versions})[-6:]
            parts.append(Content(f"versions {', '.join(map(str, known))}").stylize("$secondary"))
        parts.append(Content("^r take back   /rollback N").stylize("$secondary"))
        self.query_one(Static).update(Content("\n").join(parts))

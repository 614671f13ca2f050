"""Numbers as text: short signs for the app, words for the plain mode."""

from collections.abc import Mapping
from typing import Any

from ruvmlx.runtime import LearnStatus, RatingResult, Runtime
from ruvmlx.text import one_line

from .view_model import learn_status


def rating_mark(rating: str) -> str:
    """ "up" -> "▲ up", "4" -> "★★★★☆"."""
    if rating in ("up", "down"):
        return "▲ up" if rating == "up" else "▼ down"
    stars = int(rating)
    return "★" * stars + "☆" * (5 - stars)


def branch(number: int, of: int) -> str:
    """ "‹ 2/3 ›" for one of several replies in a place; "" for the only one."""
    return f"‹ {number}/{of} ›" if of > 1 else ""


def rating_words(rating: str) -> str:
    return rating if rating in ("up", "down") else f"{rating} of 5"


def milliseconds(microseconds: float) -> str:
    """ "0.41 ms", "12 ms"."""
    value = microseconds / 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def effect(result: RatingResult) -> str:
    """One quiet line: what a rating did to the reply's own probability."""
    if not result.applied:
        return f"{rating_mark(result.rating)} · noted, nothing to change · v{result.adapter_version}"
    return " · ".join((
        rating_mark(result.rating),
        f"log-prob {result.logprob_before:.3f} → {result.logprob_after:.3f} per token",
        f"KL {result.kl:.3f} of {result.kl_cap:g}",
        milliseconds(result.apply_us),
        f"v{result.adapter_version}",
    ))  # fmt: skip


def effect_words(result: RatingResult) -> str:
    """The same, to be read aloud."""
    rated = f"Rated {rating_words(result.rating)}"
    if not result.applied:
        return f"{rated}: noted, nothing to change."
    return (
        f"{rated}: log-probability {result.logprob_before:.3f} to {result.logprob_after:.3f} per token, "
        f"KL {result.kl:.3f} of {result.kl_cap:g}, {milliseconds(result.apply_us)}, "
        f"version {result.adapter_version}."
    )


MEASURING = "measuring the KV cache in the background"


def learning(done: int = 0, total: int = 0) -> str:
    """ "learning in the background, step 3 of 12"."""
    return "learning in the background" + (f", step {done} of {total}" if total else "")


def lesson(report: Mapping[str, Any]) -> str:
    """What came of `consolidate`."""
    reason = one_line(report["reason"])
    return f"learned in the background: {reason}" if report["promoted"] else not_learned(reason)


def not_learned(reason: str) -> str:
    return f"nothing learned in the background: {reason}"


def kv_lesson(report: Mapping[str, Any]) -> str:
    """What came of `review_kv`; "" where caches are made as before."""
    return (
        f"new chats keep their KV cache another way: {one_line(report['reason'])}"
        if report["changed"]
        else ""
    )


def undone(status: LearnStatus) -> str:
    return f"Last rating taken back: {status.ratings} left, version {status.adapter_version}."


def rolled_back(status: LearnStatus) -> str:
    return f"Version {status.adapter_version} is in use, from {status.ratings} ratings."


def status_lines(runtime: Runtime) -> list[str]:
    """What /status says."""
    lines = [
        f"model     {one_line(runtime.model.name)}",
        f"backend   {runtime.backend.name}, {runtime.backend.kernels}",
        f"context   {runtime.model.shape.max_context:,} tokens",
    ]
    known = learn_status(runtime)
    if known is None:
        return [*lines, "adapter   none: this chat does not learn"]
    return [
        *lines,
        f"ratings   {known.ratings}, {known.updates} updates",
        f"adapter   version {known.adapter_version}, norm {known.micro_norm:.3g}",
        f"KL        {known.kl:.4f} of {known.kl_cap:g} nats per token",
    ]


def adapter(runtime: Runtime) -> str:
    """What /adapter says: the one in use, and which others there are."""
    label = runtime.adapter_label
    said = f"Adapter: {label}." if label else "No adapter: this chat does not learn."
    others = [f"{row.name}@{row.version}" for row in runtime.adapters()]
    others = [name for name in others if name != label]
    return f"{said} Others: {', '.join(others)}." if others else said


def system_prompt(text: str | None) -> str:
    return f"System prompt: {text}" if text else "No system prompt."


def bar(fraction: float, cells: int = 5) -> str:
    """0.3 -> "▰▰▱▱▱"; anything above nothing fills one cell."""
    filled = min(cells, max(round(fraction * cells), 1 if fraction > 0 else 0))
    return "▰" * filled + "▱" * (cells - filled)

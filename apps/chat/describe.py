"""This module turns results and figures into text: short lines for the app, and sentences for plain mode."""

from collections.abc import Mapping
from typing import Any

from ruvmlx.chats.learning import FirstSummary
from ruvmlx.chats.summaries import ChatSummary
from ruvmlx.engine.auto_best_of import AUTO, MAX_REPLIES
from ruvmlx.engine.types import GenerationResponse
from ruvmlx.models.text.thinking import Thought
from ruvmlx.progress import duration
from ruvmlx.ratings import BAD, FELT, REASONS, is_against
from ruvmlx.runtime import LearnStatus, PreferenceResult, RatingResult, Runtime
from ruvmlx.text import backend_words, one_line, size
from ruvmlx.text import count as count_of
from ruvmlx.tiers import TIERS

from ..learning_words import share_text
from ..optimizer_words import tuning_line
from .view_model import RatingPlace, learn_status

# Names for the tiers of the KV cache, from the oldest tokens to the newest. A tier is a part of the cache
# with one precision.
AGES = ("oldest", *("older",) * (len(TIERS) - 2), "recent")
# if more than this share of the context is used, the app warns; a reply needs part of the unused share
NEARLY_FULL = 5 / 8


def rating_mark(rating: str) -> str:
    """Return a rating as symbols: "up" -> "▲ good", "4" -> "★★★★☆"."""
    if rating in ("up", "down"):
        return "▲ good" if rating == "up" else "▼ bad"
    stars = int(rating)
    return "★" * stars + "☆" * (5 - stars)


def branch(number: int, of: int) -> str:
    """Return "‹ 2/3 ›" for the second of three replies to one question, or of three versions of a question.
    Return "" for the only one."""
    return f"‹ {number}/{of} ›" if of > 1 else ""


def best_of(count: int | str, knows: bool) -> str:
    """Say how many replies the model writes to a question. count: the number of replies, or "auto". knows:
    True if the store has ratings by which the program can choose the best of the replies."""
    if count == AUTO:
        if not knows:
            return "A question gets one reply until you have rated one, then as many as cost little more."
        return f"A question gets up to {MAX_REPLIES} replies, as long as they cost little. /best 1 ends this."
    if count == 1:
        return "A question gets one reply; /best 4 writes four at once and shows the best."
    shown = "your ratings choose the one that you see"
    if not knows:
        shown = "without ratings, none is chosen, and you see the last"
    return f"A question gets {count} replies; {shown}. /best 1 ends this."


def with_mark(effect: str, rating: str | None) -> str:
    """Return the line below a reply. effect: the text that says what a rating or a choice changed, or "". The
    line begins with the mark of the reply's rating, also if `effect` is about a choice."""
    mark = rating_mark(rating) if rating else ""
    return effect if mark in effect else " · ".join(filter(None, (mark, effect)))


def rating_words(rating: str) -> str:
    return {"up": "good", "down": "bad"}.get(rating) or f"{rating} of 5"


def thought_text(parts: Thought, finished: bool, unfolded: bool) -> str:
    """Return a line with the length of a reply's thought (the reasoning before the answer). If `unfolded`,
    add the text of the thought. Return "" for a reply without a thought."""
    if not (parts.thought or parts.is_open):
        return ""
    words = count_of(len(parts.thought.split()), "word")
    said = f"thinking, {words}" if parts.is_open and not finished else f"thought for {words}"
    return f"▾ {said}\n{parts.thought}" if unfolded else f"▸ {said} · t shows it"


def milliseconds(microseconds: float) -> str:
    """Return a time of `microseconds` as text in milliseconds: "0.41 ms", "12 ms"."""
    value = microseconds / 1000
    return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"


def bad_with_reason(rating: str, reason: str) -> str:
    """Return the mark of a rating. If the user gave a reason, the reason follows: "▼ bad, too long". reason:
    a key of `REASONS`, or "" """
    return rating_mark(rating) + (f", {REASONS[reason]}" if reason else "")


def effect(result: RatingResult, key: str) -> str:
    """Return a line that says what a rating changed. The line fits into a terminal of 80 columns.

    key: the label of the key that undoes the rating; "": the line names no key.
    """
    return f"{bad_with_reason(result.rating, result.reason)} · {rating_effect(result, key)}"


REASON_KEYS = "> too long · < too short · ! wrong tone · ? wrong facts"


def why_question(has_focus: bool) -> str:
    """Return the question about a bad rating. has_focus: True if the keys of the reasons work now; False if
    the key Tab must come before."""
    return f"Why? {REASON_KEYS}" if has_focus else f"Why? Tab, then {REASON_KEYS}"


def asks_why(result: RatingResult) -> bool:
    """Return True if the rating is bad and has no reason."""
    return result.rating in BAD and not result.reason


def effect_words(result: RatingResult) -> str:
    """Say what a rating changed, in sentences that a screen reader can read aloud."""
    said = rating_words(result.rating) + (f", {REASONS[result.reason]}" if result.reason else "")
    if result.reason == "facts":
        return f"Rated {said}. Kept, but {NO_FACTS}. /undo takes it back."
    more = f" /why {'|'.join(REASONS)} says why." if asks_why(result) else ""
    return f"Rated {said}. {rating_effect(result, '/undo')}. /details has the figures.{more}"


NO_FACTS = "facts teach nothing: ratings change how the model writes, not what it knows"


def first_summary(found: FirstSummary | None) -> str:
    """Say which replies the user seems to like by the first ratings. If these ratings show nothing clear, say
    so, and ask about the user's likely taste if there is a guess. If `found` is None, return ""."""
    if found is None:
        return ""
    so_far = f"After {found.count} ratings"
    if found.likes:
        return f"{so_far}, you seem to like: {found.likes}. /effect shows what changed, /undo takes back."
    asked = f" Could it be {found.guess}?" if found.guess else ""
    return (
        f"{so_far}, it is not clear yet what you like.{asked} "
        "After a bad rating, /why says what was wrong; that counts more than the rating alone."
    )


def oldest(count: int) -> str:
    """Return words for the `count` oldest messages of a chat: "the oldest message", "the oldest 3
    messages"."""
    return "the oldest message" if count == 1 else f"the oldest {count:,} messages"


def summary(found: ChatSummary, is_printed: bool = False) -> str:
    """Say that the model reads notes in place of the oldest messages, or that it wrote no notes. is_printed:
    True if the user has already seen the notes; if False, the text ends with the notes."""
    if not found.count:
        return "The model wrote no notes; it reads what its context has room for."
    told = f"The model reads these notes in place of {oldest(found.count)}, which"
    told = f"{told} {'stays' if found.count == 1 else 'stay'} in the chat."
    return f"{told} /summarize off ends this." + ("" if is_printed else f"\n\n{found.text}")


def rating_effect(result: RatingResult, key: str) -> str:
    """Say what the model learned from a rating: "Learned: more like this. Ctrl+R takes it back". The word
    "more" or "less" comes from the measured change of the reply's log-probability, and not from the
    rating. If the change is the opposite of what the rating asks for, say that all ratings together cause it.
    key: as in `effect`."""
    back = _way_back(key)
    if result.reason == "facts":
        return f"Kept; facts teach nothing{back}"
    if not result.applied:
        return "Kept; it changed nothing"
    moved = result.logprob_after - result.logprob_before
    if abs(moved) < FELT:
        return f"Learned; it changed next to nothing{back}"
    if is_against(result.rating, moved):
        return f"Learned: your ratings ask for {'more' if moved > 0 else 'less'} like this{back}"
    return f"Learned: {'more' if moved > 0 else 'less'} like this{back}"


def _way_back(key: str) -> str:
    return f". {key} takes it back" if key else ""


def preference(result: PreferenceResult, key: str) -> str:
    """Return a line that says what the user's choice between two replies changed. The line fits into a
    terminal of 80 columns. key: as in `effect`."""
    if not result.applied:
        return f"{PREFERRED} · Kept; it changed nothing"
    return f"{PREFERRED} · Learned: more like this than like the other{_way_back(key)}"


PREFERRED = "◆ preferred"
YOUR_VERSION = "your version"
WENT_ON = "the reply that you went on from"
NOTHING_LEARNED = "Saved your version; this chat uses no adapter, so nothing was learned"


def learned_choice(result: PreferenceResult, what: str, key: str) -> str:
    """Say which reply the user prefers. Also say which key undoes the choice, or that the choice changed
    nothing. what: words that name the chosen reply."""
    if not result.applied:
        return f"Kept that you prefer {what}; it changed nothing"
    return f"Learned that you prefer {what}; {key} takes it back"


def preference_words(result: PreferenceResult, what: str) -> str:
    """Say which reply the user prefers. Also say that /undo takes the choice back, or that the choice changed
    nothing. Plain mode shows this text."""
    return f"{learned_choice(result, what, '/undo')}."


def change_text(kl: float, cap: float) -> str:
    """Return the distance `kl` of the model from the original model as text, in percent of the allowed
    distance `cap`: "15% of the allowed change"."""
    return f"{share_text(kl, cap)} of the allowed change"


def reply_details(response: GenerationResponse, context: int) -> list[str]:
    """Return lines with the figures of a reply. context: the context length of the model, in tokens."""
    kv = response.kv
    ages = ", ".join(f"{age} {n:,}" for age, n in zip(reversed(AGES), reversed(kv.tokens), strict=True) if n)
    guesses = (
        f", {response.accepted:,} of {response.drafted:,} guessed tokens right" if response.drafted else ""
    )
    return [
        f"last reply   {count_of(response.generation_tokens, 'token')}, "
        f"{response.generation_tps:.0f} a second, first word after {seconds(response.ttft_ms)}{guesses}",
        f"context      {response.cache_tokens:,} of {context:,} tokens ({ages}), {size(kv.bytes)}",
        *quality_lines(response),
    ]


def quality_lines(response: GenerationResponse) -> list[str]:
    """Return a line with the estimated quality of a reply and its parts; [] if there is no estimate."""
    if response.quality is None:
        return []
    parts = ", ".join(f"{name} {part:.0%}" for name, part in response.quality_parts.items())
    return [f"quality      {response.quality:.0%} by estimate ({parts})"]


def seconds(ms: float) -> str:
    """Return a time of `ms` milliseconds as text in seconds: "0.2 s", "12 s" from 10 s on, or "0.04 s" below
    0.095 s."""
    digits = 0 if ms >= 10_000 else 1 if ms >= 95 else 2
    return f"{ms / 1000:.{digits}f} s"


def lesson_details(result: RatingResult | PreferenceResult) -> str:
    """Return a line with the figures of one rating or choice."""
    if isinstance(result, RatingResult):
        moved = f"log-probability per token {result.logprob_before:.3f} → {result.logprob_after:.3f}"
    else:
        moved = f"lead in log-probability per token {result.margin_before:+.3f} → {result.margin_after:+.3f}"
    return f"last lesson  {moved}, in {milliseconds(result.apply_us)}"


def adapter_details(status: LearnStatus) -> str:
    """Return a line with the figures of all ratings and choices together."""
    return (
        f"all lessons  {change_text(status.kl, status.kl_cap)}: KL {status.kl:.3f} of {status.kl_cap:g} nats "
        f"per token; version {status.adapter_version}"
    )


MEASURING = "measuring the KV cache in the background"
TRYING = "trying in the background what makes replies faster"


def learning(done: int = 0, total: int = 0, left: float | None = None) -> str:
    """Return a line about the progress of a training: "learning in the background, step 3 of 12, about 2 min
    5 s left".

    done, total: the number of finished steps and of all steps. left: the seconds that remain, or None if
    their number is not known.
    """
    step = f", step {done} of {total}" if total else ""
    return f"learning in the background{step}" + ("" if left is None else f", about {duration(left)} left")


def waiting(reason: str) -> str:
    """Return a line that says why the training in the background does not begin yet."""
    return f"learning waits: {reason}"


def lesson(report: Mapping[str, Any]) -> str:
    """Return a line about the result of a training in the background. report: the dict that
    `runtime.learning.consolidate` returns."""
    reason = one_line(report["reason"])
    return f"learned in the background: {reason}" if report["promoted"] else not_learned(reason)


def not_learned(reason: str) -> str:
    return f"nothing learned in the background: {reason}"


def kv_lesson(report: Mapping[str, Any]) -> str:
    """Return a line about the result of a measurement of the KV cache's tiers (parts with one precision
    each), or "" if the measurement did not change the precisions."""
    return f"new chats use other cache precisions: {one_line(report['reason'])}" if report["changed"] else ""


def tuning_lesson(report: Mapping[str, Any]) -> str:
    """Return a line about a trial of the optimizer. Return "" if the trial changed nothing."""
    return f"replies are faster: {tuning_line(dict(report))}" if report["outcome"] == "kept" else ""


# what `undo` took back (LearnStatus.undone) -> the words for the user
UNDONE = {"change of a rating": "Rating change", "preference": "Choice"}


def undone(status: LearnStatus, place: RatingPlace, least: int = 8) -> str:
    """Say what an undo took back, and of which reply. place: the place of the feedback before the undo.
    least: the line has at least so many characters of the question."""
    said = f"{UNDONE.get(status.undone, 'Rating')} taken back"
    return _with_question(said, place, f"; {_rest_text(status)}.", least)


def reply_undone(status: LearnStatus) -> str:
    """Say that the rating of the selected reply, which is not the newest rating, was taken back."""
    return f"This reply's rating taken back: {_rest_text(status)}."


def _rest_text(status: LearnStatus) -> str:
    left = ratings_text(status) if status.preferences or status.undone == "preference" else status.ratings
    return f"{left} left, version {status.adapter_version}"


LINE = 76  # the maximum number of characters of a line that fits into a terminal of 80 columns


def nothing_to_undo(place: RatingPlace, key: str) -> str:
    """Say that the selected reply has no rating to take back, and where the newest rating is. key: the label
    of the key that takes the newest rating back."""
    return _with_question(f"No rating here. {key} takes back the newest", place)


def _with_question(said: str, place: RatingPlace, rest: str = "", least: int = 8) -> str:
    """Return `said`, the question of the reply at `place` and `rest`, in one line of at most LINE characters.
    The line is longer if it otherwise has fewer than `least` characters of the question."""
    question = one_line(place.question)
    if not question:
        return f"{said}, of a deleted reply{rest}"
    said += f", {place.elsewhere}: “" if place.elsewhere else ": “"
    room = max(least, LINE - 1 - len(said) - len(rest))
    return said + (question if len(question) <= room else question[: room - 1].rstrip() + "…") + "”" + rest


def ratings_text(status: LearnStatus) -> str:
    """Return the number of ratings and of choices between replies as text: "3 ratings", "3 ratings and 1
    preference"."""
    return f"{count_of(status.ratings, 'rating')}{_and_preferences(status)}"


def _and_preferences(status: LearnStatus) -> str:
    count = status.preferences
    return f" and {count_of(count, 'preference')}" if count else ""


def rolled_back(status: LearnStatus) -> str:
    return f"Version {status.adapter_version} is in use; it learned from {ratings_text(status)}."


def status_lines(runtime: Runtime) -> list[str]:
    """Return the lines that /status prints."""
    lines = [
        f"model     {one_line(runtime.model.name)}",
        f"backend   {backend_words(runtime.backend.name, runtime.backend.kernels)}",
        f"context   a chat can have {runtime.model.context:,} tokens",
    ]
    known = learn_status(runtime)
    if known is None:
        return [*lines, "learning  off: this chat uses no adapter"]
    rated = f"{known.ratings}{_and_preferences(known)}, {known.updates} of them changed the model"
    return [
        *lines,
        f"ratings   {rated if known.ratings or known.preferences else 'none yet'}",
        f"adapter   {str(runtime.learning.label).rpartition('@')[0]}, version {known.adapter_version}",
        f"change    {change_text(known.kl, known.kl_cap)} is used",
    ]


def adapter(runtime: Runtime) -> str:
    """Return the text that /adapter prints: the name of the adapter in use, and the model's other
    adapters."""
    label = runtime.learning.label
    said = f"Adapter: {label}." if label else "No adapter: this chat does not learn."
    others = [f"{row.name}@{row.version}" for row in runtime.adapters()]
    others = [name for name in others if name != label]
    return f"{said} Others: {', '.join(others)}." if others else said


def system_prompt(text: str | None, template: str) -> str:
    """Return the text that /system prints. text: the user's system prompt. template: the system prompt that
    the model's chat template adds if the user has no system prompt, or ""."""
    if text:
        return f"System prompt: {text}"
    if template:
        return f"No system prompt of yours. The model's template sends its own: {template}"
    return "No system prompt."


def bar(fraction: float, cells: int = 5) -> str:
    """Return a bar of characters for a fraction from 0 to 1: 0.3 -> "▰▰▱▱▱". A fraction above 0 fills at
    least one cell of the bar."""
    filled = min(cells, max(round(fraction * cells), 1 if fraction > 0 else 0))
    return "▰" * filled + "▱" * (cells - filled)

"""This module describes the state of learning in sentences for the user. The figures are in the output of
`learn status --details` and in JSON."""

import re
import shlex
from typing import TYPE_CHECKING, Any

from ruvmlx.ratings import FELT, REASONS, is_against
from ruvmlx.text import excerpt

if TYPE_CHECKING:
    from ruvmlx.runtime import PreferenceResult, RatingResult

HOW_TO_RATE = "Rate a reply in `ruvmlx chat`, or with `ruvmlx rate last up`."
STILL_THE_ORIGINAL = "replies are the original model's."


def status_facts(status: Any) -> dict[str, Any]:
    """Return the facts of an `AdapterHistory.status()` that `learn status --json` prints."""
    last = status.last.report if status.last else {}
    return {
        "ratings": status.ratings,
        "preferences": status.preferences,
        "updates": status.updates,
        "pending": status.pending,
        "consolidations": status.consolidations,
        "adapter_version": status.adapter_version,
        "kl": status.kl,
        "kl_cap": status.kl_cap,
        "micro_norm": status.micro_norm,
        "versions": status.versions,
        "ppl_change": last.get("ppl_change"),
        "promoted": last.get("promoted"),
        "reason": last.get("reason"),
    }


def status_lines(facts: dict[str, Any]) -> list[str]:
    """Return sentences about the state of learning. facts: the facts that `learn status --json` prints."""
    lines = [_learned_text(facts), _taste_line(facts), _way_back(facts), _training(facts)]
    if targets := facts.get("targets"):
        where = (
            "the output layer, which chooses each next word"
            if targets == "head"
            else f"these parts of the model: {targets}"
        )
        lines.append(f"Ratings change {where}.")
    return [line for line in lines if line]


def detail_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of (label, text) with the figures of the state of learning."""
    last = max(facts["versions"], default=0)
    return [
        (
            "adapter",
            f"{facts['adapter']}, at version {facts['adapter_version']}; the newest version is {last}. Each "
            "rating, changed rating and training makes a version",
        ),
        (
            "feedback",
            f"{_feedback_count(facts['ratings'], facts.get('preferences', 0))}, "
            f"{facts['updates']} changed the adapter",
        ),
        (
            "distance",
            f"{_distance(facts['kl'])}; the limit is {facts['kl_cap']:g}. It says how far the predictions on "
            "usual text are from the original model's (KL divergence, in nats per token; 0 is the same)",
        ),
        (
            "trainings",
            f"{facts['consolidations']} by the background learning; "
            f"{_ratings(facts['pending'])} newer than the last result in use",
        ),
        *((_signal_name(group), _signal_line(group)) for group in facts["signals"]),
    ]


def _distance(kl: float) -> str:
    """Return a distance in nats per token as text: "0.0120", or "less than 0.0001" for a smaller one
    that is not 0."""
    return "less than 0.0001" if 0 < kl < 0.0001 else f"{kl:.4f}"


def _signal_name(group: dict[str, Any]) -> str:
    return "rated replies" if group["kind"] == "explicit" else "what you did"


def _signal_line(group: dict[str, Any]) -> str:
    """Return a line about a group of learning signals: their number, and the mean quality of the replies (0
    to 1)."""
    scale = (
        "your ratings (up is 100%, down is 0%, and 50% is the middle of your stars)"
        if group["kind"] == "explicit"
        else "what you did with a reply (0% is bad, 100% is good)"
    )
    average = f"{group['quality']:.0%} on average, by {scale}"
    return f"{group['count']:,} in chats of {group['context']} tokens: {average}"


def with_flags(text: str, flags: dict[str, Any]) -> str:
    """Return a text for the user in which each command that acts on an adapter has the flags that choose the
    model and the adapter. Without these flags, the command would act on the adapter in use. flags: the values
    of --model and --adapter; None: the user did not give the flag"""
    given = {"--model": flags["model"], "--adapter": flags["adapter"]}
    chosen = shlex.join(word for flag, value in given.items() if value for word in (flag, value))
    return re.sub("`ruvmlx (chat|learn|rate)[^`]*", lambda command: f"{command[0]} {chosen}".rstrip(), text)


def rating_line(result: "RatingResult") -> str:
    """Return sentences about the effect of one rating."""
    replaced = _of_five(result.replaces) if result.replaces else ""
    earlier = f"This rating replaces your earlier one ({replaced}). " if replaced else ""
    if result.reason == "facts":
        return (
            f"Kept your rating ({result.rating}, wrong facts). {earlier}Facts teach nothing: ratings change "
            f"how the model writes, not what it knows. {_version(result.adapter_version)}"
        )
    given = ", ".join(filter(None, (_of_five(result.rating), REASONS.get(result.reason))))
    if not result.applied:
        version = _version(result.adapter_version)
        return f"Kept your rating ({given}); it changed nothing. {earlier}{version}"
    moved = result.logprob_after - result.logprob_before
    if abs(moved) < FELT:
        effect = "; it changed next to nothing."
    elif is_against(result.rating, moved):
        wanted = "more replies like this one" if moved > 0 else "other replies than this one"
        effect = f". Your ratings together still ask for {wanted}."
    else:
        effect = f": {'more' if moved > 0 else 'less'} like this."
    return f"Learned from your rating ({given}){effect} {earlier}{_after(result)}"


def reply_line(question: str) -> str:
    """Return a sentence that says which reply the user's feedback is about. Return "" if the question is
    empty, because the store no longer has its words."""
    words = excerpt(question, [])
    end = "" if words.endswith((".", "?", "!", "…")) else "."
    return f'The reply answers "{words}"{end}' if words else ""


def _of_five(rating: str) -> str:
    """Return a rating as words: "up", or "2 of 5"."""
    return f"{rating} of 5" if rating.isdigit() else rating


def preference_line(result: "PreferenceResult") -> str:
    """Return sentences about the effect of one preference (a choice between two replies)."""
    if not result.applied:
        return f"Kept your preference; it changed nothing. {_version(result.adapter_version)}"
    learned = "Learned from your preference: more like the better one than like the other."
    return f"{learned} {_after(result)}"


def _after(result: "RatingResult | PreferenceResult") -> str:
    """Return sentences that say, after a rating or preference, how far the model is from the original model,
    and which command undoes the rating or preference."""
    return f"{_change_sentence(result.kl, result.kl_cap)}. `ruvmlx learn undo` takes it back."


def _learned_text(facts: dict[str, Any]) -> str:
    ratings, pairs, used = facts["ratings"], facts.get("preferences", 0), facts["updates"]
    if not facts["adapter_version"]:
        kept = any(facts["versions"])
        given = (
            f"{_feedback_count(ratings, pairs)} given, none in use"
            if ratings + pairs
            else "Nothing that was learned is in use"
            if kept
            else "No ratings yet"
        )
        return f"{given}: {STILL_THE_ORIGINAL}{_elsewhere(facts)}"
    if not ratings + pairs:
        used = _change_sentence(facts["kl"], facts["kl_cap"])
        return f"No ratings yet: this adapter was imported, or its ratings are gone. {used}."
    unused = ratings + pairs - used
    rest = f"; {unused} changed nothing" if unused > 0 else ""
    used = _change_sentence(facts["kl"], facts["kl_cap"])
    return (
        f"Learned from {_feedback_count(ratings, pairs)}{rest}. {used}: a limit keeps the model near the "
        "original one."
    )


def _elsewhere(facts: dict[str, Any]) -> str:
    """Return a sentence that names the model's other adapters that learned something, because the user can
    miss what these adapters learned. Return "" if there is no such adapter."""
    others = facts.get("others") or {}
    if not others:
        return ""
    name = next(iter(others))
    return (
        f" This is adapter {facts['adapter']!r}; {', '.join(others)} learned something: "
        f"`ruvmlx adapters use {name}` goes back to it."
    )


def _feedback_count(ratings: int, pairs: int) -> str:
    if not pairs:
        return _ratings(ratings)
    said = f"{pairs} preference{'' if pairs == 1 else 's'}"
    return f"{_ratings(ratings)} and {said}" if ratings else said


def _taste_line(facts: dict[str, Any]) -> str:
    """Return a sentence about the replies that the user likes, or "" if the ratings show nothing clear."""
    taste = facts.get("taste")
    if not taste or not taste["sentence"]:
        return ""
    lately = " lately" if taste["turned"] else ""
    return f"You seem to like{lately}: {taste['sentence']}."


def share_text(kl: float, cap: float) -> str:
    """Return the distance `kl` of the model from the original model in percent of the allowed distance `cap`:
    "12%", or "under 1%". The two distances are KL divergences in nats per token; cap 0: there is no limit."""
    part = kl / cap if cap else 0.0
    return "under 1%" if 0 < part < 0.01 else f"{part:.0%}"


def _change_sentence(kl: float, cap: float) -> str:
    """Return a sentence about the share of the allowed distance that is used, without a full stop."""
    part = share_text(kl, cap)
    return f"{part[0].upper()}{part[1:]} of the allowed change is used"


def _way_back(facts: dict[str, Any]) -> str:
    if not facts["adapter_version"]:
        kept = [v for v in facts["versions"] if v]
        if kept:
            between = " or " if len(kept) == 2 else " to "
            which = between.join(map(str, dict.fromkeys((min(kept), max(kept)))))
            return f"`ruvmlx learn rollback V` uses version V of the adapter again: {which}."
        return HOW_TO_RATE
    version = _version(facts["adapter_version"])
    if not facts["ratings"] + facts.get("preferences", 0):
        return f"{version} `ruvmlx learn rollback V` goes to version V (0: the original model)."
    return (
        f"{version} "
        f"`ruvmlx learn undo` takes the last {_kinds(facts, 'or')} back; "
        "`ruvmlx learn rollback V` goes to version V (0: the original model)."
    )


def nothing_in_use(facts: dict[str, Any]) -> str:
    """Return sentences for an adapter without a rating or preference in use, with the next step. Return "" if
    one is in use. facts: the facts that `learn status --json` prints."""
    if facts["ratings"] + facts["preferences"]:
        return ""
    return f"No rating is in use. {HOW_TO_RATE if facts['adapter_version'] else _way_back(facts)}"


def _version(number: int) -> str:
    return (
        f"The adapter (what was learned) is at version {number}."
        if number
        else "The original model is in use."
    )


def _training(facts: dict[str, Any]) -> str:
    """Return sentences about the background learning, which is the slow loops. The sentences tell how
    many results were put into use, the newest result, and how many ratings wait."""
    from ruvmlx.sona.adapter_history import MINIMUM

    done, waiting, said = facts["consolidations"], facts["pending"], list[str]()
    # If no result of a training is in use, all usable ratings and preferences wait.
    given = facts["ratings"] + facts.get("preferences", 0) if done else waiting
    if done:
        said.append(f"The background learning changed the model {_times(done)}.")
    if facts.get("promoted") is not None and facts.get("reason"):
        outcome = "is in use" if facts["promoted"] else "is not in use"
        said.append(f"The newest result of the background learning {outcome}: {facts['reason']}.")
    if waiting and given < MINIMUM:
        said.append(
            f"The background learning reads all ratings together. It needs {MINIMUM} ratings or preferences; "
            f"you have {given}. Then `ruvmlx learn consolidate` starts it. The side panel of the chat (F2) "
            "says after how many more the chat starts it in your pauses."
        )
    elif waiting and facts.get("promoted") is False:
        said.append("The background learning tries again after some more ratings.")
    elif waiting:
        if facts.get("preferences"):
            what = f"{waiting} {_kinds(facts, 'and', 's')} wait"
        else:
            what = f"{_ratings(waiting)} {'waits' if waiting == 1 else 'wait'}"
        said.append(f"{what} for the background learning: `ruvmlx learn consolidate` starts it now.")
    return " ".join(said)


def _kinds(facts: dict[str, Any], between: str, ending: str = "") -> str:
    """Return "rating", or "rating or preference" if the user has given preferences too.

    between: the word between the two nouns. ending: the ending of both nouns, for example "s".
    """
    return f"rating{ending} {between} preference{ending}" if facts.get("preferences") else f"rating{ending}"


def _ratings(count: int) -> str:
    return f"{count} rating{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

"""This module describes the tiers of the KV cache in words, for the command `ruvmlx learn kv`. The KV cache
is what the model has read of a chat."""

from typing import Any

from ruvmlx.kv.policy import EVERYTHING
from ruvmlx.text import size
from ruvmlx.tiers import LENGTHS, TIERS

from .text_output import count, say


def kv_facts(status: Any) -> dict[str, Any]:
    """Return the facts about the tiers (storage precisions) of the KV cache. The lengths of tiers are numbers
    of tokens; None means all tokens."""
    known = status.report or {}
    return {
        "backend": status.backend,
        "policy": _lengths(status.policy.lengths_by_name()),
        "asked": status.asked,
        "reason": status.reason,
        "long_replies": status.long_replies,
        "long_is": status.needed_tokens,
        "candidates": [_lengths(c) for c in known.get("candidates", [])],
        "observed": [_lengths(o) for o in status.observed],
    } | {k: known.get(k) for k in ("context", "budget", "limit", "pressed")}


def _lengths(facts: dict[str, Any]) -> dict[str, Any]:
    short = {k: None if facts[k] >= EVERYTHING else facts[k] for k in LENGTHS}
    return facts | short


def show_kv(facts: dict[str, Any]) -> None:
    """Print the facts about the tiers of the KV cache for people, with explanations of the figures."""
    say("The KV cache is what the model has read of a chat. Fewer bits for a number save memory.")
    say(f"In use: {_tiers_in_words(facts['policy'])}.")
    say(f"Why: {facts['reason']}.")
    if facts["asked"] or facts["policy"]["hot"] is not None:
        _say_what_can_be_measured(facts)
    for c in facts["candidates"]:
        say(
            f"Measured: {_tiers_in_words(c)}. It changes what the model says by {c['kl']:.5f}, at most by "
            f"{c['upper']:.5f} (KL, in nats a token; 0 is no change; {c['tokens']:,} tokens of "
            f"{count(c['replies'], 'reply', 'replies')}). It takes {c['latency']:.2f} of the time of 16 "
            f"bits, and {size(c['bytes'])} for {facts['context']:,} tokens."
        )
    for o in facts["observed"]:
        pace = f"; a token took {o['us_per_token'] / 1e3:.1f} ms" if o["us_per_token"] else ""
        replies = count(o["replies"], "reply", "replies")
        say(f"{replies} used {_tiers_in_words(o)}. The longest chat had {o['longest']:,} tokens{pace}.")


def _say_what_can_be_measured(facts: dict[str, Any]) -> None:
    replies = count(facts["long_replies"], "long reply", "long replies")
    say(
        f"A long reply is one in a chat of {facts['long_is']:,} tokens or more. Only such a chat has enough "
        "tokens of each age to compare the bits. "
        f"There {'is' if facts['long_replies'] == 1 else 'are'} {replies} so far."
    )
    if facts["long_replies"]:
        say("`ruvmlx learn kv --measure` measures now.")
    say("After `ruvmlx config set kv_measure on`, the chat makes these measurements in your pauses.")


def _tiers_in_words(lengths: dict[str, Any]) -> str:
    """Return the tiers as words, as in "16 bits for the newest 256 tokens, 8 back to the 1,024th newest, 4
    for older ones"."""
    exact = f"{TIERS[-1].bits} bits for"
    if lengths[LENGTHS[0]] is None:
        return f"{exact} all tokens"
    said = f"{exact} the newest {lengths[LENGTHS[0]]:,} tokens"
    for tier in reversed(TIERS[1:-1]):
        if lengths[tier.name] is None:
            return f"{said}, {tier.bits} for all others"
        said += f", {tier.bits} back to the {lengths[tier.name]:,}th newest"
    return f"{said}, {TIERS[0].bits} for older ones"

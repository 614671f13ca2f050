"""This module is the KV cache suite of `ruvmlx bench`. The suite compares a tiered KV cache (old pages with
fewer bits) with an f16 cache in bytes, peak memory, speed and quality, and with llama.cpp's caches in speed.
The suite also measures chats that are resumed from disk."""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pydoc_data.topics import topics
from typing import Any

from ruvmlx.kv.policy import TIERED
from ruvmlx.tiers import LENGTHS, TIERS

from .model import NEW, prompt
from .peers import Peers
from .rows import Row, at_most, median_row, round_digits
from .stage import OnStage, take_turns

SHORT = 256  # the number of tokens of the short context
DECODED = 32  # the number of tokens that a turn decodes; in two turns, one KV page is converted to fewer bits
READ_AGAIN = 4  # the maximum number of rounds of the resume measurement; each round takes seconds
USUAL, TIGHT_LENGTHS = TIERED.lengths, (64,) * len(TIERED.lengths)
COST = 0.4, 0.004  # the limits for the default tiers: of the rise of perplexity in %, and of the KL in nats
LEAVING = 300  # ms; the limit for the time to write a chat's cache to disk when the chat ends
TARGET_SPEED_RATIO = 2.5  # the target for ruvmlx's speed divided by llama.cpp's speed, in a long context
# tokens; for contexts of at least this length, a target limits the cache's bytes to a share of an f16
# cache's bytes
FAR = 4096


def run(
    ours: Mapping[str, OnStage], peers: Peers, long: int, rounds: int, log: Callable[[str], None]
) -> list[Row]:
    """Run the suite, and return its rows of the report.

    ours: the keys are "tiered" and "f16"; the value is the player (a runtime in a separate process,
        players.py) that runs ruvmlx with this cache
    peers: the other runtimes
    long: the number of tokens of the long context
    """
    rows = _memory(ours, long, log)
    for lengths, tokens in ((USUAL, long), (TIGHT_LENGTHS, long // 2)):
        rows += _quality(ours["tiered"], tokens, lengths)
    log(f"perplexity and KL over {long} tokens: measured")
    rows += _resuming(ours["tiered"], long, min(rounds, READ_AGAIN))
    log(f"a chat of {long} tokens, resumed and read again: measured")
    rows += _rows(SHORT, _speeds(ours, SHORT, 4 * rounds))
    log(f"decode at {SHORT}: measured")
    with peers.on_stage(long + DECODED * (rounds + 2), caches=True) as others:
        rates = _speeds({**ours, **others}, long, rounds)
    log(f"decode at {long}: measured")
    best = _best(rates)
    against = [_against(long, rates, best, TARGET_SPEED_RATIO, "llama.cpp")] if best else []
    return [*rows, *_rows(long, rates), *against]


def _memory(ours: Mapping[str, OnStage], tokens: int, log: Callable[[str], None]) -> list[Row]:
    """Measure the bytes of the KV cache after a prompt, and the growth of memory to its peak during the
    prefill. Return the rows."""
    peaks = {}
    for kv, player in ours.items():
        player.call("forget_peak")
        before = player.call("resident")
        player.call("fill", prompt(tokens))
        peaks[kv] = (player.call("peak") - before) / 1e6
        log(f"{kv}: {tokens} tokens read")
    held = ours["tiered"].call("kv")
    share = held["bytes"] / held["f16_bytes"]
    tiers = ", ".join(f"{held[f'{tier.name}_tokens']} {tier.name}" for tier in reversed(TIERS))
    note = f"{held['bytes'] / 1e6:.1f} of {held['f16_bytes'] / 1e6:.1f} MB; {tiers}"
    half = f"cache at {tokens}: share of f16"
    reading = f"peak memory of reading {tokens}: tiered"
    return [
        at_most(half, share, "", 0.45, note)
        if tokens >= FAR
        else Row(half, round_digits(share), "", note=note),
        at_most(reading, peaks["tiered"], "MB", round(peaks["f16"], 1), "target: f16"),
    ]


def _quality(ours: OnStage, tokens: int, lengths: tuple[int, ...]) -> list[Row]:
    """Measure the quality of a tiered cache compared with an f16 cache: its perplexity and KL on Python's
    reference manual. Return the rows.

    lengths: the ages in tokens at which KV pages leave each tier for the next lower tier; only the default
        lengths have a target
    """
    found = ours.call("quality", "\n\n".join(topics[name] for name in sorted(topics)), tokens, *lengths)
    named = ", ".join(f"{name} {age}" for name, age in zip(LENGTHS, lengths, strict=True))
    policy = f"{named}, {tokens} tokens"
    note = f"{found['share']:.0%} of f16's bytes; no tier below {found['bits']} bits"
    usual = lengths == USUAL
    rows = (
        ("perplexity over f16's", 100 * found["change"], "%", COST[0]),
        ("KL to f16", found["kl"], "nats", COST[1]),
    )
    return [
        at_most(f"{name}: {policy}", value, unit, most, note)
        if usual
        else Row(f"{name}: {policy}", round_digits(value), unit, note=note, better="lower")
        for name, value, unit, most in rows
    ]


def _resuming(ours: OnStage, tokens: int, rounds: int) -> list[Row]:
    """Measure the time to the first token in a chat that was closed: with the chat's KV cache from disk, and
    with a new prefill of all tokens. Return the rows. The cache's file is still in memory (in the system's
    page cache), as it is just after a chat was closed."""
    known, whole = prompt(tokens), prompt(tokens + NEW)
    ours.call("fill", known)
    kept, resumed, again = [], [], []
    with tempfile.TemporaryDirectory(prefix="ruvmlx-bench-") as folder:
        for _ in range(rounds):
            kept.append(1e3 * ours.call("keep", folder, known))
            resumed.append(1e3 * ours.call("resume", folder, whole, tokens))
            again.append(1e3 * ours.call("first", whole, 0))
    name = f"first token after {tokens}"
    ratios = [a / b for a, b in zip(resumed, again, strict=True)]
    lower: dict[str, Any] = {"better": "lower"}
    return [
        median_row(f"{name}: resumed from disk", resumed, "ms", **lower),
        median_row(f"{name}: read again", again, "ms", **lower),
        median_row(f"{name}: resumed / read again", ratios, "x", 0.1, **lower),
        median_row(f"cache of {tokens} written to disk", kept, "ms", LEAVING, **lower),
    ]


def _speeds(players: Mapping[str, OnStage], context: int, rounds: int) -> dict[str, list[float]]:
    """Return {player: the tokens a second of each of its turns}. A turn decodes DECODED tokens. The first
    turn begins after a context of `context` tokens; the decoded tokens stay in the cache, so the context
    grows."""
    for player in players.values():
        player.call("fill", prompt(context))
    everyone = dict(players)
    turns = take_turns(everyone, lambda p: statistics.mean(p.call("go_on", prompt(DECODED))), rounds)
    return {name: [1 / s for s in times] for name, times in turns.items()}


def _rows(context: int, rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return a row of the speed of each player, and a row that compares the tiered cache with the f16
    cache."""
    name = f"decode at {context}"
    return [
        *(median_row(f"{name}: {player}", turns, "tok/s") for player, turns in rates.items()),
        _against(context, rates, "f16", 1.0, "f16"),
    ]


def _best(rates: Mapping[str, Sequence[float]]) -> str | None:
    others = {k: statistics.median(turns) for k, turns in rates.items() if k.startswith("llama.cpp")}
    return max(others, key=lambda name: others[name]) if others else None


def _against(
    context: int, rates: Mapping[str, Sequence[float]], other: str, target: float, called: str
) -> Row:
    """Return the row of the tiered cache's speed divided by the speed of `other`, turn by turn."""
    ratios = [a / b for a, b in zip(rates["tiered"], rates[other], strict=True)]
    note = "" if other == called else f"its best: {other}"
    return median_row(f"decode at {context}: tiered / {called}", ratios, "x", target, note=note)

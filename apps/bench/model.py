"""This module is the model suite of `ruvmlx bench`. The suite measures the time to the first token, the speed
of prefill and the speed of decoding. In a turn, each player (players.py) is measured once. The players are
ruvmlx, other runtimes, and two programs that show the machine's limits."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .machine import Limits
from .peers import NAMES, Peers
from .rows import Row, at_most, left_out, median_row
from .stage import OnStage, take_turns

DECODED = 24  # the number of tokens that a turn decodes
PROMPT = 256  # the number of tokens of a prompt
NEW = 16  # the number of tokens of a question after a cached prefix
REPLY = 200  # the number of tokens of each reply in `best_of`
STREAMED = 32 << 20  # bytes; larger weights do not fit into caches, so the speed of memory limits decoding
# The targets for ruvmlx's speed / llama.cpp's speed: of prefill, of decoding at a context of 256 tokens, and
# of decoding at longer contexts.
TARGET_SPEED_RATIOS = {"prefill": 2.5, 256: 1.8}
LONG_CONTEXT_RATIO = 1.5

Turns = Mapping[str, Sequence[float]]


def prompt(n: int) -> list[int]:
    """Return a prompt of n token ids, which are the same at every call. The ids are under 256, because ids
    under 256 exist in every vocabulary."""
    return [(i * 7919 + 13) % 200 + 50 for i in range(n)]


def run(
    ours: OnStage,
    memory: OnStage,
    products: OnStage,
    peers: Peers,
    limits: Limits,
    contexts: Sequence[int],
    rounds: int,
    log: Callable[[str], None],
) -> list[Row]:
    """Run the suite, and return its rows of the report.

    memory, products: the players of the machine's limits. In the same turns, `memory` only reads as many
        bytes as the weights have, and `products` only multiplies.
    limits: the machine's limits
    contexts: the numbers of tokens in the cache at which the speed of decoding is measured
    """
    rows = _reading(ours, products, peers, limits, rounds)
    log("prefill and time to the first token: measured")
    for context in contexts:
        if context + DECODED * 2 > ours.facts["max_context"]:
            rows.append(left_out(f"decode at {context}: ours", "tok/s", "the model's context is shorter"))
            continue
        rows += _decode(ours, memory, peers, context, rounds)
        log(f"decode at {context}: measured")
    return rows + [left_out(f"beside {name}", "x", why) for name, why in peers.absent.items()]


def _reading(ours: OnStage, products: OnStage, peers: Peers, limits: Limits, rounds: int) -> list[Row]:
    with peers.on_stage(1024) as others:
        players = {"ours": ours, "products": products} | others
        rows = []
        for known, fresh in ((0, PROMPT), (PROMPT, NEW)):
            turns = take_turns(players, partial(_first_token, known, fresh), rounds)
            rows += _first(known, fresh, turns)
        return rows + _prefill(
            take_turns(players, lambda p: p.call("prefill", prompt(PROMPT)), rounds), ours, limits
        )


def _first_token(known: int, fresh: int, player: OnStage) -> float:
    return player.call("first", prompt(known + fresh), known)


def _first(known: int, fresh: int, turns: Turns) -> list[Row]:
    name = f"time to first token, {f'{known} cached and ' if known else ''}{fresh} new"
    rows = []
    for player, seconds in turns.items():
        own: dict[str, Any] = {
            "condition": "cached prefix" if known else "cold",
            "reference": tuple(turns["products"]),
            "target": 50,
        }
        if player != "products":
            ms = [1e3 * s for s in seconds]
            rows.append(
                median_row(f"{name}: {player}", ms, "ms", better="lower", **(own if player == "ours" else {}))
            )
    return rows


def _prefill(turns: Turns, ours: OnStage, limits: Limits) -> list[Row]:
    """Return the rows of prefill. The limit in ruvmlx's row is the speed at which the machine computes one
    8-bit product for each token and each weight that a token of a prompt needs."""
    limit = {"ours": limits.products / ours.facts["prompt_weights"]}
    rates = {name: [PROMPT / s for s in seconds] for name, seconds in turns.items()}
    name, reference = f"prefill {PROMPT}", [1 / s for s in turns["products"]]
    del rates["products"]
    return [*_speeds(name, rates, limit, reference), *ratios(name, rates, TARGET_SPEED_RATIOS["prefill"])]


def _decode(ours: OnStage, memory: OnStage, peers: Peers, context: int, rounds: int) -> list[Row]:
    """Measure decoding, and return its rows. The limit in ruvmlx's row is the speed at which the player
    `memory`, in the same turns, would read the weights and the KV cache once for each token. Weights of less
    than STREAMED bytes have no limit."""
    with peers.on_stage(context + 2 * DECODED, caches=context > PROMPT) as others:
        players = {"ours": ours, "memory": memory} | others
        for name, player in players.items():
            if name != "memory":
                player.call("fill", prompt(context))
        seconds = take_turns(players, decode_turn, rounds)
    rates = {name: [1 / s for s in turns] for name, turns in seconds.items()}
    weights = ours.facts["weights_bytes"]
    part = weights / (weights + ours.call("kv")["bytes"])
    reading = [part * rate for rate in rates.pop("memory")]
    name = f"decode at {context}"
    limits = {"ours": statistics.median(reading)} if weights >= STREAMED else {}
    rows = _speeds(name, rates, limits, reading, 100.0 if context == PROMPT else None)
    if limits:
        shares = [a / b for a, b in zip(rates["ours"], reading, strict=True)]
        most = 0.75 if context == PROMPT else None
        rows.append(median_row(f"{name}: share of memory bandwidth", shares, "", most, limit=1.0))
    return rows + ratios(name, rates, TARGET_SPEED_RATIOS.get(context, LONG_CONTEXT_RATIO))


def decode_turn(player: OnStage) -> float:
    """Let a player decode DECODED tokens, and return the median seconds per token."""
    return statistics.median(player.call("decode", prompt(DECODED)))


def _speeds(
    name: str,
    rates: Turns,
    limits: Mapping[str, float],
    reference: Sequence[float] = (),
    target: float | None = None,
) -> list[Row]:
    """Return a row of the speed of each player. The row of ruvmlx also has the target, and the reference,
    which is the speed of the machine in the same turns.

    rates: {player: tokens a second in each turn}
    limits: {player: the largest speed that the machine allows}
    """
    rows = []
    for player, turns in rates.items():
        own: dict[str, Any] = {"limit": limits.get(player)}
        if player == "ours":
            own |= {"target": target, "reference": tuple(reference)}
        rows.append(median_row(f"{name}: {player}", turns, "tok/s", **own))
    return rows


def ratios(name: str, rates: Turns, target: float) -> list[Row]:
    """Return a row for each peer (another runtime): ruvmlx's speed divided by the speed of the peer's best
    setting, turn by turn. The note names this setting, because the best setting can differ from run to
    run."""
    rows = []
    for kind in NAMES:
        others = {
            player: statistics.median(turns) for player, turns in rates.items() if player.startswith(kind)
        }
        if others:
            best = max(others, key=lambda player: others[player])
            ratios = [a / b for a, b in zip(rates["ours"], rates[best], strict=True)]
            wanted, note = target if kind == "llama.cpp" else None, f"its best: {best}"
            rows.append(median_row(f"{name}: ours / {kind}", ratios, "x", wanted, note=note))
    return rows


def best_of(ours: OnStage, rounds: int) -> Row:
    """Measure the time to write four replies in one batch, divided by the time to write one reply. Return the
    row. Both times include the prefill, and both are measured in every round. The row's note has the median
    time of each part of the work."""
    name = f"best of 4, {REPLY} tokens at {PROMPT}: / one reply"
    if ours.facts["max_context"] < PROMPT + REPLY:
        return left_out(name, "x", "the model's context is shorter")
    turns = {"four": list[dict[str, float]](), "one": list[dict[str, float]]()}
    for _ in range(rounds):
        for who, count in (("four", 4), ("one", 1)):
            turns[who].append(ours.call("best_of", prompt(PROMPT), count, REPLY))
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(turns["four"], turns["one"], strict=True)]
    note = "; ".join(f"{who}: {_parts(seconds)}" for who, seconds in turns.items())
    return median_row(name, ratios, "x", 1.6, better="lower", note=note)


def _parts(turns: Sequence[Mapping[str, float]]) -> str:
    """Return in words the median times of the parts of the work that `Ruvmlx.best_of` (players.py) measures.
    The part "the rest" is the time of sampling, of the recording of traces and of the making of text."""
    whole, read, decode = (
        1e3 * statistics.median(t[part] for t in turns) for part in ("seconds", "prompt", "decode")
    )
    rest = (whole - read - decode) / REPLY
    return f"prompt {read:.0f} ms, a step {decode / REPLY:.2f} ms, the rest of a token {rest:.2f} ms"


def resident(ours: OnStage) -> Row:
    """Return the row of the resident memory of ruvmlx's process after the measurements. The target is the
    project's limit for weights of this size."""
    held, weights = ours.call("resident"), ours.facts["weights_bytes"]
    note = f"weights {weights / 1e6:.0f} MB"
    return at_most("resident memory", held / 1e6, "MB", 1.1 * weights / 1e6 + 300, note)

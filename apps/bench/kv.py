"""The KV cache suite: tiers against f16, in bytes, peak memory and speed, next to llama.cpp's caches."""

import statistics
from collections.abc import Callable

from .model import LLAMA_LONG, join, prompt
from .rows import Row, at_most
from .stage import OnStage, spread, take_turns

SHORT = 256
DECODED = 32  # tokens a turn; two turns meet one demotion


def run(
    model: str | None,
    path: str,
    backend: str,
    threads: int,
    peers: bool,
    long: int,
    rounds: int,
    log: Callable[[str], None],
) -> list[Row]:
    """All rows of the suite. long: tokens of the long context."""
    ours = {
        kv: OnStage("ruvmlx", model=model, backend=backend, threads=threads, kv=kv)
        for kv in ("tiered", "f16")
    }
    try:
        rows = _memory(ours, long, log)
        rows += _rows(SHORT, _speeds(dict(ours), SHORT, 4 * rounds, log))
        rows += _long(ours, path, threads, peers, long, rounds, log)
    finally:
        for player in ours.values():
            player.leave()
    return rows


def _memory(ours: dict[str, OnStage], tokens: int, log: Callable[[str], None]) -> list[Row]:
    """What a prompt leaves in memory, and the most it took on the way, above what was there before."""
    peaks = {}
    for kv, player in ours.items():
        player.call("forget_peak")
        before = player.call("resident")
        player.call("fill", prompt(tokens))
        peaks[kv] = (player.call("peak") - before) / 1e6
        log(f"{kv}: {tokens} tokens read")
    held = ours["tiered"].call("kv")
    share = held["bytes"] / held["f16_bytes"]
    tiers = ", ".join(f"{held[f'{tier}_tokens']} {tier}" for tier in ("hot", "warm", "cold"))
    note = f"{held['bytes'] / 1e6:.1f} of {held['f16_bytes'] / 1e6:.1f} MB; {tiers}"
    return [
        at_most(f"cache at {tokens}: share of f16", share, "", 0.45, note),
        at_most(
            f"peak memory of reading {tokens}: tiered", peaks["tiered"], "MB", peaks["f16"], "target: f16"
        ),
    ]


def _long(ours, path: str, threads: int, peers: bool, context: int, rounds: int, log) -> list[Row]:
    players, note = dict(ours), ""
    for name, settings in LLAMA_LONG.items():
        room = context + DECODED * (rounds + 2)
        note = join(players, name, peers, model=path, threads=threads, context=room, **settings)
    try:
        rates = _speeds(players, context, rounds, log)
    finally:
        for name in players.keys() - ours.keys():
            players[name].leave()
    rows = _rows(context, rates)
    others = {name: statistics.median(turns) for name, turns in rates.items() if name not in ours}
    if others:
        best = max(others, key=lambda name: others[name])
        return [*rows, _against(context, rates, best, 2.5)]
    return [*rows, Row(f"decode at {context}: tiered / llama.cpp", None, "x", 2.5, None, None, note)]


def _speeds(players: dict[str, OnStage], context: int, rounds: int, log) -> dict[str, list[float]]:
    """Tokens per second of each turn, decoding on behind `context` tokens."""
    for player in players.values():
        player.call("fill", prompt(context))
    turns = take_turns(players, lambda p: statistics.mean(p.call("go_on", prompt(DECODED))), rounds)
    log(f"decode at {context} measured")
    return {name: [1 / s for s in times] for name, times in turns.items()}


def _rows(context: int, rates: dict[str, list[float]]) -> list[Row]:
    """A row for each player, then tiered against f16."""
    rows = [
        Row(f"decode at {context}: {name}", round(statistics.median(turns), 1), "tok/s")
        for name, turns in rates.items()
    ]
    return [*rows, _against(context, rates, "f16", 1.0)]


def _against(context: int, rates: dict[str, list[float]], other: str, target: float) -> Row:
    """Tiered against one of them, turn by turn; missed only by more than the turns' own spread."""
    ratios = [a / b for a, b in zip(rates["tiered"], rates[other], strict=True)]
    ratio, wide = statistics.median(ratios), spread(ratios)
    met = ratio * (1 + wide) >= target
    name = f"decode at {context}: tiered / {other}"
    return Row(name, round(ratio, 3), "x", target, None, met, f"spread {100 * wide:.1f}%")

"""The model suite: prefill and decode next to llama.cpp and to the machine's memory, in turns."""

import statistics
from collections.abc import Callable
from typing import Any

from ruvmlx.errors import RuvmlxError

from .rows import Row
from .stage import OnStage, spread, take_turns

DECODED = 24  # tokens a turn
LLAMA_LONG = {
    "llama.cpp": {},
    "llama.cpp flash": {"flash": True},
    "llama.cpp flash q8_0": {"flash": True, "kv": "q8_0"},
}


def prompt(n: int) -> list[int]:
    """n token ids, the same on every call; ids under 256 exist in every vocabulary."""
    return [(i * 7919 + 13) % 200 + 50 for i in range(n)]


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
    """All rows of the suite. long: context of the long decode test, 0 leaves it out."""
    ours = OnStage("ruvmlx", model=model, backend=backend, threads=threads)
    rows = [Row("load", round(ours.facts["load_s"], 3), "s", 30.0, None, ours.facts["load_s"] < 30)]
    try:
        log(f"{ours.facts['name']}: {ours.facts['kernels']}")
        rows += _short(ours, path, threads, peers, rounds, log)
        if long:
            rows += _long(ours, path, threads, peers, long, rounds, log)
        rows.append(_resident(ours))
    finally:
        ours.leave()
    return rows


def _short(ours: OnStage, path: str, threads: int, peers: bool, rounds: int, log) -> list[Row]:
    """Prefill of 256 tokens; decode at 256 tokens of context."""
    players = {"ours": ours, "memory": OnStage("memory", nbytes=ours.facts["weights_bytes"], threads=threads)}
    note = join(players, "llama.cpp", peers, model=path, threads=threads, context=1024)
    try:
        reading = {k: v for k, v in players.items() if k != "memory"}
        prefill = take_turns(reading, lambda p: p.call("prefill", prompt(256)), rounds)
        log("prefill measured")
        for player in reading.values():
            player.call("fill", prompt(256))
        decode = take_turns(players, _decode, rounds)
        log("decode measured")
    finally:
        leave(players, ours)
    rows = _speed_rows("prefill 256", {k: [256 / s for s in v] for k, v in prefill.items()}, 2.5, note)
    return rows + _speed_rows("decode at 256", _rates(decode), 1.8, note)


def _long(ours: OnStage, path: str, threads: int, peers: bool, context: int, rounds: int, log) -> list[Row]:
    """Decode far into a context, against each of llama.cpp's settings."""
    players, note = {"ours": ours}, ""
    for name, settings in LLAMA_LONG.items():
        note = join(players, name, peers, model=path, threads=threads, context=context + 256, **settings)
    try:
        for name, player in players.items():
            player.call("fill", prompt(context))
            log(f"{name}: {context} tokens read")
        decode = take_turns(players, _decode, rounds)
    finally:
        leave(players, ours)
    return _speed_rows(f"decode at {context}", _rates(decode), 1.5, note)


def _decode(player: OnStage) -> float:
    """Median seconds a token of one turn."""
    return statistics.median(player.call("decode", prompt(DECODED)))


def _rates(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [1 / s for s in turns] for name, turns in seconds.items()}


def join(players: dict[str, OnStage], name: str, wanted: bool, **settings: Any) -> str:
    """Bring llama.cpp in; the reason when it stays out."""
    if not wanted:
        return "llama.cpp left out: not asked for"
    try:
        players[name] = OnStage("llama.cpp", **settings)
    except RuvmlxError as e:
        return f"left out: {e}"
    return ""


def leave(players: dict[str, OnStage], ours: OnStage) -> None:
    for player in players.values():
        if player is not ours:
            player.leave()


def _speed_rows(name: str, rates: dict[str, list[float]], target: float, note: str) -> list[Row]:
    """A row for each player, then our ratios to the best llama.cpp and to the memory limit."""
    medians = {player: statistics.median(turns) for player, turns in rates.items()}
    limit = medians.get("memory")
    rows = [
        Row(
            f"{name}: {player}",
            round(value, 1),
            "tok/s",
            None,
            round(limit, 1) if limit else None,
            None,
            f"spread {100 * spread(rates[player]):.0f}%",
        )
        for player, value in medians.items()
        if player != "memory"
    ]
    peers = {p: v for p, v in medians.items() if p.startswith("llama.cpp")}
    if peers:
        best = max(peers, key=lambda p: peers[p])
        ratios = [a / b for a, b in zip(rates["ours"], rates[best], strict=True)]
        ratio = statistics.median(ratios)
        rows.append(Row(f"{name}: ours / {best}", round(ratio, 2), "x", target, None, ratio >= target))
    elif note:
        rows.append(Row(f"{name}: ours / llama.cpp", None, "x", target, None, None, note))
    if limit:
        share = statistics.median(a / b for a, b in zip(rates["ours"], rates["memory"], strict=True))
        rows.append(Row(f"{name}: share of memory bandwidth", round(share, 3), "", 0.75, 1.0, share >= 0.75))
    return rows


def _resident(ours: OnStage) -> Row:
    """Resident memory after a context was read, against the weights' own size."""
    resident, weights = ours.call("resident"), ours.facts["weights_bytes"]
    return Row(
        "resident memory", round(resident / 1e6, 1), "MB", None, None, None, f"weights {weights / 1e6:.1f} MB"
    )

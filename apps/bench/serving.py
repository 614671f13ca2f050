"""This module is the serving suite of `ruvmlx bench`. The suite measures requests in parallel (with ruvmlx
and with llama.cpp), requests with different adapters, and the delay of a reply when a long prompt arrives.
When ruvmlx is compared with llama.cpp, each of the two players (players.py) is measured once in a turn."""

from collections.abc import Callable

from .model import prompt, ratios
from .peers import Peers
from .rows import Row, left_out, median_row
from .stage import OnStage, take_turns

COUNTS = (2, 4, 8)  # the numbers of requests in parallel
PROMPT, REPLY = 64, 96  # the numbers of tokens of each request's prompt and of its reply
RUNNING, ARRIVING = 128, 4096  # the numbers of prompt tokens of a running reply and of the arriving request
# targets for eight requests at once: their rate / the rate of one request, their rate / llama.cpp's rate
EIGHT, BESIDE = 3.0, 1.5
ADAPTERS, DELAY = 1.1, 100.0  # targets: time with eight adapters / time with one adapter; delay in ms


def run(ours: OnStage, peers: Peers, rounds: int, quick: bool, log: Callable[[str], None]) -> list[Row]:
    rows = _parallel(ours, rounds)
    log("parallel requests: measured")
    rows += _peer_rows(ours, peers, rounds)
    log("parallel requests beside others: measured")
    rows.append(_adapters(ours, rounds))
    log("adapters: measured")
    return [*rows, *_arriving(ours, 2 if quick else 4, 1024 if quick else ARRIVING)]


def _rate(ours: OnStage, count: int, adapters: int = 1) -> dict[str, float]:
    return ours.call("in_parallel", _prompts(count), REPLY, adapters)


def _prompts(count: int) -> list[list[int]]:
    """Return `count` different prompts. The prompts differ, so that no request can use the KV cache of
    another request."""
    return [_rotate(prompt(PROMPT), i) for i in range(count)]


def _rotate(tokens: list[int], n: int) -> list[int]:
    return tokens[n:] + tokens[:n]


def _parallel(ours: OnStage, rounds: int) -> list[Row]:
    """Measure the tokens per second of all requests in parallel together, and return the rows. Each round
    measures one request alone, then several requests at once."""
    turns = [{count: _rate(ours, count) for count in (1, *COUNTS)} for _ in range(rounds)]
    rows = [median_row("one request", [turn[1]["rate"] for turn in turns], "tok/s")]
    for count in COUNTS:
        ratios = [turn[count]["rate"] / turn[1]["rate"] for turn in turns]
        share = sorted(turn[count]["decode"] for turn in turns)[rounds // 2]
        note = (
            f"{share:.0%} of the time in the backend's steps; the rest draws, records traces and writes text"
        )
        target = EIGHT if count == 8 else None
        rows.append(median_row(f"{count} requests: total rate / one request", ratios, "x", target, note=note))
    return rows


def _peer_rows(ours: OnStage, peers: Peers, rounds: int) -> list[Row]:
    """Measure the tokens per second of eight requests together with ruvmlx and with llama.cpp, in turns.
    Return the rows. ruvmlx also samples, records traces and writes text; llama.cpp only decodes."""
    count = COUNTS[-1]
    with peers.in_parallel(count, PROMPT + REPLY + count) as others:
        if not others:
            return [left_out("beside llama.cpp", "x", peers.absent["llama.cpp"])]
        players = {"ours": ours} | others
        turns = take_turns(players, lambda p: p.call("in_parallel", _prompts(count), REPLY), rounds)
    name = f"{count} requests: total rate"
    rates = {player: [turn["rate"] for turn in found] for player, found in turns.items()}
    rows = [median_row(f"{name}: {player}", found, "tok/s") for player, found in rates.items()]
    return [*rows, *ratios(name, rates, BESIDE)]


def _adapters(ours: OnStage, rounds: int) -> Row:
    """Measure the time of a token with eight adapters divided by the time with one adapter, in turns. Return
    the row."""
    ratios = []
    for _ in range(rounds):
        one, eight = (_rate(ours, 8, adapters)["rate"] for adapters in (1, 8))
        ratios.append(one / eight)
    return median_row("8 requests, 8 adapters: time / one adapter", ratios, "x", ADAPTERS, better="lower")


def _arriving(ours: OnStage, rounds: int, tokens: int) -> list[Row]:
    name = f"{tokens} tokens arrive: delay of a running reply"
    if ours.facts["max_context"] < tokens + 4:
        return [left_out(name, "ms", "the model's context is shorter")]
    # Each turn has another prompt, because a prompt that was read before is in the KV cache.
    turns = [ours.call("arrive", prompt(RUNNING), _rotate(prompt(tokens), 1 + i)) for i in range(rounds)]
    longest = [1e3 * (turn["most"] - turn["plain"]) for turn in turns]
    usual = [1e3 * (turn["median"] - turn["plain"]) for turn in turns]
    plain = 1e3 * turns[0]["plain"]
    note = f"beyond a plain step of {plain:.1f} ms"
    first = [turn["first"] for turn in turns]
    return [
        median_row(f"{name}, the longest", longest, "ms", DELAY, better="lower", note=note),
        median_row(f"{name}, the median", usual, "ms", better="lower", note=note),
        median_row(f"{tokens} tokens arrive: its first token", first, "s", better="lower"),
    ]

"""How much of the evidence of earlier ratings each new rating should remove: the instant loop's FADE.

    python -m tests.research.fade_sweep OUT.jsonl --fades 0,0.005,0.02,0.1 --jobs 2

The instant loop (ruvmlx/sona/instant.py) adds up the evidence of all ratings. At each rating, it multiplies
the sum by 1 - FADE. A sum of gradients that fades so is the velocity of momentum descent with the momentum
1 - FADE (Polyak 1964). So the sweep of FADE is the sweep of the momentum.

Drawn users (apps/prove/drawn_users.py) rate replies. After 10, 30 and 100 ratings, the model answers unseen
questions. The table has the mean win-rate against the untouched model for each FADE and checkpoint. It also
has the mean difference to the FADE of the program, with its standard error over users. The file OUT.jsonl has
one line for each user, FADE and seed. A second run with the same file continues it.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ruvmlx.apps.cli.options import resolve
from ruvmlx.apps.cli.prove import open_bench
from ruvmlx.apps.prove import prompts
from ruvmlx.apps.prove.as_chat import ChatSetup
from ruvmlx.apps.prove.drawn_trial import DrawnSetup, FrozenReplies, run
from ruvmlx.apps.prove.drawn_users import DrawnUser
from ruvmlx.apps.prove.processes import Workers
from ruvmlx.apps.prove.statistics import win_rate
from ruvmlx.apps.prove.trial import Bench

from ruvmlx.sona import instant

CHECKPOINTS = (10, 30, 100)
MAX_TOKENS, TEMPERATURE = 96, 0.7


@dataclass(frozen=True)
class SweepPart:
    """The trials of some users with one FADE and one seed, which one process runs as one batch."""

    users: Sequence[int]
    fade: float
    seed: int
    frozen: FrozenReplies
    scale: FrozenReplies
    setup: DrawnSetup


def run_part(bench: Bench, part: SweepPart) -> list[dict[str, Any]]:
    usual, instant.FADE = instant.FADE, part.fade
    try:
        users = [DrawnUser.draw(number, False) for number in part.users]
        found = run(bench, part.setup, users, part.seed, part.frozen, part.scale, lambda _: None)
        return [
            {"user": facts["user"], "fade": part.fade, "seed": part.seed, "wins": _wins(facts)}
            for facts in found
        ]
    finally:
        instant.FADE = usual


def _wins(facts: dict[str, Any]) -> list[float]:
    """Return the win-rate at each checkpoint."""
    return [
        win_rate(np.array(at["stars"]["instant"]), np.array(at["stars"]["original"]))
        for at in facts["checkpoints"]
    ]


def open_worker(model: str) -> Bench:
    return open_bench(resolve({"model": model, "threads": 1, "backend": "native"}), lambda _: None)


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def missing(path: Path, fades: Sequence[float], users: int, seeds: int, size: int) -> list[tuple]:
    """Return (users, fade, seed) of the trials that the file does not have, at most `size` users in each."""
    known = {(r["user"], r["fade"], r["seed"]) for r in results(path)}
    return [
        (part, fade, seed)
        for seed in range(seeds)
        for at in range(0, users, size)
        for fade in fades
        if (part := [u for u in range(at, min(at + size, users)) if (u, fade, seed) not in known])
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of the module docstring as Markdown."""
    fades = sorted({row["fade"] for row in rows})
    wins = {(row["user"], row["seed"], row["fade"]): row["wins"] for row in rows}
    people = sorted({key[:2] for key in wins if all((*key[:2], fade) in wins for fade in fades)})
    lines = ["| FADE | " + " | ".join(f"{n} ratings" for n in CHECKPOINTS) + " |", "|---|---|---|---|"]
    for fade in fades:
        mine = np.array([wins[*key, fade] for key in people])
        more = mine - np.array([wins[*key, instant.FADE] for key in people])
        of_user = {u: more[[key[0] == u for key in people]].mean(axis=0) for u, _ in people}
        error = np.std(list(of_user.values()), axis=0, ddof=1) / np.sqrt(len(of_user))
        cells = [
            f"{win:.1%}" if fade == instant.FADE else f"{win:.1%} ({d:+.1%} ± {e:.1%})"
            for win, d, e in zip(mine.mean(axis=0), more.mean(axis=0), error, strict=True)
        ]
        lines.append(f"| {fade:g} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{len({u for u, _ in people})} users, {len(people)} trials of each FADE"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--fades", default="0,0.005,0.02,0.1")
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--questions", type=int, default=48)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    chat = ChatSetup(
        prompts.own("train"), prompts.own("heldout")[: asked.questions], CHECKPOINTS, MAX_TOKENS, TEMPERATURE
    )
    setup = DrawnSetup(chat, best_of=1)
    fades = [float(fade) for fade in asked.fades.split(",")]
    todo = missing(asked.out, fades, asked.users, asked.seeds, max(1, asked.users // 4))
    if todo:
        bench = open_worker(asked.model)
        bench.measure()
        frozen = {
            seed: FrozenReplies.sample(bench, setup, seed) for seed in {0} | {seed for *_, seed in todo}
        }
        parts = [SweepPart(users, fade, seed, frozen[seed], frozen[0], setup) for users, fade, seed in todo]
        workers = Workers(partial(open_worker, asked.model), asked.jobs)
        for found in workers.results(run_part, parts):
            with asked.out.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in found)
    print(table(results(asked.out)))


if __name__ == "__main__":
    main()

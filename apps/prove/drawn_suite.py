"""This module runs the trials of drawn users (simulated users with random tastes) and keeps the results in a
file. The module runs only trials whose results are not in the file, so you can stop a run and continue it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from . import prompts, suite
from .drawn_trial import DrawnSetup, FrozenReplies, UntouchedPart, reach, run
from .drawn_users import DrawnStars, DrawnUser
from .processes import Workers
from .trial import Bench

Log = Callable[[str], None]


@dataclass(frozen=True)
class DrawnRun:
    """The trials to run.

    setup: the settings of the trials
    users: the simulated users
    seeds: the number of seeds; each user has a trial for each seed
    rater: the way in which all users rate, a key of RATERS; None if each user's way was drawn at random
    """

    setup: DrawnSetup
    users: Sequence[DrawnUser]
    seeds: int
    rater: str | None = None

    def setting(self, model: str) -> dict[str, Any]:
        """Return the settings on which a result depends. The values that `_of` returns (the user, the way to
        learn, best_of and the seed) are left out."""
        chat = self.setup.chat
        asked, own = [*chat.prompts, "", *chat.heldout], prompts.own("heldout")[: len(chat.heldout)]
        given = {"prompts": suite.hash_of(asked)} if asked != [*prompts.own("train"), "", *own] else {}
        return given | {
            "model": model, "raters": self.rater or "each their own", "ratings": list(chat.presses),
            "questions": len(chat.heldout), "max_tokens": chat.max_tokens, "temperature": chat.temperature,
        }  # fmt: skip


def results(path: Path) -> list[dict[str, Any]]:
    return suite.results(path, of="user")


@dataclass(frozen=True)
class DrawnPart:
    """The trials of some users with one seed, which one process runs as one batch.

    frozen: the untouched model's replies for this seed, with which learned replies are compared
    scale: the untouched model's replies from which the scale of the users' stars is computed
    """

    setup: DrawnSetup
    users: Sequence[DrawnUser]
    seed: int
    frozen: FrozenReplies
    scale: FrozenReplies
    log: Log

    def run(self, bench: Bench) -> list[dict[str, Any]]:
        return list(run(bench, self.setup, self.users, self.seed, self.frozen, self.scale, self.log))


def run_missing(
    bench: Bench, wanted: DrawnRun, path: Path | None, machine: str, log: Log, workers: Workers | None = None
) -> list[dict[str, Any]]:
    """Run the wanted trials whose results are not in the file, and add their results to the file. Return the
    results of all wanted trials.

    path: the file of results; None for no file
    machine: words for the machine and the day, which are stored with each result
    workers: the processes that run the trials; None if this process runs all trials
    """
    setting = wanted.setting(bench.model.name)
    old = {_key(r): r for r in results(path)} if path else {}
    keys = {
        (u.number, seed): _key(_of(u, wanted.setup, seed) | {"setting": setting})
        for u in wanted.users
        for seed in range(wanted.seeds)
    }
    found = [old[key] for key in keys.values() if key in old]
    if len(found) == len(keys):
        return found
    log("the untouched model answers every question several times, to scale stars by")
    workers = workers or Workers(lambda: bench, 1)
    bench.measure()
    missing = [[u for u in wanted.users if keys[u.number, seed] not in old] for seed in range(wanted.seeds)]
    if workers.count > 1 and bench.untouched.are_kept:  # `sample` then reads the replies from the file
        seeds = [seed for seed, users in enumerate(missing) if users or seed == 0]
        _write_untouched(wanted.setup, seeds, workers)
    scale = FrozenReplies.sample(bench, wanted.setup, 0)
    reached = {u.number: reach(DrawnStars(u, scale.texts), scale) for u in wanted.users}
    parts = []
    for seed, users in enumerate(missing):
        frozen = FrozenReplies.sample(bench, wanted.setup, seed) if seed and users else scale
        size = min(wanted.setup.group, -(-len(users) // workers.count) or 1)
        for at in range(0, len(users), size):
            parts.append(DrawnPart(wanted.setup, users[at : at + size], seed, frozen, scale, log))
    log(f"{sum(map(len, missing))} trials in {len(parts)} parts, {workers.count} at a time")
    for facts in chain.from_iterable(workers.results(_run_part, parts)):
        facts |= {"reach": round(reached[facts["user"]], 3), "setting": setting, "machine": machine}
        found.append(facts)
        if path:
            suite.append(path, facts)
    return sorted(found, key=lambda facts: (facts["seed"], facts["user"]))


def _write_untouched(setup: DrawnSetup, seeds: Sequence[int], workers: Workers) -> None:
    """Let all processes write the untouched model's replies for these seeds into the bench's file."""
    count = workers.count
    parts = [UntouchedPart(setup, seed, first, count) for seed in seeds for first in range(count)]
    for _ in workers.results(_write_part, parts):
        pass


def _write_part(bench: Bench, part: UntouchedPart) -> None:
    part.write(bench)


def _run_part(bench: Bench, part: DrawnPart) -> list[dict[str, Any]]:
    return part.run(bench)


def _of(user: DrawnUser, setup: DrawnSetup, seed: int) -> dict[str, Any]:
    return {
        "user": user.number, "family": user.family, "rater": user.rater, "learn": setup.learn,
        "best_of": setup.best_of, "seed": seed,
    }  # fmt: skip


def _key(result: dict[str, Any]) -> str:
    names = ("user", "family", "rater", "learn", "best_of", "seed", "setting")
    return repr([result[name] for name in names])

"""Drawn users in a file of results: what the file lacks is run, so a run may be stopped and continued."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import suite
from .drawn_trial import DrawnSetup, FrozenReplies, reach, run
from .drawn_users import DrawnStars, DrawnUser
from .trial import Bench

Log = Callable[[str], None]
ALONE = 2.5  # time for a reply that is written alone, divided by the time per reply in a full batch


@dataclass(frozen=True)
class DrawnRun:
    """Which users are run, with how many seeds. rater: how all of them rate; None: drawn for each."""

    setup: DrawnSetup
    users: Sequence[DrawnUser]
    seeds: int
    rater: str | None = None

    def setting(self, model: str) -> dict[str, Any]:
        """What a result depends on besides the user and the seed."""
        chat = self.setup.chat
        return {
            "model": model, "raters": self.rater or "each their own", "ratings": list(chat.presses),
            "questions": len(chat.heldout), "max_tokens": chat.max_tokens, "temperature": chat.temperature,
        }  # fmt: skip


def results(path: Path) -> list[dict[str, Any]]:
    return suite.results(path, of="user")


def run_missing(
    bench: Bench, wanted: DrawnRun, path: Path | None, machine: str, log: Log
) -> list[dict[str, Any]]:
    """Run the trials that the file lacks and add them to it; returns the results of all of them. path: None:
    no file. machine: machine and day, kept with each result."""
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
    scale = FrozenReplies.sample(bench, wanted.setup, 0)
    reached = {u.number: reach(DrawnStars(u, scale.texts), scale) for u in wanted.users}
    missing = [[u for u in wanted.users if keys[u.number, seed] not in old] for seed in range(wanted.seeds)]
    log(estimate(wanted, sum(map(len, missing)), scale.seconds))
    for seed, users in enumerate(missing):
        frozen = FrozenReplies.sample(bench, wanted.setup, seed) if seed and users else scale
        for facts in run(bench, wanted.setup, users, seed, frozen, scale, log):
            facts |= {
                "reach": round(reached[facts["user"]], 3),
                "setting": setting,
                "machine": machine,
            }
            found.append(facts)
            if path:
                suite.append(path, facts)
    return found


def estimate(wanted: DrawnRun, trials: int, seconds: float) -> str:
    """About how long the trials take. seconds: for one reply of a full batch."""
    chat, full = wanted.setup.chat, wanted.setup.learn == "full"
    # 1.3 replies are read for each rating, over all kinds of raters; a batch of people is not always full.
    read = chat.presses[-1] * 1.3 * (ALONE if full else 1.5)
    tested = len(chat.presses) * len(chat.heldout) * wanted.setup.best_of
    minutes = trials * (read + tested) * seconds / 60
    return (
        f"{trials} trials: about {minutes:.0f} minutes on this machine{', and the training' if full else ''}"
    )


def _of(user: DrawnUser, setup: DrawnSetup, seed: int) -> dict[str, Any]:
    return {
        "user": user.number, "family": user.family, "rater": user.rater, "learn": setup.learn,
        "best_of": setup.best_of, "seed": seed,
    }  # fmt: skip


def _key(result: dict[str, Any]) -> str:
    names = ("user", "family", "rater", "learn", "best_of", "seed", "setting")
    return repr([result[name] for name in names])

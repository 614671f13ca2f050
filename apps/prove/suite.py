"""This module runs the suite of experiments of `ruvmlx prove`, and writes the report. In a trial, a simulated
user rates replies. The suite has a trial for each cell (a simulated user and an arm, which is a way to learn)
and each of a few seeds.

Each result is a line of JSON in a file. The suite does not repeat a trial whose result is in the file. So you
can stop the suite and continue it, and several processes that run different simulated users can share the
file.
"""

import datetime
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.errors import UsageError, unreadable

from . import trial
from .claims import rate, verdicts
from .plot import curves
from .report import Point, join_trials
from .trial import Arm, Bench, Checkpoint, TrialSetup
from .users import HOSTILE, TASTES, USERS

BEST_OF = 4  # the number of replies of which the taste model picks one, in the arms CHOOSING
CHOOSING = (Arm(), Arm("style"), Arm("full"))
ORACLES = {  # user -> a system prompt that states the user's taste
    "brevity": "Answer as briefly as you can, in one short sentence.",
    "lists": "Always answer with a numbered list, one item on each line.",
    "casual": "Talk to me like a friend: say you and we, use contractions and exclamation marks.",
}


@dataclass(frozen=True)
class SuiteCell:
    """A cell of the suite: a simulated user and an arm (a way to learn). checkpoints: the numbers of ratings
    after which the learned model is measured; each checkpoint gives a row of the report."""

    user: str
    arm: Arm
    checkpoints: tuple[int, ...] = (30, 100)

    @property
    def key(self) -> str:
        return f"{self.user}, {self.arm.name}"


def cells() -> list[SuiteCell]:
    instant = [SuiteCell(user, Arm()) for user in TASTES]
    brevity = [
        SuiteCell("brevity", Arm(shuffle=True)),
        SuiteCell("lists", Arm(shuffle=True)),
        SuiteCell("brevity", Arm("style", shuffle=True)),
        SuiteCell("brevity", Arm(flip=0.2)),
        SuiteCell("brevity", Arm(reverse_at=100), (100, 120, 140)),
        SuiteCell("brevity", Arm("off", examples=2)),
        SuiteCell("brevity", Arm("instant", examples=2)),
    ]
    oracles = [SuiteCell(user, Arm("off", system=words), (100,)) for user, words in ORACLES.items()]
    hostile = [SuiteCell(user, Arm(), (200,)) for user in HOSTILE]
    style = [SuiteCell(user, Arm("style")) for user in TASTES]
    full = [SuiteCell(user, Arm("full")) for user in TASTES]
    return [*instant, *style, *oracles, *brevity, *hostile, *full]


def run(
    bench: Bench,
    setting: TrialSetup,
    seeds: int,
    user: str | None,
    learn: str | None,
    path: Path,
    log: Callable[[str], None],
) -> None:
    """Run the trials whose results are not in the file, and add their results.

    setting: the prompts, the lengths and the temperature of all trials
    path: the file of results; UsageError if it has results of another model or with other settings
    seeds: the number of trials of each cell
    user: the name of a simulated user; None for all users
    learn: a way to learn (`Arm.learn`); None for all ways
    """
    used = _setting(bench, setting)
    for result in results(path):
        if (other := result.get("setting", used)) != used:
            raise UsageError(
                f"{path} has results with {_words(other)}; this run has {_words(used)}. Name another file."
            )
    wanted = [cell for cell in cells() if user in (None, cell.user) and learn in (None, cell.arm.learn)]
    if not wanted:
        raise UsageError(f"the suite has no trial of the user {user} with learning {learn}; leave one out.")
    for seed in range(seeds):
        for cell in wanted:
            known = {(r["key"], r["seed"]) for r in results(path)}
            if (cell.key, seed) not in known:
                append(path, _result(bench, setting, cell, seed, log) | {"setting": used})
                log(f"{cell.key}, seed {seed}: done")


def _setting(bench: Bench, setting: TrialSetup) -> dict[str, Any]:
    """Return the facts that all results of a file share, as JSON values."""
    asked = hash_of([*setting.prompts, "", *setting.heldout])
    return {
        "model": bench.model.name, "prompts": asked, "max_tokens": setting.max_tokens,
        "temperature": setting.temperature,
    }  # fmt: skip


def hash_of(texts: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:8]


def _words(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _result(bench: Bench, setting: TrialSetup, cell: SuiteCell, seed: int, log) -> dict[str, Any]:
    scorer, last = USERS[cell.user], max(cell.checkpoints)
    own = TrialSetup(
        scorer,
        setting.prompts,
        setting.heldout,
        last,
        cell.checkpoints,
        setting.max_tokens,
        setting.temperature,
        BEST_OF if cell.arm in CHOOSING and cell.user in TASTES else 1,
    )
    reach = trial.within_reach(bench, own, seed) if cell.arm == Arm() else None
    found = list(trial.run(bench, own, cell.arm, seed, log))
    made = datetime.date.today().isoformat()
    points = [_plain(c) for c in found]
    return {"key": cell.key, "seed": seed, "reach": reach, "made": made, "checkpoints": points}


def _plain(checkpoint: Checkpoint) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(checkpoint).items()}


def append(path: Path, result: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as f:
        f.write("\n" + json.dumps(result) + "\n")  # the first "\n" ends an incomplete line of a killed run


def results(path: Path, of: str = "key") -> list[dict[str, Any]]:
    """Return the results in the file, without incomplete lines of killed runs. of: the field that marks one
    kind of results; results without this field are left out. Raise UsageError if the file cannot be read."""
    if not path.exists():
        return []
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(str(path), error) from error
    for line in lines:
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if isinstance(result, dict) and "checkpoints" in result and of in result:
            found.append(result)
    return found


@contextmanager
def report_on(path: Path) -> Iterator[None]:
    """In the `with` block, the caller makes a report on the results in the file. Turn the errors of a damaged
    result into UsageError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path}: a result is damaged: {what}. Name another file.") from error


def some_results(path: Path, of: str = "key") -> list[dict[str, Any]]:
    """Return the results in the file, as `results` does. Raise UsageError if the file has none."""
    found = results(path, of)
    if not found:
        raise UsageError(f"{path} has no results for the report; run the command without --report first.")
    return found


def checkpoints(found: Sequence[dict[str, Any]]) -> list[list[Checkpoint]]:
    """Return the checkpoints of one cell as one list for each seed. found: the results of the cell."""
    return [
        [Checkpoint(**(c | _arrays(c))) for c in result["checkpoints"]]
        for result in sorted(found, key=lambda r: r["seed"])
    ]


def _arrays(checkpoint: dict[str, Any]) -> dict[str, np.ndarray]:
    names = ("scores", "base_scores", "best_scores")
    return {name: np.array(checkpoint[name]) for name in names if checkpoint.get(name) is not None}


_EXPLAINED = """\
A simulated user rates replies to 64 prompts. 100 prompts on other topics are then answered again and
compared, pair by pair, with the original model's replies for the same seeds.

* Win-rate: share of pairs in which the new reply has more stars; a tie counts half. The 95% interval
  resamples whole prompts.
* Best of 4: the same for the reply that the taste model picks among four by the learned weights.
* Made: the day of the oldest of the row's trials; "earlier": before the push of the taste model was added.
* KL (nats per token) and perplexity: on prose that no rating is about, of the worst seed.
* Distinct-2: divided by the original model's; the mean of the seeds, and in brackets the worst seed.
* Out of reach: a taste that the original model never meets in 64 samples of any seed. Ratings choose among
  what the model does, so they cannot teach it.
""".splitlines()


_COLUMNS = (
    "user, arm", "seeds", "ratings", "stars", "win-rate", "best of 4",
    "KL", "perplexity", "distinct-2 (worst)", "tokens", "made",
)  # fmt: skip


def markdown(path: Path, command: str, picture: str) -> str:
    """Return the report as Markdown: first the claims, then all figures. command: the command that made the
    report.
    picture: the plot's file name, relative to the report."""
    cells_ = _by_cell(some_results(path))
    within = {key: of for key, of in cells_.items() if not _out_of_reach(key, cells_)}
    found = {key: join_trials(checkpoints(of)) for key, of in (within | _on_shared_seeds(within)).items()}
    rows = [
        f"| {v.claim} | {v.figure} | {'not measured' if v.met is None else 'yes' if v.met else '**no**'} |"
        for v in verdicts(found)
    ]
    table = [
        _row(f"{key} (out of reach)" if _out_of_reach(key, cells_) else key, of, point)
        for key, of in cells_.items()
        for point in join_trials(checkpoints(of))
    ]
    return "\n".join(
        [
            "# What ratings do",
            "",
            f"Made by `{command}`. Nothing below was written by hand.",
            "",
            *_EXPLAINED,
            "",
            f"![win-rate by ratings]({picture})",
            "",
            "| must be shown | measured | met |",
            "|---|---|---|",
            *rows,
            "",
            "| " + " | ".join(_COLUMNS) + " |",
            "|---" * len(_COLUMNS) + "|",
            *table,
            "",
        ]
    )


def _on_shared_seeds(cells_: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Return {"A against B": the results of cell A for the seeds that cell B also has} for each two cells A
    and B of one simulated user."""
    shared = {}
    for (a, of), (b, others) in itertools.permutations(cells_.items(), 2):
        if a.split(",")[0] == b.split(",")[0]:
            seeds = {r["seed"] for r in others}
            if both := [r for r in of if r["seed"] in seeds]:
                shared[f"{a} against {b}"] = both
    return shared


def _row(name: str, of: list[dict[str, Any]], p: Point) -> str:
    made = min(r["made"] for r in of) if all("made" in r for r in of) else "earlier"
    return (
        f"| {name} | {len(of)} | {p.ratings} | {p.score_base:.2f} -> {p.score:.2f} | {rate(p)} "
        f"| {'' if p.best_rate is None else f'{p.best_rate:.1%}'} | {p.kl:.3f} "
        f"| {p.ppl_change:+.2%} | {p.variety:.3f} ({p.variety_worst:.3f}) "
        f"| {p.mean_tokens_base:.0f} -> {p.mean_tokens:.0f} | {made} |"
    )


def picture(path: Path) -> str:
    """Return a plot of the win-rates over the number of ratings as SVG, with a curve for each simulated user
    whose taste is within reach. The model learns only by the instant loop, which updates weights at each
    rating."""
    by_cell = _by_cell(results(path))
    lines = {
        user: [
            (p.ratings, p.win_rate, *p.win_ci) for p in join_trials(checkpoints(by_cell[f"{user}, instant"]))
        ]
        for user in TASTES
        if f"{user}, instant" in by_cell and not _out_of_reach(user, by_cell)
    }
    return curves("Ratings alone, prompts never rated", lines)


def _by_cell(found: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return {key of a cell: its results}, in the order of the suite, without cells that have no results."""
    by_key = {cell.key: [r for r in found if r["key"] == cell.key] for cell in cells()}
    return {key: of for key, of in by_key.items() if of}


def _out_of_reach(key: str, by_cell: dict[str, list[dict[str, Any]]]) -> bool:
    """Return True if the cell's user has a taste, and if no trial in the results found a reply of the
    original model that comes near this taste (`within_reach` in trial.py)."""
    user = key.split(",")[0]
    return not any(r["reach"] for r in by_cell.get(f"{user}, instant", [])) and user in TASTES

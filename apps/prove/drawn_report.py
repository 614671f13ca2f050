"""This module reports the effect of ratings for drawn users (simulated users with random tastes). The report
has the distribution of the users' win-rates, the worst user, and the cost in seconds.

The report includes only users within reach. The reach of a user is computed before the model learns. For each
question, a perfect judge picks the best of eight replies of the untouched model. The reach is the win-rate of
this pick against all eight replies, in which a tie is half a win. A user is within reach if the reach is at
least REACH.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ruvmlx.text import count

from ..charts import Axis, lines
from .statistics import mean_interval, win_interval, win_rate

REACH = 0.7  # the minimum reach (a win-rate) of a user in the report
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)  # the quantiles of the users' win-rates in the report
Results = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class UserPoint:
    """The results of one user with one arm (a way to learn or to pick replies) after some ratings, over all
    seeds.

    user: the user's number
    win_rate: the share of pairs in which the new reply has more stars than the untouched model's reply; a tie
        is half a win
    win_ci: the 95% interval of the win-rate
    kl, ppl_change: the largest KL (nats per token) and change of perplexity of all seeds
    """

    user: int
    win_rate: float
    win_ci: tuple[float, float]
    kl: float
    ppl_change: float


@dataclass(frozen=True)
class ArmSpread:
    """The results of an arm (a way to learn) over all users within reach (users whose taste the untouched
    model's replies meet often enough).

    users: the number of users
    win_rate, win_ci: the mean of the users' win-rates, and its 95% interval
    quantiles: the quantiles of the users' win-rates at QUANTILES
    worst: the user whose win-rate's interval has the lowest lower end
    better, worse: the numbers of users whose whole interval is above 50%, or below 50%
    kl, ppl_change: the largest KL (nats per token) and change of perplexity of all users and seeds
    """

    arm: str
    ratings: int
    users: int
    win_rate: float
    win_ci: tuple[float, float]
    quantiles: tuple[float, ...]
    worst: UserPoint
    better: int
    worse: int
    kl: float
    ppl_change: float


@dataclass(frozen=True)
class ArmCost:
    """The cost of a way to learn in seconds of the whole machine. Each figure is the median over users, so
    that one interrupted trial changes little.

    rating: the seconds of one reply that a user reads, with its rating
    training: the seconds of training for one user
    reply: the seconds of one reply to an unseen question, in a batch
    best_of: the extra seconds of a question for the other replies and for the choice of the best reply
    """

    learn: str
    users: int
    rating: float
    training: float
    reply: float
    best_of: float


def within_reach(results: Results) -> list[dict[str, Any]]:
    return [r for r in results if r["reach"] >= REACH]


def points(results: Results, arm: str, ratings: int) -> list[UserPoint]:
    """Return the results of each user that has this arm after this number of ratings, in the order of the
    users' numbers."""
    found = []
    for user in sorted({r["user"] for r in results}):
        of = [c for r in results if r["user"] == user for c in r["checkpoints"]]
        seeds = [c for c in of if c["ratings"] == ratings and arm in c["stars"]]
        if not seeds:
            continue
        new, old = (np.array([c["stars"][name] for c in seeds]) for name in (arm, "original"))
        low, high = win_interval(new, old)
        kl, ppl = (max(c[name] for c in seeds) for name in ("kl", "ppl_change"))
        found.append(UserPoint(user, round(win_rate(new, old), 3), (round(low, 3), round(high, 3)), kl, ppl))
    return found


def arms(results: Results) -> list[str]:
    """Return the names of the arms in the results. The arms with learned weights are first."""
    names = {name for r in results for c in r["checkpoints"] for name in c["stars"]} - {"original"}
    order = ("instant", "full", "style", "original")
    return sorted(names, key=lambda name: (order.index(name.split("+")[0]), name))


def distributions(results: Results) -> list[ArmSpread]:
    """Return the results of every arm after every number of ratings."""
    counted = within_reach(results)
    ratings = sorted({c["ratings"] for r in counted for c in r["checkpoints"]})
    every = [(arm, n, points(counted, arm, n)) for arm in arms(counted) for n in ratings]
    return [_distribution(arm, n, users) for arm, n, users in every if users]


def _distribution(arm: str, ratings: int, users: list[UserPoint]) -> ArmSpread:
    rates = np.array([p.win_rate for p in users])
    low, high = mean_interval(rates)
    return ArmSpread(
        arm, ratings, len(users), round(float(rates.mean()), 3), (round(low, 3), round(high, 3)),
        tuple(round(float(q), 3) for q in np.quantile(rates, QUANTILES)),
        min(users, key=lambda p: (p.win_ci[0], p.win_rate)),
        sum(p.win_ci[0] > 0.5 for p in users), sum(p.win_ci[1] < 0.5 for p in users),
        max(p.kl for p in users), max(p.ppl_change for p in users),
    )  # fmt: skip


def costs(results: Results) -> list[ArmCost]:
    """Return the cost of each way to learn. The cost also includes users out of reach."""
    return [_arm_cost(learn, [r for r in results if r["learn"] == learn]) for learn in _learns(results)]


def _learns(results: Results) -> list[str]:
    return list(dict.fromkeys(r["learn"] for r in results))


def _arm_cost(learn: str, of: Results) -> ArmCost:
    each = []
    for r in of:
        asked = sum(len(c["stars"]["original"]) for c in r["checkpoints"])
        seconds, read = r["seconds"], max(1, r["checkpoints"][-1]["read"])
        each.append(
            (
                seconds["ratings"] / read,
                seconds["training"],
                seconds["replies"] / asked,
                seconds["best_of"] / asked,
            )
        )
    return ArmCost(learn, len(of), *(round(float(x), 3) for x in np.median(each, axis=0)))


def facts(results: Results) -> dict[str, Any]:
    """Return the report as JSON data."""
    users = {r["user"]: {k: r[k] for k in ("user", "rater", "kind", "taste", "reach")} for r in results}
    return {
        "drawn": len(users),
        "family": results[0]["family"],
        "within_reach": sum(u["reach"] >= REACH for u in users.values()),
        "reach": REACH,
        "arms": [asdict(d) for d in distributions(results)],
        "costs": [asdict(c) for c in costs(results)],
        "users": list(users.values()),
    }


# -- functions that format the report --------------------------------------------------------------------

_EXPLAINED = """\
Each user's taste is drawn at random (drawn_tastes.py, drawn_users.py). A user reads replies to our questions
and rates them; unseen questions on other topics are then answered, and each reply is compared with the
untouched model's reply for the same seed.

* Win-rate: share of pairs in which the new reply has more stars; a tie counts half. A user's 95% interval
  resamples whole questions; that of the mean resamples users.
* `+best-of-N`: the taste model picks among N replies by the same weights. `original+best-of-N`: it picks
  among N replies of the untouched model, after the same ratings. While a user rates, each question gets one
  reply.
* Within reach: the best of 8 replies of the untouched model, picked by a perfect judge, beats a random one of
  them in at least 70% of questions. It is computed before anything is learned; other users are not counted.
* The worst user is the one with the lowest lower end of the interval. KL (nats per token) and perplexity: on
  prose that no rating is about, of the worst user and seed.
* A user who finds too little to rate, for example with one thumb only, stops after reading twice as many
  replies as the checkpoint has ratings.
""".splitlines()


def markdown(results: Results, picture: str) -> str:
    """Return the whole report as Markdown. picture: the file name of the plot."""
    made = list(dict.fromkeys(r["machine"] for r in results))
    parts = ["# What ratings do for drawn users", "", "Made by `ruvmlx prove --drawn`; the same command:", ""]
    parts += [f"    {command}" for command in dict.fromkeys(_command(r, results) for r in results)]
    parts += ["", *(f"Measured on {machine}." for machine in made), "", *_EXPLAINED]
    for of in _sections(results):
        parts += _section(of)
    return "\n".join([*parts, "", f"![every user's win-rate]({picture})", ""])


def _sections(results: Results) -> list[Results]:
    """Return the sections of the report: groups of results that can be compared, because they have the same
    family of tastes and the same settings."""
    keys = list(dict.fromkeys(_section_key(r) for r in results))
    return [[r for r in results if _section_key(r) == key] for key in keys]


def _section_key(result: dict[str, Any]) -> str:
    return repr([result["family"], result["setting"]])


def _command(result: dict[str, Any], results: Results) -> str:
    """Return the command line that makes this result and the other results of its section with the same
    `learn`, if the options that the line does not name (such as --best-of) had their default values."""
    of = [r for r in results if _section_key(r) == _section_key(result) and r["learn"] == result["learn"]]
    setting = result["setting"]
    flags = ["--held-out"] if result["family"] == "held-out" else []
    flags += [f"--rater {setting['raters']}"] if setting["raters"] != "each their own" else []
    flags += [f"--learn {result['learn']}"] if result["learn"] != "instant" else []
    flags += [f"--ratings {setting['ratings'][-1]}", f"--questions {setting['questions']}"]
    flags += [f"--seeds {1 + max(r['seed'] for r in of)}"]
    return " ".join(["ruvmlx prove", f"--drawn {1 + max(r['user'] for r in of)}", *flags])


def _section(of: Results) -> list[str]:
    drawn, reached = len({r["user"] for r in of}), len({r["user"] for r in within_reach(of)})
    family, setting = of[0]["family"], of[0]["setting"]
    return [
        "", f"## The {family} family: {_reach(reached, drawn)}", "",
        f"{setting['questions']} unseen questions, {setting['max_tokens']} tokens at most; raters: "
        f"{setting['raters']}.", "", *_table(_ARM_HEAD, [_arm_row(d) for d in distributions(of)]),
        "", "Mean win-rate after the last rating, by how a user rates and by the kind of taste:", "",
        *_by_group(of), "", "Every user after the last rating:", "", *_by_user(of), "",
        "Cost, in seconds of the whole machine, for the median user:", "",
        *_table(_COST_HEAD, [_cost_row(c) for c in costs(of)]),
    ]  # fmt: skip


def text(results: Results) -> str:
    """Return the distributions over users and the costs as text for a terminal."""
    known = facts(results)
    head = _reach(known["within_reach"], known["drawn"], f" of the {known['family']} family")
    arms = distributions(results)
    rows = [head, *_plain(_ARM_HEAD, [_arm_row(d) for d in arms]), *map(_verdict, arms)]
    return "\n".join([*rows, *_plain(_COST_HEAD, [_cost_row(c) for c in costs(results)])])


def _reach(within: int, drawn: int, family: str = "") -> str:
    """Return how many of the drawn users are within reach: "3 of 4 users are within reach"."""
    return f"{within} of {count(drawn, 'user')}{family} {'is' if within == 1 else 'are'} within reach"


def _verdict(d: ArmSpread) -> str:
    unsure = d.users - d.better - d.worse
    return (
        f"{d.arm}, after {count(d.ratings, 'rating')}: with 95% probability, replies are better than the "
        f"original model's for {d.better} of {count(d.users, 'user')}, and worse for {d.worse}. "
        f"For {unsure}, this run cannot tell."
    )


_ARM_HEAD = (
    "arm", "ratings", "users", "mean (95%)", "10%", "25%", "median", "75%", "90%", "worst user",
    "surely better", "surely worse", "KL", "perplexity",
)  # fmt: skip
_COST_HEAD = (
    "arm",
    "users",
    "a reply, read and rated",
    "training, a user",
    "a reply",
    "best of n adds",
)


def _arm_row(d: ArmSpread) -> list[str]:
    low, high = d.win_ci
    at, until = d.worst.win_ci
    return [
        d.arm, str(d.ratings), str(d.users), f"{d.win_rate:.1%} ({low:.1%} to {high:.1%})",
        *(f"{q:.0%}" for q in d.quantiles),
        f"{d.worst.win_rate:.1%} ({at:.1%} to {until:.1%}), user {d.worst.user}",
        str(d.better), str(d.worse), f"{d.kl:.3f}", f"{d.ppl_change:+.2%}",
    ]  # fmt: skip


def _cost_row(c: ArmCost) -> list[str]:
    return [c.learn, str(c.users), *(f"{x:.2f}" for x in (c.rating, c.training, c.reply, c.best_of))]


def _by_group(results: Results) -> list[str]:
    counted = within_reach(results)
    last, names = _last(counted), arms(counted)
    rows = []
    for what in ("rater", "kind"):
        for value in sorted({r[what] for r in counted}):
            of = [r for r in counted if r[what] == value]
            means = [_mean(points(of, arm, last)) for arm in names]
            rows.append([value, str(len({r["user"] for r in of})), *means])
    return _table(("users who ...", "users", *names), rows)


def _mean(users: list[UserPoint]) -> str:
    return f"{np.mean([p.win_rate for p in users]):.1%}" if users else "-"


def _by_user(results: Results) -> list[str]:
    last, names = _last(results), arms(results)
    by_arm = {arm: {p.user: p for p in points(results, arm, last)} for arm in names}
    rows = []
    for user in sorted({r["user"] for r in results}):
        r = next(r for r in results if r["user"] == user)
        given = next(c["given"] for c in r["checkpoints"] if c["ratings"] == last)
        reached = f"{r['reach']:.0%}" + ("" if r["reach"] >= REACH else ", out of reach")
        cells = [_user_cell(by_arm[arm].get(user)) for arm in names]
        rows.append([str(user), r["rater"], r["taste"], reached, str(given), *cells])
    return _table(("user", "rates", "taste", "perfect judge", "ratings", *names), rows)


def _user_cell(point: UserPoint | None) -> str:
    return f"{point.win_rate:.0%} ({point.win_ci[0]:.0%} to {point.win_ci[1]:.0%})" if point else "-"


def _last(results: Results) -> int:
    return max((c["ratings"] for r in results for c in r["checkpoints"]), default=0)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]


def _plain(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are aligned with spaces."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def picture(results: Results) -> str:
    """Return an SVG plot of the win-rate and its interval of each user within reach, after the last rating,
    for the first section of the report. Each arm has a line from the user with the lowest win-rate to the
    user with the highest."""
    counted = within_reach(_sections(results)[0])
    last = _last(counted)
    series = {}
    for arm in arms(counted):
        users = sorted(points(counted, arm, last), key=lambda p: p.win_rate)
        series[arm] = [(i + 1.0, p.win_rate, *p.win_ci) for i, p in enumerate(users)]
    most = max(map(len, series.values()), default=1)
    title = f"Drawn users after {count(last, 'rating')}, from the worst to the best"
    below = "users; how often the reply is better than the untouched model's"
    rate = Axis(0, 1, (0, 0.25, 0.5, 0.75, 1), ".0%", strong=0.5)
    return lines(title, below, series, Axis(1, max(2, most), (1, max(2, most)), ".0f"), rate)

"""The command `ruvmlx prove` measures whether ratings help. A simulated user rates replies of the real model.
Then the model answers other prompts, which it did not see during training."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ruvmlx import settings as config
from ruvmlx.errors import UsageError, unreadable
from ruvmlx.settings import Settings
from ruvmlx.text import backend_in_words

from ..prove.raters import RATERS
from .number_types import Number, WholeNumber
from .options import load_and_open, model_options, resolve
from .output import json_option, log, print_json, show
from .own_scorer import own_scorer
from .path_types import NewPath
from .prove_refusals import refuse_for_drawn, refuse_for_suite
from .text_output import TableColumn, count, hint, say, table
from .verb import Verb

KEPT_REPLIES = "prove-replies.db"  # file in the data folder with replies of the untouched (not trained) model


@click.command(cls=Verb)
@click.option("--user", help="Simulated user; brevity by default.  `--user list` names them.")
@click.option("--scorer", help="Your own user: FILE.py:function, (prompt, reply, finished) -> 1..5.")
@click.option("--prompts", type=click.Path(dir_okay=False), help="Prompts to rate on, one a line.")
@click.option("--heldout", type=click.Path(dir_okay=False), help="Prompts to test on, one a line.")
@click.option("--ratings", type=WholeNumber(min=1), default=100, show_default=True)
@click.option(
    "--every", type=WholeNumber(min=1), help="Test after every N ratings; by default after 30 and all."
)
@click.option("--seeds", type=WholeNumber(min=1), default=1, show_default=True)
@click.option(
    "--as-chat",
    is_flag=True,
    help="Thumbs alone, at the chat's own settings: raters who press both, only down, only up.",
)
@click.option(
    "--thumbs", type=click.Choice(["all", "both", "down", "up"]), default="all", help="Raters of --as-chat."
)
@click.option(
    "--questions",
    type=WholeNumber(min=1),
    default=24,
    show_default=True,
    help="Questions to test on, for --as-chat and --drawn.",
)
@click.option("--drawn", type=WholeNumber(min=1), help="Simulate N users whose tastes are drawn at random.")
@click.option("--held-out", is_flag=True, help="Draw tastes from properties that nothing was tuned on.")
@click.option(
    "--rater", type=click.Choice(list(RATERS)), help="How all drawn users rate; by default drawn for each."
)
@click.option(
    "--best-of",
    type=WholeNumber(1, 8),
    default=4,
    show_default=True,
    help="Replies among which the taste model picks, with --drawn.",
)
@click.option(
    "--jobs",
    type=WholeNumber(min=1),
    help="Processes, each with a model of its own; by default one for each core, if memory allows.",
)
@click.option("--max-tokens", type=WholeNumber(min=1), default=96, show_default=True)
@click.option("--temp", "temperature", type=float, default=0.7, show_default=True)
@click.option(
    "--learn", type=click.Choice(["instant", "full", "style", "off"]), default="instant", show_default=True
)
@click.option("--examples", type=WholeNumber(min=0), default=0, help="Liked replies shown in the prompt.")
@click.option("--oracle", help="A system prompt that states the user's taste, to compare with.")
@click.option("--shuffle", is_flag=True, help="Give each reply the stars of another one.")
@click.option("--flip", type=Number(0, 1), default=0.0, help="Share of ratings to reverse.")
@click.option("--reverse", type=WholeNumber(min=0), help="The user wants the opposite after N ratings.")
@click.option(
    "--suite",
    type=NewPath(dir_okay=False),
    help="Run all users and variants, or those of --user and --learn; add the results to this file.",
)
@click.option(
    "--report",
    type=NewPath(dir_okay=False),
    help="Write the suite's results as a report, such as REPORT.md.",
)
@model_options
@json_option
def prove(as_json: bool, **flags: Any) -> None:
    """Let a simulated user rate the real model, and test what it learned. Your adapter is never touched."""
    from ..prove import report, trial
    from ..prove.users import USERS

    started = time.monotonic()
    if flags["user"] == "list":
        _show_users(USERS)
        return
    if flags["report"] and not flags["suite"]:
        raise UsageError("--report goes with --suite, which names the file of results.")
    if flags["report"] and Path(flags["report"]).resolve() == Path(flags["suite"]).resolve():
        raise UsageError("--report would replace the results of --suite; name another file.")
    if flags["drawn"]:
        _run_drawn(flags, as_json)
        return
    if flags["held_out"] or flags["rater"]:
        raise UsageError("--held-out and --rater are for drawn users; add --drawn N.")
    if flags["suite"]:
        refuse_for_suite()
        _suite(flags)
        return
    if flags["as_chat"]:
        _as_chat(flags, as_json)
        return
    setting, arm = _setting(flags), _arm(flags)
    settings = resolve(flags)
    bench = open_bench(settings, log)
    reach = trial.within_reach(bench, setting, 0)
    if not reach:
        log("none of 64 replies of the original model has 3 stars, so ratings may fail to teach this taste.")
    for seed in range(flags["seeds"]):
        bench.base_replies(setting, seed)  # stores replies, which the worker processes only read
    parts = [trial.TrialPart(setting, arm, seed, log) for seed in range(flags["seeds"])]
    found = dict(workers(flags, settings, bench).results(trial.run_part, parts))
    points = report.join_trials([found[seed] for seed in range(flags["seeds"])])
    facts = {
        "checkpoints": [asdict(p) for p in points],
        "arm": arm.name,
        "user": flags["scorer"] or flags["user"] or "brevity",
        "within_reach": reach,
        "seeds": flags["seeds"],
        "model": bench.model.name,
        "seconds": round(time.monotonic() - started, 1),
    }
    if as_json:
        print_json(facts)
        return
    rated = set(setting.prompts[: setting.ratings])
    _show_points(points, facts, len(setting.heldout), sum(question in rated for question in setting.heldout))


def _show_users(users: Any) -> None:
    """Print the simulated users, with the first line of each one's docstring."""
    say("Simulated users. Each gives a reply 1 to 5 stars, by one taste.")
    rows = [(name, (scorer.__doc__ or "").splitlines()[0]) for name, scorer in users.items()]
    table([TableColumn("USER", style="bold"), TableColumn("TASTE", keep=False)], rows)
    hint("`ruvmlx prove --user brevity` measures with the first of them.")


def _show_points(points: Sequence[Any], facts: dict[str, Any], questions: int, rated: int) -> None:
    """Print a table of the results after each number of ratings, and explain the table's columns. questions:
    the number of questions of the test; rated: how many of them ratings were about, too."""
    runs, asked = count(facts["seeds"], "run"), count(questions, "question")
    say(f"A simulated user, {facts['user']!r}, rated replies in {runs}, with {facts['arm']} learning.")
    say("The simulation has its own adapter; it changed none of yours.")
    seen = f"{rated} of them {'was' if rated == 1 else 'were'} rated, too, which flatters the result"
    say(f"The test has {asked}; {seen if rated else 'no rating was about them'}.")
    from ..prove import report

    names = ("RATINGS", "STARS", "BETTER", "BETWEEN", "KL", "PERPLEXITY", "TOKENS")
    table([TableColumn(name, right=True) for name in names], map(report.row, points))
    say(report.verdict(points[-1]))
    hint("STARS and TOKENS (the length) are means, before and after the ratings.")
    hint(
        "BETTER is how often a reply has more stars than the original model's, where equal stars count as "
        "half; BETWEEN is its 95% interval."
    )
    hint(
        "KL is the distance from the original model on other text, in nats per token (0 is none); PERPLEXITY "
        "is how much worse (+) the model predicts other text."
    )


def _as_chat(flags: dict[str, Any], as_json: bool) -> None:
    """Print the effect of thumbs-up and thumbs-down ratings. The flag --ratings sets the number of these
    ratings. Without --max-tokens and --temp, the trial uses the chat's own settings."""
    from ruvmlx.sona.slow_loops import STYLE, loop_of_setting

    from ..prove import as_chat

    source = click.get_current_context().get_parameter_source
    given = {
        name: flags[name]
        for name in ("ratings", "max_tokens", "temperature")
        if source(name) is not ParameterSource.DEFAULT
    }
    last = given.get("ratings", max(as_chat.PRESSES))
    points = range(flags["every"], last, flags["every"]) if flags["every"] else as_chat.PRESSES
    settings = resolve({k: v for k, v in flags.items() if k not in ("max_tokens", "temperature")})
    setup = as_chat.ChatSetup(
        _lines(flags["prompts"], "everyday"),
        _lines(flags["heldout"], "heldout")[: flags["questions"]],
        sorted({p for p in points if p < last} | {last}),
        given.get("max_tokens", settings.max_tokens),
        given.get("temperature", settings.temperature),
    )
    raters = list(as_chat.THUMBS) if flags["thumbs"] == "all" else [flags["thumbs"]]
    bench = open_bench(settings, log)
    learn = _given_learn(flags)
    if learn is None:  # the chat's own slow loop, if it takes seconds
        learn = (
            "style" if loop_of_setting(settings.slow_loop, bench.model.fingerprint) == STYLE else "instant"
        )
    results = as_chat.run(bench, setup, raters, flags["seeds"], log, learn)
    if as_json:
        print_json({"results": [asdict(r) | {"change": round(r.change, 3)} for r in results]})
    else:
        show(as_chat.table(results))


def _run_drawn(flags: dict[str, Any], as_json: bool) -> None:
    """Simulate users whose tastes are drawn at random, and print what each user gains from the ratings. With
    --report, run no user, and write a report on earlier runs."""
    from ..prove import as_chat, drawn_report, drawn_suite, drawn_trial, drawn_users

    file = Path(flags["suite"]) if flags["suite"] else None
    if file and flags["report"]:
        _drawn_report(file, Path(flags["report"]))
        return
    if flags["learn"] == "off":
        raise UsageError("--learn off is not for drawn users: something must learn; give another one.")
    refuse_for_drawn()
    started, ratings, every = time.monotonic(), flags["ratings"], flags["every"]
    points = range(every, ratings, every) if every else (10, 30)
    chat = as_chat.ChatSetup(
        _lines(flags["prompts"], "train"),
        _lines(flags["heldout"], "heldout")[: flags["questions"]],
        sorted({p for p in points if p < ratings} | {ratings}),
        flags["max_tokens"],
        flags["temperature"],
    )
    setup = drawn_trial.DrawnSetup(chat, flags["learn"], flags["best_of"])
    users = [drawn_users.DrawnUser.draw(n, flags["held_out"], flags["rater"]) for n in range(flags["drawn"])]
    wanted = drawn_suite.DrawnRun(setup, users, flags["seeds"], flags["rater"])
    settings = resolve(flags)
    bench = open_bench(settings, log)
    found = drawn_suite.run_missing(
        bench, wanted, file, _machine(bench), log, workers(flags, settings, bench)
    )
    if as_json:
        print_json(drawn_report.facts(found) | {"seconds": round(time.monotonic() - started, 1)})
    else:
        show(drawn_report.text(found))


def _machine(bench: Any) -> str:
    """Return words that name this machine's processor, the backend and today's date."""
    from ..bench.machine import hardware

    known = hardware(0)
    return f"{known['chip']}, {known['cores']} cores, {known['system']}; {bench.backend.name}; {date.today()}"


def _drawn_report(file: Path, report: Path) -> None:
    from ..prove import drawn_report, suite

    with suite.report_on(file):
        found = suite.some_results(file, of="user")
        _write_report(report, partial(drawn_report.markdown, found), drawn_report.picture(found))


def _write_report(report: Path, markdown: Callable[[str], str], drawing: str) -> None:
    """Write a report, and beside it the report's picture. markdown: a function that takes the name of the
    picture and returns the report."""
    if report.suffix.lower() == ".svg":
        raise UsageError(f"--report {report}: this is the name of the picture; name a text, as in REPORT.md.")
    picture = report.with_suffix(".svg")
    report.write_text(markdown(picture.name), encoding="utf-8")
    picture.write_text(drawing, encoding="utf-8")
    show(f"wrote {report} and {picture}")


def _suite(flags: dict[str, Any]) -> None:
    """Run the trials whose results are not in the file of results yet. With --report, run no trial, and write
    a report on the results."""
    from ..prove import suite

    results = Path(flags["suite"])
    if flags["report"] is None:
        bench = open_bench(resolve(flags), log)
        suite.run(bench, _setting(flags), flags["seeds"], flags["user"], _given_learn(flags), results, log)
        return
    command = f"ruvmlx prove --suite {results.name} --seeds {flags['seeds']}"
    with suite.report_on(results):
        markdown = partial(suite.markdown, results, command)
        _write_report(Path(flags["report"]), markdown, suite.picture(results))


def _given_learn(flags: dict[str, Any]) -> str | None:
    """Return the value of --learn, or None if the command has no --learn."""
    source = click.get_current_context().get_parameter_source("learn")
    return None if source is ParameterSource.DEFAULT else flags["learn"]


def _setting(flags: dict[str, Any]):
    from ..prove.trial import TrialSetup

    ratings, every = flags["ratings"], flags["every"]
    points = set(range(every, ratings, every)) if every else {30}
    return TrialSetup(
        _scorer(flags["user"], flags["scorer"]),
        _lines(flags["prompts"], "train"),
        _lines(flags["heldout"], "heldout"),
        ratings,
        sorted({p for p in points if p < ratings} | {ratings}),
        flags["max_tokens"],
        flags["temperature"],
    )


def _arm(flags: dict[str, Any]):
    from ..prove.trial import Arm

    return Arm(
        flags["learn"], flags["examples"], flags["shuffle"], flags["flip"], flags["reverse"], flags["oracle"]
    )


def _lines(path: str | None, own: str) -> list[str]:
    """Return the prompts of the file `path`. If `path` is None, return ruvmlx's own prompts, whose file is
    `own`."""
    from ruvmlx.chats.chat_file import read_limited

    from ..prove import prompts

    if path is None:
        return prompts.own(own)
    try:
        with open(path, "rb") as opened:
            found = prompts.lines(read_limited(opened, path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        raise unreadable(path, e) from e
    if not found:
        raise UsageError(f"{path} holds no prompts; write one a line.")
    return found


def _scorer(user: str | None, file: str | None):
    from ..prove.users import USERS

    if user and file:
        raise UsageError("give --user or --scorer, not both.")
    if file:
        return own_scorer(file)
    if (user or "brevity") not in USERS:
        raise UsageError(f"no simulated user {user!r}; there are: {', '.join(USERS)}.")
    return USERS[user or "brevity"]


def open_bench(settings: Settings, tell, measured=None):
    """Open the model and the data that all trials share. measured: facts about the model, if another process
    has measured them already."""
    from ruvmlx.platform.numpy_blas import NumpyThreads

    from ..prove.trial import Bench

    NumpyThreads(settings.threads).adapt()
    model, backend = load_and_open(settings)
    tell(f"computed by {backend_in_words(backend.name, backend.kernels)}")
    kept = config.home() / KEPT_REPLIES
    chosen = {
        name: getattr(settings, name) for name in ("kv", "learn_targets", "base_targets", "adapter_bits")
    }
    return Bench(model, backend, chosen, kept, measured)


def workers(flags: dict[str, Any], settings: Settings, bench: Any) -> Any:
    """Return the worker processes that run trials at the same time, as many as --jobs says. The main process
    runs all trials with a scorer of the user's own. Without --jobs, the main process also runs all trials
    with a backend other than native, with one core, or if two copies of the model need too much memory."""
    from ruvmlx.platform import cpu

    from ..prove.processes import Workers

    fit = int(cpu.total_memory() / 2 // max(1, 2 * bench.backend.nbytes))
    usual = min(cpu.physical_cores(), fit) if bench.backend.name == "native" else 1
    count = 1 if flags["scorer"] else flags["jobs"] or max(1, usual)
    if count == 1:
        return Workers(lambda: bench, 1)
    bench.measure()  # once, for all processes
    return Workers(partial(open_bench, replace(settings, threads=1), _say_nothing, bench.measured), count)


def _say_nothing(text: str) -> None:
    """Do not print the line about the backend, because the main process has printed it."""


VERBS: list[click.Command] = [prove]

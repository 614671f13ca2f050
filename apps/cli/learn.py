"""The command `ruvmlx learn` shows what the model learned from ratings, undoes ratings, and trains on
them."""

import threading
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ruvmlx import settings as config
from ruvmlx.errors import UsageError
from ruvmlx.settings import Settings

from ..learning_words import (
    HOW_TO_RATE,
    detail_rows,
    nothing_in_use,
    reply_line,
    status_facts,
    status_lines,
    with_flags,
)  # fmt: skip
from ..optimizer_words import optimizer_rows, tuning_line
from .interrupt import ctrl_c_sets
from .kv_words import kv_facts, show_kv
from .learn_check import check
from .learn_router import router_arms, router_of, show_router
from .number_types import Date, Number, WholeNumber
from .options import BUILT_IN, load_model, model_options, open_runtime, resolve, unknown_adapter
from .output import json_option, log, print_json, show, show_whole
from .path_types import NewPath
from .text_output import facts as table_of_facts
from .text_output import say
from .verb import VerbGroup


@click.group(cls=VerbGroup)
def learn() -> None:
    """Show what the model learned from your ratings, undo it, or train now."""


learn.add_command(check)
learn.add_command(router_arms)


def _history(flags: dict[str, Any], reading: bool = False, settings: Settings | None = None):
    """Return the AdapterHistory (versions and ratings) of the adapter that the flags choose, without loading
    the model's weights. reading: True if the command changes nothing, so that a read-only folder is no
    error. settings: the settings that the flags choose, if the caller has resolved them."""
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.sona.adapter_history import AdapterHistory
    from ruvmlx.store import Store

    settings = settings or resolve(flags)
    name = settings.adapter_name
    if name is None:
        raise UsageError(
            "no adapter is in use, so nothing is learned: name one with --adapter, or choose one with "
            "`ruvmlx adapters use NAME`."
        )
    store = Store(config.store_file(), reading)
    model = identify(store, load_model(settings.model), not reading)
    known = [row.name for row in store.adapters.all(model.fingerprint)]
    if flags.get("adapter") and name not in (*known, *BUILT_IN):
        raise UsageError(f"{unknown_adapter(name, known)} `ruvmlx adapters ls` lists them.")
    return AdapterHistory(store, model.fingerprint, name, model.is_own)


def _optimizer(settings: Settings, history: Any) -> dict[str, Any]:
    """Return the facts about the optimizer: speed, quality, conditions and actions."""
    from ruvmlx.backends.select import describe
    from ruvmlx.optimizer.status import optimizer_facts
    from ruvmlx.store import Store

    backend = describe(settings.backend).name
    store = Store(config.store_file(), reading=True)
    return optimizer_facts(store, history, backend, settings.optimizer, settings.slow_loop)


def _taste(history: Any) -> dict[str, Any]:
    """Return what the user's ratings show about the user's taste."""
    from ruvmlx.sona.user_taste import UserTaste

    known = UserTaste(history).status
    return asdict(known) | {"sentence": known.sentence}


def _show_status(history: Any, status: Any, as_json: bool, done: str, flags: dict[str, Any]) -> None:
    """Show the present state of the adapter. done: sentences that say what the command changed."""
    facts = status_facts(status)
    if not as_json:
        say(done)
        facts["taste"] = _taste(history)
    _show_facts(facts, as_json, flags)


def _show_facts(facts: dict[str, Any], as_json: bool, flags: dict[str, Any]) -> None:
    if as_json:
        print_json(facts)
        return
    for line in status_lines(facts):
        say(with_flags(line, flags))
    if "router" in facts:
        show_router(facts["router"])


@learn.command()
@click.option("--details", is_flag=True, help="Also the figures: distance, versions, trainings.")
@model_options
@json_option
def status(details: bool, as_json: bool, **flags: Any) -> None:
    """Show ratings, version, and how far the model is from the original one."""
    from ruvmlx.sona.adapter_history import other_adapters, signal_groups

    settings = resolve(flags)
    history = _history(flags, reading=True, settings=settings)
    facts = status_facts(history.status()) | {"targets": settings.learn_targets, "taste": _taste(history)}
    facts |= {"adapter": history.name, "others": other_adapters(history)}
    facts["signals"] = [asdict(group) for group in signal_groups(history)]
    if settings.router:
        facts["router"] = router_of(settings, reading=True).status().facts
    if details or as_json:
        facts["optimizer"] = _optimizer(settings, history)
    _show_facts(facts, as_json, flags)
    if details and not as_json:
        table_of_facts([*detail_rows(facts), *optimizer_rows(facts["optimizer"])])


@learn.command()
@model_options
@json_option
def undo(as_json: bool, **flags: Any) -> None:
    """Take the last rating or preference back, bit for bit."""
    from ruvmlx.sona.adapter_history import newest_question

    history = _history(flags)
    question, before = newest_question(history), history.status()
    found = history.undo()
    said = [_undone_line(found.undone), reply_line(question)]
    if found.consolidations < before.consolidations:
        back = with_flags(f"`ruvmlx learn rollback {before.adapter_version}`", flags)
        said.append(f"The background learning after it no longer counts, either: {back} brings both back.")
    _show_status(history, found, as_json, " ".join(filter(None, said)), flags)


def _undone_line(kind: str) -> str:
    """Return a sentence about what `undo` took back. kind: `LearnStatus.undone`."""
    return {
        "preference": "Your newest choice between two replies no longer counts.",
        "change of a rating": (
            "Your newest change of a rating no longer counts. The reply has the rating that it had before."
        ),
    }.get(kind, "Your newest rating no longer counts.")


@learn.command()
@click.argument("version", type=WholeNumber(min=0), required=False)
@click.option(
    "--before", type=Date(), metavar="DATE",
    help="Instead of VERSION: as it was at this date, 2026-11-20 or '2026-11-20 18:30', local time.",
)  # fmt: skip
@model_options
@json_option
def rollback(version: int | None, before: datetime | None, as_json: bool, **flags: Any) -> None:
    """Return to an earlier VERSION (0 is the original model), or to the one in use at a date."""
    if (version is None) == (before is None):
        raise UsageError("give a version, as in `ruvmlx learn rollback 12`, or a date with --before.")
    history = _history(flags)
    was = history.version()
    if version is not None:
        found = history.rollback(version)
        wanted = version
    else:
        found, wanted = _before(history, before)
    gone = "" if wanted == found.adapter_version else _gone_line(wanted, found.adapter_version)
    line = _rollback_line(was, found.adapter_version, has_date=version is None)
    _show_status(history, found, as_json, with_flags(line + gone, flags), flags)


def _gone_line(wanted: int, version: int) -> str:
    return (
        f" Version {wanted} was in use then, but it is no longer kept: {version} is the last one before it."
    )


def _rollback_line(was: int, version: int, has_date: bool) -> str:
    """Return the line about a rollback. was: the version before it. has_date: the user gave a date."""
    if was != version:
        meaning = "" if version else ", the original model"
        # At version 0, the next line says how to go back.
        back = f" `ruvmlx learn rollback {was}` goes back to it." if was and version else ""
        return f"The adapter is at version {version}{meaning}. Before, it was at version {was}.{back}"
    here = f"at version {version}" if version else "the original model"
    if has_date:
        return f"There is nothing to go back from: the adapter was {here} then, as it is now."
    return f"Nothing changed: the adapter is {here} already."


def _before(history: Any, date: datetime | None) -> Any:
    assert date is not None
    try:
        when = date.timestamp()
    except (OverflowError, OSError, ValueError):
        raise UsageError(f"--before {date.date()}: this date is out of range.") from None
    return history.rollback_before(when)


@learn.command()
@click.option("--steps", type=WholeNumber(min=1), help="Training steps; 12 by default.")
@click.option("--ewc", type=Number(min=0), help="How strongly to keep what --deep recorded.")
@click.option("--dropout", type=Number(min=0, max=0.9), help="Share of inputs that each text leaves out.")
@click.option(
    "--deep", is_flag=True, help="Do not train: record what was learned, tidy the memory of questions."
)
@model_options
@json_option
def consolidate(
    steps: int | None, ewc: float | None, dropout: float | None, deep: bool, as_json: bool, **flags: Any
) -> None:
    """Learn from all your ratings together now. A test decides whether the result is used.

    The setting slow_loop says how; --steps, --ewc and --dropout always train. Ctrl-C stops it; the next call
    continues.
    Once a week, and when your questions or ratings change, it first does what --deep does.
    """
    given = {"steps": steps, "ewc": ewc, "dropout": dropout}
    if deep and any(value is not None for value in given.values()):
        raise UsageError("--deep trains nothing, so it takes none of --steps, --ewc and --dropout.")
    cancel = threading.Event()
    with open_runtime(resolve(flags)) as runtime, ctrl_c_sets(cancel):
        report = _deepen(runtime, cancel) if deep else _consolidate(runtime, given, cancel)
        status = runtime.status()
        kv = runtime.tiers.review(cancel)
        tuned = _try_what_is_due(runtime, cancel)
    facts = status_facts(status)
    if as_json:
        print_json(facts | report | {"kv": kv, "tuned": tuned})
    else:
        say(_result_line(report))
        for line in status_lines(facts | {"reason": ""}):  # _result_line has this result
            say(with_flags(line, flags))
        if kv["changed"]:
            show(f"KV cache: {kv['reason']} (see `ruvmlx learn kv`)")
        for one in tuned:
            show(f"Speed: {tuning_line(one)}")
    if cancel.is_set():
        raise KeyboardInterrupt


def _result_line(report: dict[str, Any]) -> str:
    """Return a sentence about the result of a run of a slow loop. report: what the loop returned."""
    if "anchored" in report:
        return f"{'Anchored' if report['anchored'] else 'Nothing anchored'}: {report['reason']}."
    return f"{'The result is in use' if report['promoted'] else 'Nothing changed'}: {report['reason']}."


def _try_what_is_due(runtime: Any, cancel: threading.Event) -> list[dict[str, Any]]:
    """Try what can make replies faster, if replies are slow. Return a report for each trial."""
    reports: list[dict[str, Any]] = []
    while not cancel.is_set() and runtime.optimizer.due_knob() is not None:
        reports.append(runtime.optimizer.work(cancel))
        if reports[-1]["outcome"] == "none":
            break
    return reports


def _consolidate(runtime: Any, given: dict[str, Any], cancel: threading.Event) -> dict[str, Any]:
    from ruvmlx.sona.background import TrainingSettings

    from .training_line import training_line

    chosen = {name: value for name, value in given.items() if value is not None}
    settings = TrainingSettings(targets=runtime.settings.base_targets, **chosen) if chosen else None
    with training_line("steps") as line:
        return runtime.learning.consolidate(line.step if line else None, cancel, settings)


def _deepen(runtime: Any, cancel: threading.Event) -> dict[str, Any]:
    """Run the deep loop, which records what the model learned. The loop puts no new weights into use, so the
    fields `promoted` and `ppl_change` of the result are None."""
    from .training_line import training_line

    with training_line("replies") as line:
        report = runtime.learning.loops.deepen(line.step if line else None, cancel)
    return {"promoted": None, "ppl_change": None} | report


@learn.command()
@model_options
@json_option
def reset(as_json: bool, **flags: Any) -> None:
    """Start over from the original model. Versions stay on disk: `learn rollback VERSION` returns to one."""
    history = _history(flags)
    done = "The adapter starts over, as after `ruvmlx learn rollback 0`. Nothing was deleted."
    _show_status(history, history.rollback(0), as_json, with_flags(done, flags), flags)


_NEEDS = {
    "kto": "a rated reply whose chat was not deleted",
    "dpo": "a good and a bad reply to the same question, or a choice between two replies",
    "sft": "a reply that you rated better than usual",
}


@learn.command()
@click.option(
    "--format", "format_", type=click.Choice(["kto", "dpo", "sft"]), default="kto", show_default=True
)
@model_options
@json_option
def export(format_: str, as_json: bool, **flags: Any) -> None:
    """Print your rated replies as JSON lines, for training elsewhere; with --json, as one array."""
    from ruvmlx.sona.export_examples import rows

    history = _history(flags, reading=True)
    found = list(rows(history, format_))
    for row in [found] if as_json else found:
        print_json(row)
    if not found and not as_json:
        why = f"The format {format_} needs {_NEEDS[format_]}. {HOW_TO_RATE}"
        why = nothing_in_use(status_facts(history.status())) or why
        log(with_flags(f"Nothing to export. {why}", flags))


@learn.command("chart")
@click.option("--svg", type=NewPath(path_type=Path), help="Write the chart as SVG to this new file.")
@model_options
@json_option
def taste_chart(svg: Path | None, as_json: bool, **flags: Any) -> None:
    """Compare each of your ratings with what was predicted before you gave it, from earlier ratings."""
    from ruvmlx.chats.chat_file import write_new
    from ruvmlx.sona.user_taste import UserTaste

    from . import taste_chart as chart

    history = _history(flags, reading=True)
    record = UserTaste(history).record()
    if svg:
        write_new(svg, chart.svg(record))
    if as_json:
        names = ("error", "usual_error", "correlation")
        print_json(asdict(record) | {name: getattr(record, name) for name in names})
        return
    if svg:
        say(f"Written: {svg}")
    else:
        for line in chart.plot(record) if record.ratings else []:
            show_whole(line)
    say(with_flags(chart.summary(record, nothing_in_use(status_facts(history.status()))), flags))


@learn.command("kv")
@click.option("--measure", is_flag=True, help="Measure on your newest long replies first; Ctrl-C stops it.")
@model_options
@json_option
def kv_policy(measure: bool, as_json: bool, **flags: Any) -> None:
    """Show the KV cache's precision by the age of its tokens, the reason, and the measured cost.

    Ratings do not affect it. --kv and the settings kv and kv_tiers override it.
    """
    report: dict[str, Any] = {}
    cancel = threading.Event()
    if measure:
        with open_runtime(resolve(flags)) as runtime, ctrl_c_sets(cancel):
            report = runtime.tiers.review(cancel)
            status, lack = runtime.tiers.status(), runtime.backend.caveat
    else:
        history, lack = _tier_history(flags)
        status = history.status()
    facts = kv_facts(status) | {k: report[k] for k in ("measured", "changed", "stopped") if k in report}
    if as_json:
        print_json(facts)
    else:
        show_kv(facts)
    if lack:
        log(f"note: {lack}")
    if cancel.is_set():
        raise KeyboardInterrupt


def _tier_history(flags: dict[str, Any]):
    """Return the history of the chosen model's KV cache policies, without loading weights, and the reason for
    which the backend has no KV pages ("": it has KV pages)."""
    from ruvmlx.backends.select import asked_policy, describe, lack_of_pages
    from ruvmlx.engine.model_identity import identify
    from ruvmlx.kv_tuning.tier_measurement import TierHistory
    from ruvmlx.store import Store

    settings = resolve(flags)
    store = Store(config.store_file(), reading=True)
    model, backend = identify(store, load_model(settings.model), False), describe(settings.backend)
    asked, lack = asked_policy(settings.kv, model.shape, settings.kv_tiers), lack_of_pages(backend, model)
    return TierHistory(store, model, backend.name, asked, not lack), lack


VERBS = [learn]

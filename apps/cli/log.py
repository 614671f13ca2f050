"""The command `ruvmlx log` shows, checks and exports the witness log. This log records requests, ratings and
adapters as rows, and each row has the hash of the row before it."""

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ruvmlx import settings
from ruvmlx.errors import CorruptFile, NotFound, UsageError
from ruvmlx.text import one_line

from .completion_values import complete_log_kinds
from .number_types import Date, WholeNumber
from .output import json_option, print_json
from .path_types import OutputFile
from .text_output import TableColumn, count, hint, say, table
from .verb import VerbGroup

if TYPE_CHECKING:
    from ruvmlx.store import Store
    from ruvmlx.store.audit_log import LogFilter, WitnessRow

F = TypeVar("F", bound=Callable[..., Any])
MOST_ROWS = 10_000  # the maximum number of rows that `log show` prints; `log export` has no limit
EMPTY = (
    "The log is empty. It gets a row for each reply, for each rating, and each time an adapter learns or "
    "forgets something."
)
NOTHING_TO_CHECK = (
    "The log is empty, so there is nothing to verify. The check finds rows that somebody changed."
)
_PLURALS = {"summary": "summaries", "reply": "replies"}  # the plurals of kinds that are not the kind with "s"
_NS = 1_000_000_000
_LAST = 2**63 - 1  # the last time of a row, in nanoseconds since 1970: the year 2262
_HEX = re.compile(r"[0-9a-f]{32,}")
_SHORT = 12  # the number of digits that a table shows of a long hexadecimal number
_COLUMNS = (
    TableColumn("ROW", right=True),
    TableColumn("TIME"),
    TableColumn("KIND", style="bold"),
    TableColumn("DETAIL", cut=True),
)


def filter_options(function: F) -> F:
    """Add the options --kind, --since and --until, which select rows of the log, to a verb."""
    day = Date()
    for option in (
        click.option("--until", type=day, metavar="DATE", help="Only rows from before this time."),
        click.option("--since", type=day, metavar="DATE", help="Only rows from this time on."),
        click.option(
            "--kind",
            "kinds",
            multiple=True,
            shell_complete=complete_log_kinds,
            help="Only rows of this kind; may be given several times.",
        ),
    ):
        function = option(function)
    return function


def _store() -> "Store":
    from ruvmlx.store import Store

    return Store(settings.store_file(), reading=True)


def _filter(kinds: tuple[str, ...], since: datetime | None, until: datetime | None) -> "LogFilter":
    from ruvmlx.store.audit_log import LogFilter

    return LogFilter(kinds, *(_nanoseconds(day) if day else None for day in (since, until)))


def _nanoseconds(day: datetime) -> int:
    """Return the nanoseconds from 1970 to this time, or the nearest time that a row can have. Raises
    UsageError if the time is too far from today."""
    try:
        return max(-_LAST, min(int(day.timestamp()) * _NS, _LAST))
    except (OverflowError, OSError, ValueError):
        raise UsageError(
            f"--since, --until: {day.date()} is out of range; give a date from 1970 on."
        ) from None


def _facts(row: "WitnessRow") -> dict[str, Any]:
    """Return a row of the log for JSON. The text of the row's time has all nanoseconds, because the row's
    hash was computed from the exact time."""
    seconds, ns = divmod(row.time, _NS)
    at = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ns:09}Z"
    return {"n": row.seq, "time": at, "kind": row.kind, "detail": row.body, "hash": row.hash}


def _detail(body: dict[str, Any]) -> str:
    """Return the fields of a log row as text: "adapter=default version=3". Leave out fields without a value,
    round fractions to four digits, and shorten long hexadecimal numbers."""
    return " ".join(f"{name}={_short(value)}" for name, value in body.items() if value is not None)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return one_line(text[:_SHORT] if _HEX.fullmatch(text) else text)


@click.group(cls=VerbGroup)
def log() -> None:
    """The witness log: a row for every request, failed ones too, every rating and every change of an adapter.

    Each row holds the hash of the row before it. Rows hold ids, numbers, names of adapters
    and values of settings, never words of a chat.
    """


@log.command("show")
@filter_options
@click.option(
    "--limit", type=WholeNumber(1, MOST_ROWS), default=20, show_default=True, help="Most rows to print."
)
@json_option
def show_log(limit: int, as_json: bool, **wanted: Any) -> None:
    """Print the newest rows, the newest one last."""
    store, chosen = _store(), _filter(**wanted)
    rows, kinds = store.witness.newest(chosen, limit), store.witness.counts(chosen)
    if as_json:
        unbroken = store.witness.check().broken is None
        print_json({"rows": [_facts(row) for row in rows], "kinds": kinds, "unbroken": unbroken})
        return
    if not rows:
        say(_nothing_to_show(store))
        return
    table(_COLUMNS, [(f"{row.seq:,}", _local(row.time), row.kind, _detail(row.body)) for row in rows])
    found = ", ".join(count(n, kind, _PLURALS.get(kind, "")) for kind, n in kinds.items())
    hint(f"The newest {len(rows):,} of {count(sum(kinds.values()), 'row')}: {found}.")


def _nothing_to_show(store: "Store") -> str:
    kinds = store.witness.counts(_filter((), None, None))
    return f"No such rows. The log's kinds are: {', '.join(kinds)}." if kinds else EMPTY


def _local(ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ns // _NS))


@log.command("verify")
@click.option("--has", "kept", metavar="HASH", help="Is the row there that has this hash, or begins with it?")
@json_option
def verify_log(kept: str | None, as_json: bool) -> None:
    """Compute every hash again, and compare ratings, adapters and choices with the log.

    Someone who can write the file can make a whole new log. To see that, keep the last hash elsewhere and
    ask for it with --has.
    """
    from ruvmlx.store.audit import disagreement

    if kept is not None and len(kept) < _SHORT:
        raise UsageError(f"--has {kept!r} is too short; give at least {_SHORT} letters of the hash.")
    store = _store()
    chain = store.witness.check()
    differs = disagreement(store) if chain.broken is None else ""
    number = store.witness.number(kept) if kept else None
    if as_json:
        facts = {"count": chain.rows, "head": chain.head, "unbroken": chain.broken is None}
        facts |= {"broken": chain.broken, "why": chain.why, "disagreement": differs, "has": number}
        print_json(facts)
    if chain.broken is not None:
        raise CorruptFile(f"the witness log breaks at row {chain.broken}: {chain.why}.")
    if differs:
        raise CorruptFile(f"the store and its witness log disagree: {differs}.")
    if kept and number is None:
        raise NotFound(f"no row of the log has the hash {kept}; it is not the log that this hash is from.")
    if not as_json:
        rows = f"{count(chain.rows, 'row')}, unbroken; ratings, adapters and choices agree with them."
        say(rows if chain.rows else NOTHING_TO_CHECK)
        if number is not None:
            hint(f"That hash is row {number:,}.")
        elif chain.rows:
            hint(
                f"The last hash is {chain.head}. Keep it elsewhere: "
                "`ruvmlx log verify --has HASH` says later whether this is still the same log."
            )


@log.command("export")
@filter_options
@click.option("--out", "-o", type=OutputFile(path_type=Path), help="File to write; it must not exist yet.")
@json_option
def export_log(out: Path | None, as_json: bool, **wanted: Any) -> None:
    """Print rows as JSON lines, the oldest first; with --json as one object."""
    store = _store()
    rows = map(_facts, store.witness.walk(_filter(**wanted)))
    if out is not None:
        from ruvmlx.chats.chat_file import write_new

        number = write_new(out, (json.dumps(row) + "\n" for row in rows))
        if as_json:
            print_json({"file": str(out), "count": number})
        else:
            say(f"{out} has {count(number, 'row')}.")
            if not number:
                say(_nothing_to_show(store))
    elif as_json:
        print_json({"rows": list(rows), "unbroken": store.witness.check().broken is None})
    else:
        for row in rows:
            print_json(row)


VERBS = [log]

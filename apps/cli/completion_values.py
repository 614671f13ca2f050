"""This module returns the values that a shell can complete: names of models, adapters, chats and settings.

A shell waits for each completion, so this module imports no large module. The module lists files, and it
reads the tables of the store with sqlite3 alone, read-only. If an error occurs, the shell gets no values.
"""

import contextlib
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ruvmlx import settings
from ruvmlx.text import one_line

_BUSY = 0.1  # seconds to wait for another process that writes to the store
_CHATS = (
    "SELECT id, title FROM sessions WHERE deleted IS {}"
    " AND (id LIKE ? ESCAPE '\\' OR title LIKE ? ESCAPE '\\')"
    " ORDER BY updated DESC LIMIT 50"
)


def rows(sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return rows of the store's tables, or [] if there is no store or the query fails. The function does not
    use the program's own code for the store, because this code would check and upgrade the store."""
    path = settings.store_file()
    if not path.exists():
        return []
    with contextlib.suppress(sqlite3.Error):
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY)
        with contextlib.closing(db):
            return list(db.execute(sql, values))
    return []


def complete_adapters(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    found = [name for (name,) in rows("SELECT DISTINCT name FROM adapters ORDER BY name")]
    return _beginning([*found, *({"default", "none"} - {*found})], incomplete)


def complete_models(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the names of models that are on this machine. If the user types a path, complete file
    names."""
    if incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="file")]
    return _beginning(["starter", settings.AUTO, *cached_names()], incomplete)


def complete_fetched(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _beginning(cached_names(), incomplete)


def cached_names() -> list[str]:
    """Return the name owner/name of each repository in the Hugging Face cache, from the names of the cache's
    folders. The cache is that of `hub_cache` (ruvmlx/models/find/hub.py), whose module is large."""
    base = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or f"{base}/hub"))
    with contextlib.suppress(OSError):
        return sorted(p.name[8:].replace("--", "/", 1) for p in cache.glob("models--*--*"))
    return []


def complete_chats(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete ids of at most 50 chats, the chat that was used last first. The typed text can also be a part
    of a chat's title, because the shell shows the title beside the id."""
    last = [CompletionItem("last", help="the chat used last")] if "last".startswith(incomplete) else []
    return [*last, *_chats("NULL", incomplete)]


def complete_deleted_chats(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _chats("NOT NULL", incomplete)


def complete_log_kinds(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _beginning([kind for (kind,) in rows("SELECT DISTINCT kind FROM witness")], incomplete)


def _chats(deleted: str, incomplete: str) -> list[CompletionItem]:
    typed = "".join("\\" + c if c in "%_\\" else c for c in incomplete)
    found = rows(_CHATS.format(deleted), f"{typed}%", f"%{typed}%")
    return [CompletionItem(id_, help=one_line(title) or None) for id_, title in found]


def complete_setting_names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    specs = settings.SPECS.items()
    return [CompletionItem(name, help=spec.doc) for name, spec in specs if name.startswith(incomplete)]


def complete_setting_values(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the values of the setting whose name the user typed before. If no values of the setting are
    known, complete nothing."""
    name = context.params.get("name")
    if name == "adapter":
        return complete_adapters(context, _, incomplete)
    if name == "model":
        return complete_models(context, _, incomplete)
    spec = settings.SPECS.get(name or "")
    if spec is None:
        return []
    word = (spec.word,) if spec.word else ()
    return _beginning(spec.choices or (("on", "off") if spec.kind is bool else word), incomplete)


def complete_replies(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the word `last` and the ids of the newest replies."""
    found = rows("SELECT id, text FROM replies ORDER BY seq DESC LIMIT 20")
    items = [("last", "the newest reply"), *((id_, one_line(text)[:60]) for id_, text in found)]
    return [CompletionItem(id_, help=said or None) for id_, said in items if id_.startswith(incomplete)]


def complete_ratings(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from ruvmlx.ratings import RATINGS

    return _beginning(RATINGS, incomplete)


def _beginning(names: Sequence[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]

"""The command `ruvmlx sessions` lists, searches, exports and deletes saved chats."""

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ruvmlx import settings
from ruvmlx.errors import CorruptFile, NotFound, RuvmlxError, UsageError, error_line
from ruvmlx.text import excerpt, one_line

from .completion_values import complete_chats, complete_deleted_chats, complete_replies
from .options import open_runtime, resolve, setting_options
from .output import json_option, log, print_json, show_whole
from .text_output import TableColumn, ago, hint, say, table
from .text_output import count as count_of
from .verb import VerbGroup

chat_id = click.argument("session_id", metavar="ID|last", shell_complete=complete_chats)


def _store(reading: bool = False):
    from ruvmlx.store import Store

    return Store(settings.store_file(), reading)


def _facts(session) -> dict[str, Any]:
    return {"id": session.id, "title": session.title, "turns": session.turns, "updated": session.updated} | {
        "pinned": bool(session.pinned),
        "folder": session.folder,
    }


COLUMNS = (
    TableColumn("ID", style="bold"),
    TableColumn("USED"),
    TableColumn("MESSAGES", right=True),
    TableColumn("TITLE", cut=True),
)
FOUND = (TableColumn("ID", style="bold"), TableColumn("TITLE", cut=True), TableColumn("FOUND", cut=True))
ALIKE = (FOUND[0], TableColumn("LIKE IT", right=True), FOUND[1], TableColumn("ASKED", cut=True))


def _show_rows(rows: Sequence[dict[str, Any]]) -> None:
    table(COLUMNS, [(r["id"], ago(r["updated"]), f"{r['turns']:,}", _title(r)) for r in rows])


def _title(row: dict[str, Any]) -> str:
    folder = f"{one_line(row['folder'])} › " if row["folder"] else ""
    return ("★ " if row["pinned"] else "") + folder + (one_line(row["title"]) or "Untitled")


@click.group(cls=VerbGroup)
def sessions() -> None:
    """Saved chats. An ID may be shortened; `last` is the chat used last."""


@sessions.command("ls")
@click.option("--folder", metavar="NAME", help="Only those of this folder.")
@json_option
def list_sessions(folder: str | None, as_json: bool) -> None:
    """List all chats: pinned ones first, then the newest."""
    rows = [_facts(s) for s in _store(reading=True).chats.all() if folder in (None, s.folder)]
    rows.sort(key=lambda row: not row["pinned"])
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(f"No chat is in {folder!r}." if folder else "No chats yet; `ruvmlx chat` begins one.")
        return
    _show_rows(rows)
    hint("`ruvmlx chat --session ID` continues one; an ID may be shortened.")


@sessions.command("show")
@chat_id
@json_option
def show_session(session_id: str, as_json: bool) -> None:
    """Print one chat: the branch in use."""
    store = _store(reading=True)
    session_id = store.chats.find(session_id)
    session, messages = store.chats.get(session_id), store.messages.branch(session_id)
    if as_json:
        rows = [asdict(message) | {"calls": json.loads(message.calls or "[]")} for message in messages]
        print_json(_facts(session) | {"system": session.system, "messages": rows})
        return
    from ruvmlx.chats.tool_turns import calls_of_json

    for message in messages:
        mark = f" [{message.rating}]" if message.rating else ""
        branch = f" ({message.branch} of {message.branches})" if message.branches > 1 else ""
        calls = calls_of_json(message.calls) if message.role == "tool" else ()
        called = "".join(f" {call.name} {call.arguments}" for call in calls)
        if message.content or calls:
            show_whole(f"{message.role.capitalize()}{called}{mark}{branch}: {message.content}\n")


@sessions.command("search")
@click.argument("words", nargs=-1)
@click.option("--like", metavar="TEXT", help="Find chats about what this text is about, in any words.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Most chats with --like."
)
@setting_options("model", "backend", "threads")
@json_option
def search_sessions(
    words: tuple[str, ...], like: str | None, limit: int, as_json: bool, **flags: Any
) -> None:
    """Find messages, titles and system prompts that contain all WORDS; parts of words count.

    With --like, find chats in which you asked something like TEXT, the most like first. The model reads TEXT
    for this.
    """
    if bool(words) == (like is not None):
        raise UsageError('give words, or a text to compare with: `sessions search --like "trips by train"`.')
    if like is not None:
        _show_alike(like, limit, as_json, flags)
        return
    wanted = " ".join(words)
    found = _store(reading=True).search.find(wanted)
    if as_json:
        places = [{"message_id": f.message_id, "role": f.role, "text": f.content} for f in found]
        print_json([_facts(f.session) | place for f, place in zip(found, places, strict=True)])
        return
    if not found:
        log(f"No chat has {wanted!r}.")
        return
    table(FOUND, [(hit.session.id, one_line(hit.session.title), _found_words(hit, wanted)) for hit in found])
    hint(f"`ruvmlx chat --session ID --find {shlex.quote(wanted)}` opens a chat there.")


def _found_words(hit: Any, wanted: str) -> str:
    """Return where the search found its words, and the text around these words."""
    return "in the title" if hit.message_id is None else f"{hit.role}: {excerpt(hit.content, wanted.split())}"


def _show_alike(text: str, limit: int, as_json: bool, flags: dict[str, Any]) -> None:
    from ruvmlx.progress import Progress
    from ruvmlx.sona.similar_chats import MOST_READ, chats_like

    from ..progress import watching

    with open_runtime(resolve(flags | {"adapter": "none"})) as runtime, watching() as watch:
        alike = chats_like(
            runtime.store, runtime.model, runtime.backend, text, limit,
            lambda count: watch.progress(Progress(f"Reading message {count:,}")),
        )  # fmt: skip
    hits = alike.found
    if alike.unread:
        log(f"note: {MOST_READ} messages were read; {alike.unread} older ones were not compared.")
    if as_json:
        print_json([_facts(h.session) | _like(h) for h in hits])
    elif hits:
        rows = [(h.session.id, f"{h.similarity:.0%}", h.session.title, excerpt(h.content, [])) for h in hits]
        table(ALIKE, rows)
    else:
        log("no chat is about that.")


def _like(hit: Any) -> dict[str, Any]:
    return {"message_id": hit.message_id, "text": hit.content, "similarity": round(hit.similarity, 4)}


@sessions.command("export")
@chat_id
@click.option(
    "--format", "form", type=click.Choice(["md", "json"]), help="By default the file's ending, or md."
)
@click.option("--out", "-o", type=click.Path(path_type=Path), help="File to write; it must not exist yet.")
@json_option
def export_session(session_id: str, form: str | None, out: Path | None, as_json: bool) -> None:
    """Export a chat as Markdown, or as JSON with all branches, which can be imported."""
    from ruvmlx.chats.chat_file import as_json as whole
    from ruvmlx.chats.chat_file import as_markdown, write_new, writes_json

    store = _store(reading=True)
    session_id = store.chats.find(session_id)
    if as_json or form == "json" or (form is None and out is not None and writes_json(out)):
        text = json.dumps(whole(store, session_id), indent=1) + "\n"
    else:
        text = as_markdown(store, session_id)
    if out is None:
        click.echo(text, nl=False)
        return
    write_new(out, text)


@sessions.command("import")
@click.argument(
    "files", metavar="FILE|FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path)
)  # fmt: skip
@json_option
def import_sessions(files: tuple[Path, ...], as_json: bool) -> None:
    """Import chats from JSON files (- is standard input) or from all those of a folder.

    A file is an export, or a list of {role, content}. Dates are kept. A chat that is there already, perhaps
    continued since, is not imported again.
    """
    from ruvmlx.chats.chat_file import chat_files

    every = [file for path in files for file in ([path] if str(path) == "-" else chat_files(path))]
    is_one = len(files) == 1 and every == list(files)
    store, failures = _store(), list[RuvmlxError]()
    with _watching_many(len(every)) as count:
        found = list(_import_each(store, every, failures, count))
    if is_one and failures:
        raise failures[0]
    rows = [_facts(store.chats.get(one.session_id)) | {"is_new": one.is_new} for one in found]
    if as_json:
        print_json(rows[0] if is_one else rows)
    else:
        _show_rows([row for row in rows if row["is_new"] or is_one])
        _tell_imported(rows, failures)
    if failures:
        click.get_current_context().exit(failures[0].exit_code)


def _import_each(
    store: Any, files: Sequence[Path], failures: list[RuvmlxError], count: Callable[[], None]
) -> Iterator[Any]:
    """Import each file and yield the result. If an import fails, append its error to `failures`."""
    from ruvmlx.chats.chat_file import import_once, read_bytes, read_limited

    for file in files:
        try:
            here = str(file) == "-" and sys.stdin
            data = read_limited(sys.stdin.buffer, "standard input") if here else read_bytes(file)
            yield import_once(store, data, one_line(str(file)))
        except (CorruptFile, UsageError) as e:
            failures.append(e)
        count()


@contextmanager
def _watching_many(total: int) -> Iterator[Callable[[], None]]:
    """Yield a function that counts one more imported file, and shows the progress of several files."""
    from ruvmlx.progress import Count

    from ..progress import watching

    done = Count("Importing", total, unit="files")
    with watching() as watch:

        def count() -> None:
            done.add(1)
            if total > 1:
                watch.progress(done.now())

        yield count


def _tell_imported(rows: Sequence[dict[str, Any]], failures: Sequence[RuvmlxError]) -> None:
    for error in failures:
        log(f"Not imported: {error_line(error)}")
    new = sum(row["is_new"] for row in rows)
    if new < len(rows) or len(rows) + len(failures) > 1:
        failed = f", {count_of(len(failures), 'file')} not" if failures else ""
        log(f"{count_of(new, 'chat')} imported, {len(rows) - new:,} there already{failed}.")


@sessions.command("rename")
@chat_id
@click.argument("title")
def rename_session(session_id: str, title: str) -> None:
    """Rename a chat."""
    _change(session_id, lambda chats, found: chats.set_title(found, title), "Renamed")


def _change(session_id: str, change: Callable[[Any, str], None], done: str) -> None:
    """Change a saved chat. Print `done` (words for the change) and the chat's row of the list."""
    chats = _store().chats
    session_id = chats.find(session_id)
    change(chats, session_id)
    log(f"{done}: {_title(_facts(chats.get(session_id)))}")


@sessions.command("pin")
@chat_id
@click.option("--off", is_flag=True, help="No longer.")
def pin_session(session_id: str, off: bool) -> None:
    """Show a chat first in lists."""
    _change(session_id, lambda chats, id_: chats.pin(id_, not off), "No longer pinned" if off else "Pinned")


@sessions.command("folder")
@chat_id
@click.argument("name", required=False)
def put_in_folder(session_id: str, name: str | None) -> None:
    """Put a chat into the folder NAME of lists; without NAME, out of it."""
    folder = one_line(name or "")
    done = f"Moved to folder {folder}" if folder else "Moved out of its folder"
    _change(session_id, lambda chats, found: chats.set_folder(found, folder), done)


@sessions.command("fork")
@chat_id
@json_option
def fork_session(session_id: str, as_json: bool) -> None:
    """Copy a chat, to continue it differently."""
    store = _store()
    fork = store.chats.fork(store.chats.find(session_id))
    if as_json:
        print_json(_facts(store.chats.get(fork)))
    else:
        _show_rows([_facts(store.chats.get(fork))])


@sessions.command("rm")
@chat_id
@click.option("--now", is_flag=True, help="Delete it for good.")
def remove_session(session_id: str, now: bool) -> None:
    """Delete a chat. For a day, `restore` brings it back. What was learned from its ratings stays."""
    from ruvmlx.chats import soft_delete

    store = _store()
    session_id = _find_chat(store, session_id, deleted_too=now)
    title = one_line(store.chats.get(session_id).title) or "Untitled"
    soft_delete.delete_older(store)
    if now:
        gone = soft_delete.delete(store, session_id)
        log(f"Deleted for good: {title}")
        _warn_of_readers(gone)
    else:
        store.chats.soft_delete(session_id)
        log(f"Deleted: {title}")
        log(f"`ruvmlx sessions restore {session_id}` brings it back for a day.")


def _find_chat(store: Any, beginning: str, deleted_too: bool) -> str:
    """Return the id of the chat whose id begins with `beginning`. deleted_too: True to include deleted chats
    that the user can still restore."""
    try:
        return store.chats.find(beginning)
    except NotFound:
        if not deleted_too:
            raise
    return store.chats.find_soft_deleted(beginning)


def _warn_of_readers(gone: bool) -> None:
    if not gone:
        log("Another ruvmlx reads the store: copies of the words stay in its log until that program ends.")


@sessions.command("forget")
@click.argument("reply_id", metavar="REPLY_ID|last", required=False, shell_complete=complete_replies)
@click.option("--all", "every", is_flag=True, help="All replies that belong to no chat.")
@json_option
def forget_replies(reply_id: str | None, every: bool, as_json: bool) -> None:
    """Delete the words of a reply outside chats: of `generate`, or to a program. What was learned stays."""
    from ruvmlx.chats import soft_delete

    if every == (reply_id is not None):
        raise UsageError("give a reply, as in `sessions forget last`, or --all.")
    store = _store()
    known = store.replies.outside_chats()
    chosen = known if reply_id is None else [store.replies.get(reply_id).id]
    if not set(chosen) <= set(known):
        raise UsageError(f"reply {chosen[0]} belongs to a chat, or is gone; `sessions rm` deletes a chat.")
    gone = soft_delete.forget(store, chosen)
    if as_json:
        print_json({"forgotten": chosen})
    else:
        log(f"Deleted the words of {count_of(len(chosen), 'reply', 'replies')} outside chats.")
    _warn_of_readers(gone)


@sessions.command("restore")
@click.argument("session_id", metavar="ID|last", required=False, shell_complete=complete_deleted_chats)
@json_option
def restore_session(session_id: str | None, as_json: bool) -> None:
    """Restore a deleted chat; without an ID, list the deleted chats, the newest deletion first."""
    from ruvmlx.chats import soft_delete

    store = _store()
    soft_delete.delete_older(store)
    rows = [_facts(s) for s in store.chats.soft_deleted()]
    if session_id is not None:
        session_id = store.chats.find_soft_deleted(session_id)
        store.chats.restore(session_id)
        rows = [row for row in rows if row["id"] == session_id]
    if as_json:
        print_json(rows)
        return
    if not rows:
        log("No deleted chat can be restored.")
        return
    _show_rows(rows)
    listed = "These chats are deleted. `ruvmlx sessions restore ID` brings one back."
    hint(listed if session_id is None else "It is back.")


VERBS = [sessions]

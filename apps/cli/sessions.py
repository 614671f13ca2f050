"""The command `ruvmlx sessions` lists, searches, exports and deletes saved chats."""

import json
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ruvmlx import settings
from ruvmlx.errors import NotFound, RuvmlxError, StoreError, UsageError
from ruvmlx.text import one_line, size

from .completion_values import complete_chats, complete_deleted_chats, complete_replies
from .number_types import WholeNumber
from .options import setting_options
from .output import json_option, log, print_json, show_whole
from .path_types import OutputFile
from .session_alike import show_alike
from .session_imports import import_each, tell_imported, watching_many
from .session_words import (
    FOUND,
    author,
    bare_title,
    forgotten_words,
    found_words,
    no_such_folder,
    session_facts,
    show_deleted_rows,
    show_rows,
    title_in_lists,
)
from .text_output import hint, is_terminal, say, table
from .verb import VerbGroup

chat_id = click.argument("session_id", metavar="ID|last", shell_complete=complete_chats)


def _store(reading: bool = False):
    from ruvmlx.store import Store

    store = Store(settings.store_file(), reading)
    with suppress(StoreError):  # on a full disk, the command shows only the complete replies
        store.drafts.recover()
    return store


@click.group(cls=VerbGroup)
def sessions() -> None:
    """Saved chats. An ID may be shortened; `last` is the chat used last."""


@sessions.command("ls")
@click.option("--folder", metavar="NAME", help="Only those of this folder.")
@json_option
def list_sessions(folder: str | None, as_json: bool) -> None:
    """List all chats: pinned ones first, then the newest.

    ★ marks a pinned chat. The words before › are the chat's folder. Where a command needs an ID, the first
    letters of the ID are enough, and `last` is the chat used last.
    """
    every, folder = _store(reading=True).chats.all(), folder and one_line(folder)
    rows = [session_facts(s) for s in every if folder in (None, one_line(s.folder))]
    rows.sort(key=lambda row: not row["pinned"])
    if as_json:
        print_json(rows)
        return
    if not rows:
        say(no_such_folder(folder, every) if folder else "No chats yet; `ruvmlx chat` begins one.")
        return
    show_rows(rows)
    hint("`ruvmlx chat --session ID` continues one.")
    newest = "" if folder else f" ({title_in_lists(session_facts(every[0]))})"
    hint("The first letters of an ID are enough.")
    hint(f"`last` instead of an ID is the chat that was used last{newest}.")
    if any(row["pinned"] or row["folder"] for row in rows):
        hint("★ marks a pinned chat. The name of a folder stands before ›.")


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
        print_json(session_facts(session) | {"system": session.system, "messages": rows})
        return
    from ruvmlx.chats.tool_turns import calls_of_json

    shown = []
    for message in messages:
        mark = f" [{message.rating}]" if message.rating else ""
        branch = f" ({message.branch} of {message.branches})" if message.branches > 1 else ""
        calls = calls_of_json(message.calls) if message.role == "tool" else ()
        called = "".join(f" {call.name} {call.arguments}" for call in calls)
        if message.content or calls:
            shown.append(f"{author(message.role)}{called}{mark}{branch}: {message.content}")
    if shown:
        show_whole("\n\n".join(shown))


@sessions.command("search")
@click.argument("words", nargs=-1)
@click.option("--like", metavar="TEXT", help="Find chats about what this text is about, in any words.")
@click.option(
    "--limit", type=WholeNumber(1, 1000), default=10, show_default=True, help="Most chats with --like."
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
    if bool("".join(words).strip()) == (like is not None):
        raise UsageError('give words, or a text to compare with: `sessions search --like "trips by train"`.')
    if like is not None:
        show_alike(like, limit, as_json, flags)
        return
    wanted = " ".join(words)
    found = _store(reading=True).search.find(wanted)
    if as_json:
        places = [{"message_id": f.message_id, "role": f.role, "text": f.content} for f in found]
        print_json([session_facts(f.session) | place for f, place in zip(found, places, strict=True)])
        return
    if not found:
        log(f"No chat has {wanted!r}.")
        return
    table(FOUND, [(hit.session.id, one_line(hit.session.title), found_words(hit, wanted)) for hit in found])
    is_one = len(wanted.split()) == 1
    open_one = f"`ruvmlx chat --session ID --find {shlex.quote(wanted)}`"
    hint(f"{open_one} opens the chat at its newest message with {'this word' if is_one else 'these words'}.")


@sessions.command("export")
@chat_id
@click.option(
    "--format", "form", type=click.Choice(["md", "json"]), help="By default the file's ending, or md."
)
@click.option("--out", "-o", type=OutputFile(path_type=Path), help="File to write; it must not exist yet.")
@json_option
def export_session(session_id: str, form: str | None, out: Path | None, as_json: bool) -> None:
    """Export a chat as Markdown, or as JSON with all branches, which can be imported."""
    from ruvmlx.chats.chat_file import as_json as whole
    from ruvmlx.chats.chat_file import as_markdown, write_new, writes_json

    store = _store(reading=True)
    session_id = store.chats.find(session_id)
    if form is None and out is not None and out.suffix:
        form = "json" if writes_json(out) else "md"
    if form == "json" or (as_json and (out is None or form is None)):
        text = json.dumps(whole(store, session_id), indent=1) + "\n"
    else:
        text = as_markdown(store, session_id)
    if out is not None:
        write_new(out, text)
        nbytes = len(text.encode())
        if as_json:
            print_json({"id": session_id, "file": str(out), "bytes": nbytes})
        else:
            log(f"Wrote {out}: {size(nbytes)}.")
        return
    click.echo(text, nl=False)
    if is_terminal():
        log(f"\nThe chat ends here. `ruvmlx sessions export {session_id} --out FILE` writes it to a file.")


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
    with watching_many(len(every)) as count:
        found = list(import_each(store, every, failures, count))
    if is_one and failures:
        raise failures[0]
    rows = [session_facts(store.chats.get(one.session_id)) | {"is_new": one.is_new} for one in found]
    if as_json:
        print_json(rows[0] if is_one else rows)
        if is_one:
            tell_imported(rows, failures)
    else:
        new = [row for row in rows if row["is_new"]]
        if new:
            say("Imported:")
        if new or is_one:
            show_rows(new or rows)
        tell_imported(rows, failures)
        if new:
            hint(
                f"`ruvmlx chat --session {new[0]['id']}` continues {'it' if len(new) == 1 else 'the first'}."
            )
    if failures:
        click.get_current_context().exit(failures[0].exit_code)


@sessions.command("rename")
@chat_id
@click.argument("title")
@json_option
def rename_session(session_id: str, title: str, as_json: bool) -> None:
    """Rename a chat."""
    if not one_line(title):
        raise UsageError("the title is empty; give a title with words.")
    before, after = _change(session_id, lambda chats, found: chats.set_title(found, title), as_json)
    if not as_json:
        log(f"Renamed: {bare_title(after)} (before: {bare_title(before)})")


def _change(session_id: str, change: Callable[[Any, str], None], as_json: bool) -> tuple[Any, Any]:
    """Change a saved chat. Return the chat before and after the change. as_json: True to print the changed
    chat as JSON."""
    chats = _store().chats
    session_id = chats.find(session_id)
    before = chats.get(session_id)
    change(chats, session_id)
    after = chats.get(session_id)
    if as_json:
        print_json(session_facts(after))
    return before, after


@sessions.command("pin")
@chat_id
@click.option("--off", is_flag=True, help="No longer.")
@json_option
def pin_session(session_id: str, off: bool, as_json: bool) -> None:
    """Show a chat first in lists."""
    _, pinned = _change(session_id, lambda chats, id_: chats.pin(id_, not off), as_json)
    if as_json:
        return
    if off:
        log(f"No longer pinned: {bare_title(pinned)}")
        return
    log(f"Pinned: {bare_title(pinned)}. It stands first in lists.")
    log(f"`ruvmlx sessions pin {pinned.id} --off` takes that back.")


@sessions.command("folder")
@chat_id
@click.argument("name", required=False)
@json_option
def put_in_folder(session_id: str, name: str | None, as_json: bool) -> None:
    """Put a chat into the folder NAME of lists; without NAME (or with none), out of it."""
    folder = "" if name == "none" else one_line(name or "")
    _, moved = _change(session_id, lambda chats, found: chats.set_folder(found, folder), as_json)
    if as_json:
        return
    if not folder:
        log(f"Moved out of its folder: {bare_title(moved)}")
        return
    log(f"Moved to folder {folder}: {bare_title(moved)}")
    log(f"`ruvmlx sessions ls --folder {shlex.quote(folder)}` lists the chats of this folder.")


@sessions.command("fork")
@chat_id
@json_option
def fork_session(session_id: str, as_json: bool) -> None:
    """Copy a chat, to continue it differently."""
    store = _store()
    fork = store.chats.fork(store.chats.find(session_id))
    if as_json:
        print_json(session_facts(store.chats.get(fork)))
        return
    say("Copied:")
    show_rows([session_facts(store.chats.get(fork))])
    hint(f"The copy has no pin and no folder. `ruvmlx chat --session {fork}` continues it.")


@sessions.command("rm")
@chat_id
@click.option("--now", is_flag=True, help="Delete it for good.")
@json_option
def remove_session(session_id: str, now: bool, as_json: bool) -> None:
    """Delete a chat. You can restore it within a day. What was learned from its ratings stays."""
    from ruvmlx.chats import soft_delete

    store = _store()
    session_id = _find_chat(store, session_id, deleted_too=now)
    chat = store.chats.get(session_id)
    soft_delete.delete_older(store)
    if now:
        gone = soft_delete.delete(store, session_id)
    else:
        gone = True
        store.chats.soft_delete(session_id)
    if as_json:
        print_json(session_facts(chat) | {"for_good": now})
    elif now:
        log(f"Deleted for good: {bare_title(chat)}")
    else:
        log(f"Deleted: {bare_title(chat)}")
        log(f"You can bring it back within a day: `ruvmlx sessions restore {session_id}`.")
    _warn_of_readers(store, gone)


def _find_chat(store: Any, beginning: str, deleted_too: bool) -> str:
    """Return the id of the chat whose id begins with `beginning`. deleted_too: True to include deleted chats
    that the user can still restore."""
    try:
        return store.chats.find(beginning)
    except NotFound:
        if not deleted_too:
            raise
    return store.chats.find_soft_deleted(beginning)


def _warn_of_readers(store: Any, gone: bool) -> None:
    from ruvmlx.chats.soft_delete import why_words_are_left

    if not gone:
        log(why_words_are_left(store))


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
    if reply_id == "last" and known:
        reply_id = known[-1]
    chosen = known if reply_id is None else [store.replies.get(reply_id, "forget").id]
    if not set(chosen) <= set(known):
        raise UsageError(f"reply {chosen[0]} belongs to a chat, or is gone; `sessions rm` deletes a chat.")
    gone = soft_delete.forget(store, chosen)
    if as_json:
        print_json({"forgotten": chosen})
    else:
        log(forgotten_words(len(chosen)))
    _warn_of_readers(store, gone)


@sessions.command("restore")
@click.argument("session_id", metavar="ID|last", required=False, shell_complete=complete_deleted_chats)
@json_option
def restore_session(session_id: str | None, as_json: bool) -> None:
    """Restore a deleted chat; without an ID, only list the deleted chats, the newest deletion first."""
    from ruvmlx.chats import soft_delete

    store = _store(reading=session_id is None)
    ends = soft_delete.ends(store)
    chats = [session for session in store.chats.soft_deleted() if time.time() < ends[session.id]]
    if session_id is not None:
        soft_delete.delete_older(store)
        session_id = store.chats.find_soft_deleted(session_id)
        store.chats.restore(session_id)
        chats = [session for session in chats if session.id == session_id]
    rows = [session_facts(session) for session in chats]
    if as_json:
        print_json(rows)
        return
    if not rows:
        log("No deleted chat can be restored.")
        return
    if session_id is not None:
        say("It is back:")
        show_rows(rows)
        return
    show_deleted_rows(rows, ends)


VERBS = [sessions]

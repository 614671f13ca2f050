"""`sessions`: saved chats."""

import time
from typing import Any

import click

from ruvmlx import config

from .output import json_option, print_json, show


def _store():
    from ruvmlx.store import Store

    return Store(config.store_file())


@click.group()
def sessions() -> None:
    """Saved chats."""


@sessions.command("ls")
@json_option
def list_sessions(as_json: bool) -> None:
    """All chats, the newest first."""
    rows: list[dict[str, Any]] = [
        {"id": s.id, "title": s.title, "turns": s.turns, "updated": s.updated} for s in _store().sessions()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["updated"]))
        show(f"{row['id']}  {when}  {row['turns']:>4}  {row['title']}")


@sessions.command("show")
@click.argument("session_id")
@json_option
def show_session(session_id: str, as_json: bool) -> None:
    """One chat, whole."""
    store = _store()
    session, messages = store.session(session_id), store.messages(session_id)
    if as_json:
        print_json({"id": session.id, "title": session.title, "system": session.system, "messages": messages})
        return
    for message in messages:
        mark = f" [{message.rating}]" if message.rating else ""
        show(f"{message.role.capitalize()}{mark}: {message.content}\n")


@sessions.command("rm")
@click.argument("session_id")
def remove_session(session_id: str) -> None:
    """Delete one chat. What was learned from its ratings stays."""
    _store().delete_session(session_id)


VERBS = [sessions]

"""This module stores drafts: unfinished replies. After a crash, the written part of a draft becomes a
reply."""

import json
import math
import os
import sqlite3
import uuid
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from ..errors import NotFound
from ..platform.files import IDLE_SECONDS, is_running
from .database import Database
from .replies import Replies, ReplyRow

# a second mark of this process, because in a container every start can have the same process number
_TOKEN = uuid.uuid4().hex[:8]


class Drafts:
    """This class reads and writes the table `drafts`. A chat has at most one draft. `Replies.add` deletes a
    chat's draft."""

    def __init__(self, db: Database, replies: Replies):
        self._db, self._replies = db, replies

    def put(self, session_id: str, reply: ReplyRow, question: int | None = None) -> None:
        """Commit the part of a chat's reply that is written; the earlier draft is replaced.

        question: the id of the message that the reply follows; None: the last message
        """
        words = asdict(replace(reply, query=None, features=None))
        words |= {"teaches": reply.teaches, "saved": _now()}
        with self._db.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO drafts (session_id, parent, process, reply)"
                " SELECT id, coalesce(?, head), ?, ? FROM sessions WHERE id = ? AND head IS NOT NULL",
                question,
                _own_process(),
                json.dumps(words),
                session_id,
            )

    def recover(self) -> list[str]:
        """Turn the drafts of killed processes into replies. Returns the ids of the chats of these replies. A
        draft whose chat is being erased is deleted. If the last save of a draft was more than IDLE_SECONDS
        ago, its process counts as killed, even if a process of this number runs: that can be another
        program."""
        drafts = self._db.rows("SELECT session_id, parent, process, reply FROM drafts")
        left = [row for row in drafts if not _is_alive(row["process"], json.loads(row["reply"]))]
        left = [row for row in left if self._claim(row["session_id"], row["process"])]
        return [row["session_id"] for row in left if self._add(row)]

    def _add(self, row: sqlite3.Row) -> bool:
        """Turn a draft into a reply. Returns False if the draft's chat or question is gone; the draft is then
        deleted."""
        words = json.loads(row["reply"])
        words.pop("saved", None)
        features = None if words.pop("teaches", True) else b""
        number = int(row["process"].partition(":")[0])
        if number != os.getpid() and is_running(number):  # perhaps the writer, which stores its own reply
            words["id"] = uuid.uuid4().hex[:12]
        reply = ReplyRow(**words | {"examples": tuple(words["examples"]), "features": features})
        try:
            self._replies.add(reply, row["session_id"], question=row["parent"])
        except NotFound:
            with self._db.transaction():
                self._db.execute("DELETE FROM drafts WHERE session_id = ?", row["session_id"])
            return False
        return True

    def _claim(self, session_id: str, process: str) -> bool:
        """Make this process the owner of a draft. Returns False if another process was first."""
        with self._db.transaction():
            changed = self._db.execute(
                "UPDATE drafts SET process = ? WHERE session_id = ? AND process = ?",
                _own_process(),
                session_id,
                process,
            )
            return changed.rowcount == 1


def _own_process() -> str:
    return f"{os.getpid()}:{_TOKEN}"


def _now() -> float:
    """Return the seconds since 1970."""
    return datetime.now(UTC).timestamp()


def _is_alive(process: str, words: dict[str, Any]) -> bool:
    """Return True if a process with this number runs and has saved the draft within IDLE_SECONDS. If
    `process` has the number of this process but another token, it is an earlier process that had the same
    number, so the result is False."""
    number, _, token = process.partition(":")
    if int(number) == os.getpid():
        return token == _TOKEN
    return is_running(int(number)) and _now() - words.get("saved", math.inf) < IDLE_SECONDS

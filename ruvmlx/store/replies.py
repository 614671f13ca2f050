"""Generated replies and the traces that a later rating needs."""

import json
import os
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..errors import NotFound
from .database import vector
from .kv import KVObservation, KVRecords
from .routes import RouteRow

_TOKEN = uuid.uuid4().hex[:8]  # in a container each process may have the same number
KEEP_TRACES = 50  # newest replies whose trace is kept; older ones are replayed from their tokens


@dataclass(frozen=True)
class ReplyRow:
    """One generated reply. sampled_ids holds every token drawn, the end-of-reply token too."""

    id: str
    model: str
    fingerprint: str
    adapter: str | None
    adapter_version: int
    prompt_ids: list[int]
    sampled_ids: list[int]
    prompt: str  # the user's words that it answers
    text: str
    finish_reason: str
    query: np.ndarray | None  # [D] float32, pooled state of the question (sona/embedding.py)
    logprob: float | None  # of the tokens drawn, summed, the adapter applied; None: drawn without one
    examples: tuple[str, ...] = ()  # replies that were put into the prompt as examples
    latency_ratio: float = 1.0  # time per token against what is usual here


class Replies(KVRecords):
    """Every reply is kept, of a chat or not."""

    def add_reply(
        self,
        reply: ReplyRow,
        session_id: str | None,
        kv: KVObservation | None = None,
        route: RouteRow | None = None,
    ) -> None:
        """Commit a reply, what its KV cache was like, how it was routed and, for a chat, its message."""
        now = time.time()
        with self.transaction():
            self._db.execute(
                "INSERT INTO replies VALUES (?, (SELECT coalesce(max(seq), 0) + 1 FROM replies),"
                " ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    reply.id,
                    reply.model,
                    reply.fingerprint,
                    reply.adapter,
                    reply.adapter_version,
                    _ids_to_blob(reply.prompt_ids),
                    _ids_to_blob(reply.sampled_ids),
                    reply.prompt,
                    reply.text,
                    reply.finish_reason,
                    None if reply.query is None else reply.query.astype("<f4").tobytes(),
                    reply.logprob,
                    " ".join(reply.examples),
                    reply.latency_ratio,
                    now,
                ),
            )
            if session_id is not None:
                self._add_message(session_id, "assistant", reply.text, reply.id, now)
                self._db.execute("DELETE FROM drafts WHERE session_id = ?", (session_id,))
            self.record("reply", _facts(reply))
            if kv is not None:
                self._observe(kv)
            if route is not None:
                self._route(route)

    def reply(self, reply_id: str) -> ReplyRow:
        """`reply_id` may be "last" or a unique beginning of an id."""
        columns = (
            "SELECT id, model, fingerprint, adapter, adapter_version, prompt_ids, sampled_ids, prompt, text,"
            " finish_reason, query, logprob, examples, latency_ratio FROM replies "
        )
        if reply_id == "last":
            rows = self._rows(columns + "ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._rows(columns + "WHERE substr(id, 1, ?) = ? LIMIT 2", len(reply_id), reply_id)
        if not rows and reply_id == "last":
            raise NotFound("there is no reply to rate yet; `ruvmlx chat` or `ruvmlx generate` makes one.")
        if not rows or not reply_id:
            raise NotFound(f"no reply {reply_id!r} to rate; `ruvmlx generate --json` prints a reply_id.")
        if len(rows) > 1:
            raise NotFound(f"{reply_id!r} is the beginning of more than one reply id; give more of it.")
        row = ReplyRow(*rows[0])
        return replace(
            row,
            prompt_ids=_blob_to_ids(rows[0][5]),
            sampled_ids=_blob_to_ids(rows[0][6]),
            query=vector(rows[0][10]),
            examples=tuple(rows[0][12].split()),
        )

    def put_draft(self, session_id: str, reply: ReplyRow) -> None:
        """A reply of a chat as far as it is written; `add_reply` replaces it."""
        words = asdict(replace(reply, query=None))
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO drafts SELECT id, head, ?, ? FROM sessions"
                " WHERE id = ? AND head IS NOT NULL",
                (_me(), json.dumps(words), session_id),
            )

    def take_up_drafts(self) -> list[str]:
        """Make replies of what processes left behind that were killed while they wrote; the chats' ids."""
        left = [row for row in self._rows("SELECT * FROM drafts") if not _is_alive(row[2])]
        left = [row for row in left if self._claim(row[0], row[2])]
        for session_id, parent, _, words in left:
            self.set_head(session_id, parent)
            fields = json.loads(words)
            self.add_reply(ReplyRow(**fields | {"examples": tuple(fields["examples"])}), session_id)
        return [row[0] for row in left]

    def _claim(self, session_id: str, process: str) -> bool:
        """Make a draft ours, unless somebody else was quicker to."""
        with self.transaction():
            changed = self._db.execute(
                "UPDATE drafts SET process = ? WHERE session_id = ? AND process = ?",
                (_me(), session_id, process),
            )
            return changed.rowcount == 1

    def put_trace(self, reply_id: str, data: bytes) -> None:
        """Keep a reply's trace; the oldest beyond KEEP_TRACES go."""
        with self.transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO traces SELECT id, seq, ? FROM replies WHERE id = ?", (data, reply_id)
            )
            self._db.execute(
                "DELETE FROM traces WHERE seq <= (SELECT seq FROM traces ORDER BY seq DESC LIMIT 1 OFFSET ?)",
                (KEEP_TRACES,),
            )

    def delete_session(self, session_id: str) -> None:
        """Delete a chat with its replies, but those that another chat (a fork) shows, too.

        Of a rated reply only the fact stays that it was rated; of every reply the witness log keeps the id
        and the length.
        """
        self.session(session_id)
        mine = (
            "SELECT DISTINCT reply_id FROM messages WHERE session_id = ?1 AND reply_id IS NOT NULL"
            " AND reply_id NOT IN"
            " (SELECT reply_id FROM messages WHERE session_id != ?1 AND reply_id IS NOT NULL)"
        )
        rated = "SELECT reply_id FROM ratings"
        with self.transaction():
            ids = [row[0] for row in self._db.execute(mine, (session_id,))]
            # parent cascades, one trigger level per message, and SQLite stops at level 1,000: unlink first.
            self._db.execute("UPDATE messages SET parent = NULL WHERE session_id = ?", (session_id,))
            self._db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
            for reply_id in ids:
                self._db.execute("DELETE FROM traces WHERE reply_id = ?", (reply_id,))
                self._db.execute("DELETE FROM routes WHERE reply_id = ?", (reply_id,))
                self._db.execute(f"DELETE FROM replies WHERE id = ? AND id NOT IN ({rated})", (reply_id,))
                self._db.execute(
                    "UPDATE replies SET prompt = '', text = '', prompt_ids = x'', sampled_ids = x'',"
                    " query = NULL WHERE id = ?",
                    (reply_id,),
                )
            # What is deleted from an index is only marked there; made anew, it has no word of it.
            self._db.execute("INSERT INTO messages_text(messages_text) VALUES ('rebuild')")
        self.truncate_log()

    def trace(self, reply_id: str) -> bytes | None:
        row = self._row("SELECT data FROM traces WHERE reply_id = ?", reply_id)
        return row[0] if row else None


def _facts(reply: ReplyRow) -> dict[str, Any]:
    """What the witness log says of a reply: no words, and no tokens that words could be read from."""
    return {
        "reply": reply.id,
        "model": reply.fingerprint,
        "adapter": reply.adapter,
        "version": reply.adapter_version,
        "prompt_tokens": len(reply.prompt_ids),
        "tokens": len(reply.sampled_ids),
    }


def _me() -> str:
    return f"{os.getpid()}:{_TOKEN}"


def _is_alive(process: str) -> bool:
    """A process of this machine; one with our number and another token was there before us."""
    number, _, token = process.partition(":")
    if int(number) == os.getpid():
        return token == _TOKEN
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's, but there
    return True


def _ids_to_blob(ids: list[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _blob_to_ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<i4").tolist()

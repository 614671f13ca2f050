"""This module stores generated replies."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ..errors import NotFound
from ..ratings import REASONS, reason_of
from .audit_log import Witness
from .database import Database, columns, from_vector, to_vector
from .kv import KVObservation, KVRecords
from .messages import HEAD, Messages
from .routes import RouteRow, Routes
from .traces import Traces
from .unshown import UnshownMeasures


@dataclass(frozen=True)
class ReplyRow:
    """One generated reply. Each field is a column of the table `replies`. `of` fills the fields from other
    objects, by the names of the fields."""

    id: str
    model: str
    fingerprint: str
    adapter: str | None
    adapter_version: int
    prompt_ids: list[int]
    sampled_ids: list[int]  # every sampled token, with the end token if there is one
    prompt: str  # the user's message that the reply answers
    text: str
    finish_reason: str
    query: np.ndarray | None  # [D] float32, the pooled hidden state of the question (sona/embedding.py)
    # the sum of the logprobs of the rated tokens, with the adapter applied; None: not known, because the
    # reply has no trace
    logprob: float | None = None
    examples: tuple[str, ...] = ()  # the ids of the rated replies that the prompt shows as examples
    latency_ratio: float = 1.0  # the time per token, divided by the usual time on this machine
    # the number of leading sampled tokens that are the model's thinking; learning from a rating does not use
    # these tokens
    thought: int = 0
    # The features of the text for the taste model (sona/taste_features.py). Empty: ratings of this reply do
    # not change the adapter.
    features: bytes | None = None
    # the id of the reply that the user saw in place of this reply (best of n); None: the user saw this reply
    beside: str | None = None
    # the id of the reply that the user edited to make this reply; None: the model wrote this reply
    edited: str | None = None
    tenant: str = ""  # a digest of the API key of the request; "": there was no key
    quality: float | None = None  # the estimated quality, 0 to 1 (optimizer/quality.py); None: not known
    quality_parts: Mapping[str, float] = field(default_factory=dict)  # {part: 0 to 1}

    @property
    def context_ids(self) -> list[int]:
        """Return the tokens before the rated tokens: the prompt and the model's thinking."""
        return self.prompt_ids + self.sampled_ids[: self.thought]

    @property
    def rated_ids(self) -> list[int]:
        """Return the rated tokens, which are the reply without the model's thinking. A rating changes the
        probability of these tokens."""
        return self.sampled_ids[self.thought :]

    @property
    def teaches(self) -> bool:
        """Return True if ratings of this reply can change the adapter. Ratings change nothing if the reply
        almost only repeated itself, or if the reply calls a tool or reads a tool's result."""
        return self.features is None or len(self.features) > 0

    @classmethod
    def of(cls, *facts: object, **values: Any) -> "ReplyRow":
        """Return a row with the fields in `values`. The value of each field that is not in `values` comes
        from the first of `facts` that has an attribute with the field's name. A field that no object in
        `facts` has keeps its default."""
        names = [field.name for field in fields(cls)]
        for fact in facts:
            values = {name: getattr(fact, name) for name in names if hasattr(fact, name)} | values
        return cls(**values)


@dataclass(frozen=True)
class ReplyWords:
    """The fields of a reply that the taste model reads. The taste model predicts the user's rating. prompt
    and text are empty if the reply was deleted."""

    id: str
    features: bytes | None
    prompt: str
    text: str
    finish_reason: str


@dataclass(frozen=True)
class TenantReply:
    """The fields of a reply that a list of replies shows. prompt: the question. created: seconds since
    1970."""

    id: str
    prompt: str
    text: str
    created: float
    rating: str | None


class Replies:
    """This class reads and writes the table `replies`, which has the stored replies, in chats and outside of
    chats."""

    def __init__(
        self,
        db: Database,
        witness: Witness,
        messages: Messages,
        kv: KVRecords,
        routes: Routes,
        traces: Traces,
        unshown: UnshownMeasures,
    ):
        self._db, self._witness, self._messages = db, witness, messages
        self._kv, self._routes, self._traces, self._unshown = kv, routes, traces, unshown

    def add(
        self,
        reply: ReplyRow,
        session_id: str | None,
        kv: KVObservation | None = None,
        route: RouteRow | None = None,
        beside: int | None = None,
        question: int | None = None,
        shown: str | None = None,
        calls: str = "",
    ) -> None:
        """Commit a reply with the state of its KV cache, the router's choice and, in a chat, its message. The
        reply replaces the chat's draft. Raises NotFound if the chat has no message `beside` or `question`.

        beside: the id of a message of the chat; the reply becomes its sibling
        question: the id of the message that the reply follows
        shown: the message's text without tool calls; None: the whole text
        calls: the tool calls as JSON; "": no calls

        If `beside` and `question` are None, the reply follows the last message of the current branch.
        """
        now = time.time()
        with self._db.transaction():
            newest = self._db.value("SELECT coalesce(max(seq), 0) FROM replies")
            self._db.insert("replies", seq=newest + 1, created=now, **_to_columns(reply))
            if session_id is not None:
                if beside is not None:
                    self._messages.go_before(session_id, beside)
                after = HEAD if question is None else question
                text = reply.text if shown is None else shown
                self._messages.append(session_id, "assistant", text, reply.id, now, after, calls)
                self._db.execute("DELETE FROM drafts WHERE session_id = ?", session_id)
            self._witness.record("reply", _facts(reply))
            if kv is not None:
                self._kv.observe(kv)
            if route is not None:
                self._routes.add(route)

    def get(self, reply_id: str, verb: str = "rate") -> ReplyRow:
        """Return a reply by its id, by a unique beginning of the id, or by "last". Raises NotFound if no
        reply or several replies match. verb: the verb for the error message, for example "forget"."""
        select = f"SELECT {columns(ReplyRow)} FROM replies "
        if reply_id == "last":
            rows = self._db.rows(select + "ORDER BY seq DESC LIMIT 1")
        else:
            rows = self._db.rows(select + "WHERE id = ?", reply_id)
            beginning = "WHERE substr(id, 1, ?) = ? LIMIT 2"
            rows = rows or self._db.rows(select + beginning, len(reply_id), reply_id)
        if not rows and reply_id == "last":
            raise NotFound(f"there is no reply to {verb} yet; `ruvmlx chat` or `ruvmlx generate` makes one.")
        if not rows or not reply_id:
            raise NotFound(f"no reply {reply_id!r} to {verb}; `ruvmlx generate --json` prints a reply_id.")
        if len(rows) > 1:
            raise NotFound(f"{reply_id!r} is the beginning of more than one reply id; give more of it.")
        return _from_columns(ReplyRow(**rows[0]))

    def newest(self, tenant: str, limit: int) -> list[TenantReply]:
        """Return the newest replies of a tenant that still have words, newest first."""
        rows = self._db.rows(
            "SELECT r.id, r.prompt, r.text, r.created, (SELECT rating FROM ratings WHERE reply_id = r.id"
            " AND in_force ORDER BY id DESC LIMIT 1) AS rating FROM replies r"
            " WHERE r.tenant = ? AND r.text != '' ORDER BY r.seq DESC LIMIT ?",
            tenant,
            limit,
        )
        return [TenantReply(**row) for row in rows]

    def tokens(self, reply_id: str) -> list[int]:
        """Return the token ids of the prompt and the reply; [] if the reply was deleted or does not exist."""
        row = self._db.row("SELECT prompt_ids, sampled_ids FROM replies WHERE id = ?", reply_id)
        return _blob_to_ids(row["prompt_ids"]) + _blob_to_ids(row["sampled_ids"]) if row else []

    def newest_tokens(self, fingerprint: str, least: int, limit: int) -> list[tuple[list[int], list[int]]]:
        """Return (prompt tokens, reply tokens) of a model's newest replies, at most `limit`, newest first.
        least: the minimum number of tokens of a reply."""
        rows = self._db.rows(
            "SELECT prompt_ids, sampled_ids FROM replies WHERE fingerprint = ? AND length(sampled_ids) >= ?"
            " ORDER BY seq DESC LIMIT ?",
            fingerprint,
            4 * least,
            limit,
        )
        return [(_blob_to_ids(row["prompt_ids"]), _blob_to_ids(row["sampled_ids"])) for row in rows]

    def examples_used(self, fingerprint: str) -> list[str]:
        """Return the ids of the replies that a model's prompts showed as examples, one entry for each use."""
        rows = self._db.rows(
            "SELECT examples FROM replies WHERE fingerprint = ? AND examples != ''", fingerprint
        )
        return [reply_id for row in rows for reply_id in row["examples"].split()]

    def words(self, ids: Iterable[str]) -> list[ReplyWords]:
        """Return, for the taste model, the words and features of the replies with these ids, oldest first."""
        rows = self._db.rows(
            f"SELECT {columns(ReplyWords)} FROM replies WHERE id IN (SELECT value FROM json_each(?))"
            " ORDER BY seq",
            json.dumps([*ids]),
        )
        return [ReplyWords(**row) for row in rows]

    def unrated_replies(self, fingerprint: str, adapter: str, limit: int) -> list[ReplyWords]:
        """Return the newest replies that an adapter wrote, that the user saw, and that have no rating and no
        preference of this adapter in force."""
        rows = self._db.rows(
            f"SELECT {columns(ReplyWords)} FROM replies"
            " WHERE fingerprint = ?1 AND adapter = ?2 AND text != '' AND beside IS NULL AND edited IS NULL"
            " AND NOT EXISTS (SELECT 1 FROM ratings t WHERE t.reply_id = replies.id AND t.fingerprint = ?1"
            " AND t.adapter = ?2 AND t.in_force)"
            " AND NOT EXISTS (SELECT 1 FROM preferences p WHERE p.better = replies.id AND p.fingerprint = ?1"
            " AND p.adapter = ?2 AND p.in_force)"
            " AND NOT EXISTS (SELECT 1 FROM preferences p WHERE p.worse = replies.id AND p.fingerprint = ?1"
            " AND p.adapter = ?2 AND p.in_force) ORDER BY seq DESC LIMIT ?3",
            fingerprint,
            adapter,
            limit,
        )
        return [ReplyWords(**row) for row in rows]

    # -- question states -----------------------------------------------------------------------------

    def count(self, fingerprint: str, adapter: str) -> int:
        """Return the number of stored replies that an adapter wrote."""
        sql = "SELECT count(*) FROM replies WHERE fingerprint = ? AND adapter = ?"
        return self._db.value(sql, fingerprint, adapter)

    def set_query(self, reply_id: str, query: np.ndarray) -> None:
        """Commit the pooled hidden state [D] of the question that a reply answers, unless the question was
        deleted, because the state is computed from the question's words."""
        with self._db.transaction():
            sql = "UPDATE replies SET query = ? WHERE id = ? AND prompt != ''"
            self._db.execute(sql, from_vector(query), reply_id)

    def query(self, reply_id: str) -> np.ndarray | None:
        """Return the question's pooled hidden state [D] as float32; None if the state was never computed."""
        return to_vector(self._db.value("SELECT query FROM replies WHERE id = ?", reply_id))

    def questions(self, session_id: str) -> list[tuple[str, bytes]]:
        """Return (question, its pooled state [D] as float32 bytes) of a chat's replies, oldest first."""
        rows = self._db.rows(
            "SELECT r.prompt, r.query FROM messages m JOIN replies r ON r.id = m.reply_id"
            " WHERE m.session_id = ? AND r.query IS NOT NULL ORDER BY m.id",
            session_id,
        )
        return [(row["prompt"], row["query"]) for row in rows]

    def erase(self, *reply_ids: str) -> None:
        """Delete replies. A reply with a rating or a preference keeps its row, its ratings and its
        preferences. But the reply loses its words, tokens, notes and features, the vector of its question,
        its trace, its route, its response and the measures of unshown replies to its question. If the prompt
        of another reply shows a deleted reply as an example, or continues a deleted response, that other
        reply loses its prompt tokens, its trace and these measures. Call inside a transaction."""
        after = self._went_on_from(reply_ids)
        for reply_id in reply_ids:
            self._erase(reply_id)
        self._unshown.delete(reply_ids)
        gone = set(reply_ids)
        for reply_id in (self._with_versions(after) if after else after) - gone:
            self._forget_prompt(reply_id)
        shown = self._db.rows("SELECT id, examples FROM replies WHERE examples != ''") if gone else []
        for reply_id in [row["id"] for row in shown if not gone.isdisjoint(row["examples"].split())]:
            self._forget_prompt(reply_id)

    def _forget_prompt(self, reply_id: str) -> None:
        self._traces.delete(reply_id)
        self._unshown.delete([reply_id])
        self._db.execute("UPDATE replies SET prompt_ids = x'' WHERE id = ?", reply_id)

    def _went_on_from(self, reply_ids: Sequence[str]) -> set[str]:
        """Return the ids of all responses that depend on these responses, directly or through others. A
        response depends on the response that it continues, and on each response whose items it names."""
        found, new = set[str](), set(reply_ids)
        naming = self._db.rows("SELECT id, named FROM responses WHERE named != ''") if new else []
        while new:
            select = "SELECT id FROM responses WHERE previous = ?"
            after = {row["id"] for each in new for row in self._db.rows(select, each)}
            after |= {row["id"] for row in naming if not new.isdisjoint(row["named"].split())}
            new = after - found
            found |= new
        return found

    def outside_chats(self) -> list[str]:
        """Return the ids of the replies that no chat shows and that still have words, oldest first."""
        rows = self._db.rows(
            "WITH shown AS MATERIALIZED (SELECT reply_id FROM messages WHERE reply_id IS NOT NULL)"
            " SELECT id FROM replies WHERE (text != '' OR prompt != '' OR length(sampled_ids) > 0)"
            " AND id NOT IN (SELECT reply_id FROM shown)"
            " AND coalesce(beside, '') NOT IN (SELECT reply_id FROM shown) ORDER BY seq"
        )
        return [row["id"] for row in rows]

    def forget(self, reply_ids: Sequence[str]) -> bool:
        """Commit the deletion of replies outside of chats and of their other versions. Returns True if the
        deleted words are gone from all files (`Database.truncate_log`)."""
        with self._db.transaction():
            self.erase(*self._with_versions(reply_ids))
        return self._db.truncate_log()

    def _with_versions(self, reply_ids: Iterable[str]) -> set[str]:
        """Return these ids and the ids of the other versions of these replies. Best of n writes some versions
        beside a reply. The user writes other versions by an edit of a reply."""
        found = set(reply_ids)
        rows = self._db.rows(
            "SELECT id, coalesce(edited, beside) AS origin FROM replies"
            " WHERE beside IS NOT NULL OR edited IS NOT NULL ORDER BY seq"
        )
        for row in rows:  # an edited reply comes after its origin, which can be an edited reply itself
            if row["origin"] in found:
                found.add(row["id"])
        return found

    def _erase(self, reply_id: str) -> None:
        self._traces.delete(reply_id)
        self._routes.delete(reply_id)
        self._db.execute("DELETE FROM responses WHERE id = ?", reply_id)
        self._db.execute(
            "DELETE FROM replies WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM ratings WHERE reply_id = ?1)"
            " AND NOT EXISTS (SELECT 1 FROM preferences WHERE better = ?1 OR worse = ?1)",
            reply_id,
        )
        self._db.execute(
            "UPDATE replies SET prompt = '', text = '', prompt_ids = x'', sampled_ids = x'', query = NULL,"
            " features = NULL WHERE id = ?",
            reply_id,
        )
        # The reason of a bad rating stays: it is no word of the user, and "wrong facts" teach nothing.
        for row in self._db.rows("SELECT id, rating, note FROM ratings WHERE reply_id = ?", reply_id):
            reason = REASONS.get(reason_of(row["rating"], row["note"]), "")
            self._db.execute("UPDATE ratings SET note = ? WHERE id = ?", reason, row["id"])


def _facts(reply: ReplyRow) -> dict[str, Any]:
    """Return the body of the witness log's row about a reply. The body has no words, and no tokens from which
    words could be read."""
    return {
        "reply": reply.id,
        "model": reply.fingerprint,
        "adapter": reply.adapter,
        "version": reply.adapter_version,
        "prompt_tokens": len(reply.prompt_ids),
        "tokens": len(reply.sampled_ids),
    }


def _to_columns(reply: ReplyRow) -> dict[str, Any]:
    return {field.name: getattr(reply, field.name) for field in fields(reply)} | {
        "prompt_ids": _ids_to_blob(reply.prompt_ids),
        "sampled_ids": _ids_to_blob(reply.sampled_ids),
        "query": from_vector(reply.query),
        "examples": " ".join(reply.examples),
        "quality_parts": json.dumps(dict(reply.quality_parts)),
    }


def _from_columns(row: Any) -> ReplyRow:
    return replace(
        row,
        prompt_ids=_blob_to_ids(row.prompt_ids),
        sampled_ids=_blob_to_ids(row.sampled_ids),
        query=to_vector(row.query),
        examples=tuple(row.examples.split()),
        quality_parts=json.loads(row.quality_parts),
    )


def _ids_to_blob(ids: list[int]) -> bytes:
    return np.asarray(ids, "<i4").tobytes()


def _blob_to_ids(blob: bytes) -> list[int]:
    return np.frombuffer(blob, "<i4").tolist()

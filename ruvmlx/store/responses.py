"""This module stores the input and the answer of each response of the Responses API, so that a later request
can continue the response."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import NotFound, UsageError
from .database import Database

# the maximum number of stored responses, and of their bytes; the newest responses stay
KEEP_RESPONSES, KEEP_BYTES = 10_000, 256_000_000
MOST_LINKS = 1_000  # the maximum number of responses in one conversation


@dataclass(frozen=True)
class ResponseRow:
    """One response. id: the id of its reply. previous: the id of the response that its request continued.
    input, answer: JSON of this request only, without the earlier conversation; empty if the client wants no
        stored response. tenant: a digest of the API key of the request; "": there was no key.
    named: the ids of the responses whose items the input names in place of their words."""

    id: str
    previous: str | None
    tenant: str
    input: bytes
    answer: bytes
    named: tuple[str, ...] = ()


class Responses:
    """This class reads and writes the table `responses`. The class `Replies` deletes a response when it
    deletes the response's reply."""

    def __init__(self, db: Database):
        self._db = db

    def add(self, row: ResponseRow) -> bool:
        """Commit a response. Delete the oldest responses beyond KEEP_RESPONSES or KEEP_BYTES. If the store
        does not have the response's reply, commit nothing and return False: the reply was deleted in the
        meantime, or it could not be stored."""
        with self._db.transaction():
            if self._db.row("SELECT 1 FROM replies WHERE id = ?", row.id) is None:
                return False
            self._db.insert(
                "responses",
                id=row.id,
                previous=row.previous,
                tenant=row.tenant,
                input=row.input,
                answer=row.answer,
                named=" ".join(row.named),
                bytes=len(row.input) + len(row.answer),
                created=time.time(),
            )
            self._trim()
        return True

    def get(self, response_id: str, tenant: str) -> ResponseRow:
        """Return a response. Raises NotFound if no response has this id, or if the response belongs to
        another tenant."""
        rows = self._db.rows(
            "SELECT id, previous, tenant, input, answer, named FROM responses"
            " WHERE id = ? AND tenant = ? AND answer != x''",
            response_id,
            tenant,
        )
        if not rows:
            raise NotFound("there is no such response: it was not stored, or it was deleted.")
        return ResponseRow(**dict(rows[0]) | {"named": tuple(rows[0]["named"].split())})

    def those(self, response_ids: Sequence[str], tenant: str) -> list[ResponseRow]:
        """Return the stored responses of this tenant with these ids. Leave out all other ids."""
        found = []
        for response_id in response_ids:
            with contextlib.suppress(NotFound):
                found.append(self.get(response_id, tenant))
        return found

    def conversation(self, response_id: str, tenant: str, most_bytes: int) -> list[ResponseRow]:
        """Return a response and all responses that it continued, the oldest first. Raises NotFound if one of
        these responses is deleted, and UsageError if the responses have more than `most_bytes` bytes or are
        more than MOST_LINKS."""
        found: list[ResponseRow] = []
        left, wanted = most_bytes, response_id
        while True:
            row = self.get(wanted, tenant)
            found.append(row)
            left -= len(row.input) + len(row.answer)
            if left < 0 or len(found) > MOST_LINKS:
                raise UsageError(
                    f"the conversation has more than {most_bytes} bytes or {MOST_LINKS} responses; "
                    "begin a new one."
                )
            if row.previous is None:
                return found[::-1]
            wanted = row.previous

    def _trim(self) -> None:
        while True:
            count, size = self._db.rows("SELECT count(*), coalesce(sum(bytes), 0) FROM responses")[0]
            if count <= KEEP_RESPONSES and size <= KEEP_BYTES:
                return
            self._db.execute("DELETE FROM responses WHERE rowid = (SELECT min(rowid) FROM responses)")

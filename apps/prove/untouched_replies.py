"""This module keeps replies of the untouched model (the model without an adapter) in a file between runs.

Each trial compares the learned model's replies with the untouched model's replies to the same questions. The
untouched model's replies do not depend on the trial, so a run reads them from the file. The model writes only
the replies that are not in the file.
"""

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from ruvmlx.backends.base import Backend, original_model
from ruvmlx.engine import GenerationRequest, GenerationResponse
from ruvmlx.engine.batch import generate_many
from ruvmlx.engine.run import EngineParts

KEPT_REPLIES = 200_000  # the maximum number of replies in the file, about 1 kB each; the oldest are deleted
_LOOKED_UP = 500  # the maximum number of keys in one SQL query
_SCHEMA = "CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply TEXT NOT NULL)"


@dataclass(frozen=True)
class JudgedReply:
    """The parts of a reply that a simulated user judges. finish_reason: "stop" or "length"."""

    text: str
    finish_reason: str
    token_ids: Sequence[int]

    @classmethod
    def of(cls, response: GenerationResponse) -> "JudgedReply":
        return cls(response.text, response.finish_reason, list(response.token_ids))

    @property
    def finished(self) -> bool:
        """True if the reply ended by itself, and not at the length limit."""
        return self.finish_reason == "stop"


class UntouchedReplies:
    """The replies of a backend's model without an adapter. model: a text that differs between two models.
    file: the file that keeps the replies; None to keep no replies."""

    def __init__(self, backend: Backend, model: str, file: Path | None = None):
        self._backend, self._file = backend, file
        # The kind of kernels is a part of the key, because other kernels round differently and give other
        # replies. The number of threads is left out, because it does not change a reply.
        self._model = [model, backend.name, backend.kernels.partition(",")[0]]

    @property
    def are_kept(self) -> bool:
        """True if a file keeps the replies."""
        return self._file is not None

    def to(self, engine: EngineParts, requests: Sequence[GenerationRequest]) -> dict[str, JudgedReply]:
        """Return {request id: reply} of all requests. The function takes the replies that the file has from
        the file, and lets the model write all other replies."""
        keys = {request.request_id: self._key(engine, request) for request in requests}
        known = self._read(keys.values())
        missing = [request for request in requests if keys[request.request_id] not in known]
        new = {r.request_id: JudgedReply.of(r) for r in self._write(engine, missing)}
        self._keep({keys[id_]: reply for id_, reply in new.items()})
        return {id_: new.get(id_) or known[key] for id_, key in keys.items()}

    def _write(
        self, engine: EngineParts, requests: Sequence[GenerationRequest]
    ) -> Iterator[GenerationResponse]:
        if not requests:
            return
        with original_model(self._backend):
            yield from generate_many(engine, requests)

    def _key(self, engine: EngineParts, request: GenerationRequest) -> bytes:
        """Return a hash of the model, the prompt and the settings that decide the reply."""
        wanted = [
            *self._model, engine.prompt_ids(request), request.max_new_tokens, asdict(request.sampling),
            list(request.stop), request.ignore_eos,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(wanted).encode()).digest()

    # -- methods for the file of replies ------------------------------------------------------------

    def _read(self, keys: Iterable[bytes]) -> dict[bytes, JudgedReply]:
        if self._file is None or not self._file.exists():
            return {}
        wanted, found = list(dict.fromkeys(keys)), dict[bytes, JudgedReply]()
        with closing(sqlite3.connect(self._file)) as db:
            db.execute(_SCHEMA)
            for at in range(0, len(wanted), _LOOKED_UP):
                some = wanted[at : at + _LOOKED_UP]
                marks = ",".join("?" * len(some))
                rows = db.execute(f"SELECT key, reply FROM replies WHERE key IN ({marks})", some)
                found |= {key: JudgedReply(**json.loads(reply)) for key, reply in rows}
        return found

    def _keep(self, replies: dict[bytes, JudgedReply]) -> None:
        if self._file is None or not replies:
            return
        self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file.touch(mode=0o600)
        with closing(sqlite3.connect(self._file)) as db, db:
            db.execute(_SCHEMA)
            rows = [(key, json.dumps(asdict(reply))) for key, reply in replies.items()]
            db.executemany("INSERT OR REPLACE INTO replies VALUES (?, ?)", rows)
            db.execute(
                "DELETE FROM replies WHERE rowid <= (SELECT max(rowid) FROM replies) - ?", (KEPT_REPLIES,)
            )

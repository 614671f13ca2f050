"""What a client of `serve` was told, and whether the store has it after a crash.

The client of a trial writes a line for each answer that it got (`tell`). A kill can come between the commit
and the answer, but never the other way round: what was answered is in the store.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

STORED, RATED, BEGAN_DELETING, DELETED = "stored", "rated", "began deleting", "deleted"
CLIENT_FAILED = "client: "  # a line of standard error that begins so: a request was refused
_PREFIX = "the client was told: "


def tell(what: str, reply_id: str) -> None:
    """Write a line, which outlives a kill of this process."""
    os.write(1, f"{_PREFIX}{what}: {reply_id}\n".encode())


def broken_promises(out: str, store: Path) -> list[str]:
    """Return a line for each thing that the client was told and that the store does not have.

    out: what the trial wrote on its standard output.
    """
    told = [line.removeprefix(_PREFIX).split(": ") for line in out.splitlines() if line.startswith(_PREFIX)]
    if not told:
        return []
    with closing(sqlite3.connect(f"{store.as_uri()}?mode=ro", uri=True)) as db:
        replies = {row[0] for row in db.execute("SELECT id FROM responses")}
        ratings = {row[0] for row in db.execute("SELECT reply_id FROM ratings")}
    going = {name for what, name in told if what == BEGAN_DELETING}
    wrong = [(what, name) for what, name in told if what == STORED and name not in replies | going]
    wrong += [(what, name) for what, name in told if what == RATED and name not in ratings]
    wrong += [(what, name) for what, name in told if what == DELETED and name in replies]
    return [
        f"the client was told that {name} is {what}, and the store does not say so" for what, name in wrong
    ]

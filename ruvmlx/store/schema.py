"""Tables of the store, and how an older store becomes a newer one."""

import sqlite3

from ..errors import StoreError

VERSION = 1

# Token ids are little-endian int32; vectors and matrices little-endian float32.
_V1 = """
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, title TEXT NOT NULL, system TEXT, model TEXT NOT NULL,
  created REAL NOT NULL, updated REAL NOT NULL
);
CREATE TABLE replies (
  id TEXT PRIMARY KEY, seq INTEGER NOT NULL UNIQUE, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
  adapter TEXT, adapter_version INTEGER NOT NULL, prompt_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL,
  prompt TEXT NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL, query BLOB, created REAL NOT NULL
);
CREATE TABLE messages (
  id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
  role TEXT NOT NULL, content TEXT NOT NULL, reply_id TEXT REFERENCES replies(id), created REAL NOT NULL
);
CREATE INDEX messages_by_session ON messages(session_id, id);
CREATE TABLE traces (
  reply_id TEXT PRIMARY KEY REFERENCES replies(id) ON DELETE CASCADE, seq INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE TABLE adapters (
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER,
  state BLOB NOT NULL, kl REAL NOT NULL, norm REAL NOT NULL, created REAL NOT NULL,
  PRIMARY KEY (fingerprint, name, version)
);
CREATE TABLE adapter_heads (
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (fingerprint, name)
);
CREATE TABLE ratings (
  id INTEGER PRIMARY KEY AUTOINCREMENT, reply_id TEXT NOT NULL REFERENCES replies(id), rating TEXT NOT NULL,
  note TEXT NOT NULL, fingerprint TEXT NOT NULL, adapter TEXT NOT NULL, weight REAL NOT NULL,
  version_before INTEGER NOT NULL, version_after INTEGER NOT NULL, replaces INTEGER REFERENCES ratings(id),
  taken_back INTEGER NOT NULL DEFAULT 0, created REAL NOT NULL
);
CREATE INDEX ratings_by_reply ON ratings(reply_id);
CREATE TABLE neutral (fingerprint TEXT PRIMARY KEY, data BLOB NOT NULL);
"""


def migrate(db: sqlite3.Connection) -> None:
    """Bring the file to VERSION; a file of a newer ruvmlx is refused, never changed."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise StoreError(
            f"the store was written by a newer ruvmlx (format {found}; this one reads up to {VERSION}). "
            "Update ruvmlx, or set RUVMLX_HOME to another folder."
        )
    if found < 1:
        db.executescript(f"BEGIN IMMEDIATE; {_V1} PRAGMA user_version = {VERSION}; COMMIT;")

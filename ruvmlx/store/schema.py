"""This module has the tables of the store, and the steps that bring an older file to the newest format.

A new column is a new step at the end of _STEPS. A migration step that was part of a release is never changed.
"""

import sqlite3

from ..errors import StoreError

# Token ids are little-endian int32. Vectors and matrices are little-endian float32.
_V1 = """
CREATE TABLE sessions (
  id TEXT PRIMARY KEY, title TEXT NOT NULL, system TEXT, model TEXT NOT NULL,
  created REAL NOT NULL, updated REAL NOT NULL
);
CREATE TABLE replies (
  id TEXT PRIMARY KEY, seq INTEGER NOT NULL UNIQUE, model TEXT NOT NULL, fingerprint TEXT NOT NULL,
  adapter TEXT, adapter_version INTEGER NOT NULL, prompt_ids BLOB NOT NULL, sampled_ids BLOB NOT NULL,
  prompt TEXT NOT NULL, text TEXT NOT NULL, finish_reason TEXT NOT NULL, query BLOB, logprob REAL,
  examples TEXT NOT NULL, latency_ratio REAL NOT NULL, created REAL NOT NULL
);
CREATE TABLE messages (
  id INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL REFERENCES sessions(id) ON DELETE CASCADE,
  role TEXT NOT NULL, content TEXT NOT NULL, reply_id TEXT REFERENCES replies(id), created REAL NOT NULL
);
CREATE INDEX messages_by_session ON messages(session_id, id);
CREATE TABLE traces (
  reply_id TEXT PRIMARY KEY REFERENCES replies(id) ON DELETE CASCADE, seq INTEGER NOT NULL, data BLOB NOT NULL
);
CREATE TABLE adapters (  -- a tree; state is NULL where it is no longer kept
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER NOT NULL,
  base INTEGER NOT NULL, state BLOB, kl REAL NOT NULL, norm REAL NOT NULL, created REAL NOT NULL,
  PRIMARY KEY (fingerprint, name, version)
);
CREATE TABLE bases (  -- what versions stand on; state is NULL where it is no longer kept
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, id INTEGER NOT NULL, state BLOB, report TEXT NOT NULL,
  created REAL NOT NULL, PRIMARY KEY (fingerprint, name, id)
);
CREATE TABLE attempts (  -- consolidations; version is NULL where one was refused
  id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, name TEXT NOT NULL,
  parent INTEGER NOT NULL, version INTEGER, report TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE trainings (
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, state BLOB NOT NULL, PRIMARY KEY (fingerprint, name)
);
CREATE TABLE anchors (  -- ends of tasks; version: in use then
  id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, name TEXT NOT NULL,
  version INTEGER NOT NULL, base INTEGER NOT NULL, fisher BLOB NOT NULL, created REAL NOT NULL
);
CREATE TABLE deep_runs (  -- the newest that came to an end; version: in use then
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, report TEXT NOT NULL,
  created REAL NOT NULL, PRIMARY KEY (fingerprint, name)
);
CREATE TABLE measurements (  -- of a deep run that was stopped
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, state BLOB NOT NULL, PRIMARY KEY (fingerprint, name)
);
CREATE TABLE pruned (  -- not found by likeness any more, as long as the rating is this one
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, rating TEXT NOT NULL,
  reply_id TEXT NOT NULL REFERENCES replies(id) ON DELETE CASCADE, PRIMARY KEY (fingerprint, name, reply_id)
);
CREATE TABLE adapter_heads (
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, PRIMARY KEY (fingerprint, name)
);
CREATE TABLE ratings (  -- version: the one that this rating made
  id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, adapter TEXT NOT NULL,
  version INTEGER NOT NULL, reply_id TEXT NOT NULL REFERENCES replies(id), rating TEXT NOT NULL,
  note TEXT NOT NULL, weight REAL NOT NULL, in_force INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX ratings_by_reply ON ratings(reply_id);
CREATE INDEX ratings_by_adapter ON ratings(fingerprint, adapter, in_force, id);
CREATE TABLE neutral (fingerprint TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE whitening (fingerprint TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE signals (
  id INTEGER PRIMARY KEY AUTOINCREMENT, reply_id TEXT NOT NULL REFERENCES replies(id) ON DELETE CASCADE,
  kind TEXT NOT NULL, label TEXT NOT NULL, quality REAL NOT NULL, reward REAL NOT NULL,
  latency_ratio REAL NOT NULL, tier INTEGER NOT NULL, context_tokens INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX signals_by_reply ON signals(reply_id);
CREATE TABLE signals_dropped (count INTEGER NOT NULL);
INSERT INTO signals_dropped VALUES (0);
CREATE TABLE kv_observations (  -- lengths in tokens; see kv.py
  id INTEGER PRIMARY KEY AUTOINCREMENT, reply_id TEXT NOT NULL REFERENCES replies(id) ON DELETE CASCADE,
  fingerprint TEXT NOT NULL, backend TEXT NOT NULL, hot INTEGER NOT NULL, warm INTEGER NOT NULL,
  tokens INTEGER NOT NULL, hot_bytes INTEGER NOT NULL, warm_bytes INTEGER NOT NULL,
  cold_bytes INTEGER NOT NULL, us_per_token REAL NOT NULL, pressure REAL NOT NULL, level INTEGER NOT NULL,
  created REAL NOT NULL
);
CREATE INDEX kv_observations_by_model ON kv_observations(fingerprint, backend, id);
CREATE INDEX kv_observations_by_reply ON kv_observations(reply_id);
CREATE TABLE kv_measured (  -- of no use to read a chat from, so it outlives the reply
  fingerprint TEXT NOT NULL, backend TEXT NOT NULL, reply_id TEXT NOT NULL, hot INTEGER NOT NULL,
  warm INTEGER NOT NULL, blocks INTEGER NOT NULL, total REAL NOT NULL, squares REAL NOT NULL,
  us REAL NOT NULL, us_f16 REAL NOT NULL, created REAL NOT NULL,
  PRIMARY KEY (fingerprint, backend, reply_id, hot, warm)
);
CREATE TABLE kv_choices (
  fingerprint TEXT NOT NULL, backend TEXT NOT NULL, hot INTEGER NOT NULL, warm INTEGER NOT NULL,
  report TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (fingerprint, backend)
);
CREATE TABLE witness (  -- a hash chain, see audit_log.py; time is in ns since 1970
  seq INTEGER PRIMARY KEY AUTOINCREMENT, time INTEGER NOT NULL, kind TEXT NOT NULL, body TEXT NOT NULL,
  previous TEXT NOT NULL, hash TEXT NOT NULL
);
CREATE TRIGGER witness_no_update BEFORE UPDATE ON witness
  BEGIN SELECT RAISE(ABORT, 'the witness log is append-only'); END;
CREATE TRIGGER witness_no_delete BEFORE DELETE ON witness
  BEGIN SELECT RAISE(ABORT, 'the witness log is append-only'); END;
CREATE TRIGGER witness_no_insert_before BEFORE INSERT ON witness
  WHEN NEW.seq != (SELECT coalesce(max(seq), 0) + 1 FROM witness)
  BEGIN SELECT RAISE(ABORT, 'the witness log is append-only'); END;
"""
_V2 = """
CREATE TABLE routes (  -- what the router chose; turns: float32, a row of `inputs` numbers per turn
  reply_id TEXT PRIMARY KEY REFERENCES replies(id) ON DELETE CASCADE, fingerprint TEXT NOT NULL,
  name TEXT NOT NULL, arm TEXT NOT NULL, probability REAL NOT NULL, inputs INTEGER NOT NULL,
  turns BLOB NOT NULL
);
CREATE INDEX routes_by_adapter ON routes(fingerprint, name);
CREATE TABLE router_cells (  -- state is NULL where no training was good enough yet
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, state BLOB, report TEXT NOT NULL, created REAL NOT NULL,
  PRIMARY KEY (fingerprint, name)
);
"""
_V3 = """
ALTER TABLE messages ADD COLUMN parent INTEGER REFERENCES messages(id) ON DELETE CASCADE;
UPDATE messages SET parent = (
  SELECT max(p.id) FROM messages p WHERE p.session_id = messages.session_id AND p.id < messages.id
);
CREATE INDEX messages_by_parent ON messages(parent);
ALTER TABLE sessions  -- head: the last message of the branch that is in use
  ADD COLUMN head INTEGER;
UPDATE sessions SET head = (SELECT max(id) FROM messages WHERE session_id = sessions.id);
ALTER TABLE sessions  -- deleted: when it was put away; NULL for a chat that is there
  ADD COLUMN deleted REAL;
CREATE VIRTUAL TABLE messages_text USING fts5(
  content, content='messages', content_rowid='id', tokenize='trigram'
);
INSERT INTO messages_text(messages_text) VALUES ('rebuild');
CREATE TRIGGER messages_text_insert AFTER INSERT ON messages
  BEGIN INSERT INTO messages_text(rowid, content) VALUES (NEW.id, NEW.content); END;
CREATE TRIGGER messages_text_delete AFTER DELETE ON messages BEGIN
  INSERT INTO messages_text(messages_text, rowid, content) VALUES ('delete', OLD.id, OLD.content); END;
CREATE TABLE drafts (  -- replies that are being written, as far as they are known; process: number:token
  session_id TEXT PRIMARY KEY REFERENCES sessions(id) ON DELETE CASCADE, parent INTEGER NOT NULL,
  process TEXT NOT NULL, reply TEXT NOT NULL
);
"""
_V4 = """
ALTER TABLE replies  -- sampled tokens at the beginning that are the model's thoughts
  ADD COLUMN thought INTEGER NOT NULL DEFAULT 0;
"""
_V5 = """
ALTER TABLE replies  -- what the taste model knows of the text, see sona/taste_features.py; NULL: not computed
  ADD COLUMN features BLOB;
"""
_V6 = """
ALTER TABLE replies  -- id of the reply that was shown instead (best of n); NULL: this one was shown
  ADD COLUMN beside TEXT;
"""
_V7 = """
CREATE TABLE preferences (  -- version: the one that this preference made; better, worse: reply ids
  id INTEGER PRIMARY KEY AUTOINCREMENT, fingerprint TEXT NOT NULL, adapter TEXT NOT NULL,
  version INTEGER NOT NULL, better TEXT NOT NULL REFERENCES replies(id),
  worse TEXT NOT NULL REFERENCES replies(id), kind TEXT NOT NULL, strength REAL NOT NULL,
  weight REAL NOT NULL, in_force INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX preferences_by_better ON preferences(better);
CREATE INDEX preferences_by_worse ON preferences(worse);
CREATE INDEX preferences_by_adapter ON preferences(fingerprint, adapter, in_force, id);
ALTER TABLE replies  -- id of the reply that the user rewrote to this one; NULL: the model wrote it
  ADD COLUMN edited TEXT;
"""
_V8 = """
ALTER TABLE replies  -- a digest of the API key that asked for it; empty: asked for without one
  ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
"""
_V9 = """
ALTER TABLE adapters  -- 1: state is compressed, see weights.py
  ADD COLUMN packed INTEGER NOT NULL DEFAULT 0;
CREATE INDEX adapters_with_weights ON adapters(fingerprint, name, packed, version) WHERE state IS NOT NULL;
CREATE INDEX adapters_by_base ON adapters(fingerprint, name, base) WHERE state IS NOT NULL;
"""
_V10 = """
CREATE TABLE index_cleaning (  -- one row, see search_index.py
  deleted INTEGER NOT NULL, merging INTEGER NOT NULL
);
INSERT INTO index_cleaning VALUES (0, 0);
CREATE INDEX messages_by_reply ON messages(reply_id) WHERE reply_id IS NOT NULL;
CREATE INDEX replies_with_examples ON replies(id, examples) WHERE examples != '';
"""
_V11 = """
CREATE TABLE responses (  -- see responses.py; bytes: of input and answer
  id TEXT PRIMARY KEY REFERENCES replies(id) ON DELETE CASCADE, previous TEXT, tenant TEXT NOT NULL,
  bytes INTEGER NOT NULL, created REAL NOT NULL, input BLOB NOT NULL, answer BLOB NOT NULL
);
CREATE INDEX responses_by_previous ON responses(previous);
"""
_V12 = """
ALTER TABLE sessions  -- 1: the user wants it first in lists
  ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0;
"""
_V13 = """
ALTER TABLE sessions  -- notes that the model reads in place of the messages up to one, see summaries.py
  ADD COLUMN summary TEXT;
ALTER TABLE sessions
  ADD COLUMN summarized_to INTEGER;
ALTER TABLE sessions  -- under which lists show it
  ADD COLUMN folder TEXT NOT NULL DEFAULT '';
"""
_V14 = """
ALTER TABLE messages  -- calls of tools as JSON, see chats/tool_turns.py; '' for none
  ADD COLUMN calls TEXT NOT NULL DEFAULT '';
"""
_V15 = """
ALTER TABLE adapters  -- the version from which state is the difference; 0: state is whole, see weights.py
  ADD COLUMN source INTEGER NOT NULL DEFAULT 0;
CREATE INDEX adapters_by_source ON adapters(fingerprint, name, source) WHERE source > 0;
"""
_V16 = """
CREATE TABLE model_choices (  -- the model that the selector chose; turns: as in routes, of the model reader
  reply_id TEXT PRIMARY KEY REFERENCES replies(id) ON DELETE CASCADE, reader TEXT NOT NULL, arm TEXT NOT NULL,
  probability REAL NOT NULL, ms REAL NOT NULL, inputs INTEGER NOT NULL, turns BLOB NOT NULL
);
CREATE INDEX model_choices_by_reader ON model_choices(reader);
"""
_V17 = """
ALTER TABLE replies  -- estimated, 0 to 1, see optimizer/quality.py; NULL: not known
  ADD COLUMN quality REAL;
ALTER TABLE replies  -- {name: 0 to 1} as JSON
  ADD COLUMN quality_parts TEXT NOT NULL DEFAULT '{}';
ALTER TABLE kv_observations  -- ms from the request to the first token; 0: not known
  ADD COLUMN ttft_ms REAL NOT NULL DEFAULT 0;
ALTER TABLE kv_observations  -- tokens that the model wrote
  ADD COLUMN written INTEGER NOT NULL DEFAULT 0;
ALTER TABLE kv_observations  -- replies in progress when this one ended, this one included
  ADD COLUMN replies INTEGER NOT NULL DEFAULT 1;
ALTER TABLE kv_observations  -- cores that other programs kept busy meanwhile
  ADD COLUMN others REAL NOT NULL DEFAULT 0;
CREATE TABLE tunings (  -- what the optimizer tried, and what it keeps in force; see tunings.py
  fingerprint TEXT NOT NULL, backend TEXT NOT NULL, knob TEXT NOT NULL, value TEXT NOT NULL,
  report TEXT NOT NULL, created REAL NOT NULL, PRIMARY KEY (fingerprint, backend, knob)
);
"""
_V18 = """
CREATE INDEX replies_by_tenant ON replies(tenant, seq);
CREATE INDEX replies_by_adapter ON replies(fingerprint, adapter, seq);
"""
_V19 = """
CREATE TABLE removed_adapters (  -- their last numbers; a new adapter of the same name goes on there
  fingerprint TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, base INTEGER NOT NULL,
  PRIMARY KEY (fingerprint, name)
);
"""
_V20 = """
CREATE TABLE known_models (  -- the model to which a fingerprint belongs, see model_data.py
  fingerprint TEXT PRIMARY KEY, content TEXT NOT NULL
);
"""
_V21 = """
ALTER TABLE responses  -- the ids of the responses whose items its input names, see responses.py
  ADD COLUMN named TEXT NOT NULL DEFAULT '';
CREATE INDEX responses_with_names ON responses(id, named) WHERE named != '';
"""
_STEPS = (
    _V1,
    _V2,
    _V3,
    _V4,
    _V5,
    _V6,
    _V7,
    _V8,
    _V9,
    _V10,
    _V11,
    _V12,
    _V13,
    _V14,
    _V15,
    _V16,
    _V17,
    _V18,
    _V19,
    _V20,
    _V21,
)  # each migration step brings the store's file from one format version to the next
VERSION = len(_STEPS)  # the newest format


def statements(version: int, before: int = 0) -> list[str]:
    """Return the statements that bring a file of format `before` to format `version`."""
    return [statement for step in _STEPS[before:version] for statement in step.split(";\n")]


def migrate(db: sqlite3.Connection) -> None:
    """Bring the store's file to the format VERSION. If a newer ruvmlx wrote the file, raise StoreError and do
    not change the file."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found > VERSION:
        raise StoreError(
            f"the store was written by a newer ruvmlx (format {found}; this one reads up to {VERSION}). "
            "Update ruvmlx, or set RUVMLX_HOME to another folder."
        )
    if found < VERSION:
        _upgrade(db)


def _upgrade(db: sqlite3.Connection) -> None:
    """Run the missing steps, unless another process has run them in the meantime."""
    db.execute("BEGIN IMMEDIATE")
    try:
        found = db.execute("PRAGMA user_version").fetchone()[0]
        for statement in statements(VERSION, found):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {max(found, VERSION)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise

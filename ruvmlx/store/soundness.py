"""This module checks that an unknown database has exactly this program's tables, indexes and triggers, and
only values of the right types.

SQLite's own check reads pages and indexes. But SQLite's own check accepts triggers, views, checks and
generated columns of another program, which would run with the next statement. SQLite's own check also accepts
values of a wrong type.
"""

import re
import sqlite3
from collections.abc import Iterator

from ..text import one_line
from .schema import statements

ANSWER_LENGTH = 200  # the maximum number of characters of the text that `difference` returns
YEAR_10000 = 253_402_300_800  # seconds since 1970
_TYPES = {"INTEGER": "'integer'", "REAL": "'real'", "TEXT": "'text'", "BLOB": "'blob'"}
_TIMES = ("created", "updated", "deleted")
_NUMBERS_OF_4_BYTES = ("prompt_ids", "sampled_ids", "query")
# The comparison ignores the comments in the schema, because released versions have different comments.
_COMMENT = re.compile(r"--[^\n]*")
# the names of the tables that FTS5 makes begin so; the quotes in their SQL depend on FTS5's version
_SHADOWS = "messages_text_"


def difference(db: sqlite3.Connection, version: int) -> str:
    """Return the first difference from a store of this format; "" if there is no difference."""
    if db.execute("PRAGMA encoding").fetchone()[0] != "UTF-8":
        return "its text is not UTF-8"
    db.create_function("is_utf8", 1, _is_utf8, deterministic=True)
    found, own = _schema(db), _own_schema(version)
    odd = next((key for key in {**own, **found} if own.get(key) != found.get(key)), None)
    if odd is not None:
        return _short(f"{odd[0]} {odd[1]!r} is not that of format {version}")
    tables = (name for kind, name in own if kind == "table")
    return next(filter(None, (_odd_values(db, name) for name in tables)), "")


def _own_schema(version: int) -> dict[tuple[str, str], str]:
    db = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for statement in statements(version):
            db.execute(statement)
        return _schema(db)
    finally:
        db.close()


def _schema(db: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """Return {(type, name): the SQL that made the table, index or trigger}."""
    made = db.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
    return {(str(kind), str(name)): f"{table} {_words(name, sql)}" for kind, name, table, sql in made}


def _words(name: object, sql: object) -> str:
    words = " ".join(_COMMENT.sub("", str(sql)).split())
    return words.replace("'", "").replace('"', "") if str(name).startswith(_SHADOWS) else words


def _odd_values(db: sqlite3.Connection, table: str) -> str:
    """Return a text if a value has another type than its column, or is a number that this program never
    writes. Return "" if there is no such value."""
    wrong = list(_conditions(db, table))
    if wrong and db.execute(f'SELECT 1 FROM "{table}" WHERE {" OR ".join(wrong)} LIMIT 1').fetchone():
        return _short(f"table {table} holds a value of another type or size than its columns")
    return ""


def _conditions(db: sqlite3.Connection, table: str) -> Iterator[str]:
    """Yield SQL conditions that no valid row fulfils. table: one of this program's own tables."""
    for _, name, kind, *_ in db.execute(f'PRAGMA table_info("{table}")').fetchall():
        if kind in _TYPES:
            yield f"typeof({name}) NOT IN ({_TYPES[kind]}, 'null')"
        if kind == "TEXT":
            yield f"NOT is_utf8(CAST({name} AS BLOB))"
        if kind == "REAL":
            yield f"abs({name}) >= {YEAR_10000 if name in _TIMES else 1e300}"
        if name in _NUMBERS_OF_4_BYTES:
            yield f"length({name}) % 4"


def _is_utf8(data: bytes | None) -> bool:
    try:
        (data or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def _short(text: str) -> str:
    return one_line(text)[:ANSWER_LENGTH]

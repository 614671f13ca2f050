"""This module has the SQL that selects an adapter version and its ancestors (its parent, the parent's parent,
and so on to version 0). Several parts of the store use this SQL."""

from .database import Database

# A common table expression `ancestors(version, step)`: a version, then its parents down to version 0.
# Arguments: ?1: fingerprint of the model; ?2: adapter name; ?3: the first version (the head); ?4: the maximum
# number of steps.
WITH_ANCESTORS = (
    "WITH RECURSIVE ancestors(version, step) AS (SELECT ?3, 1 UNION ALL"
    " SELECT a.parent, ancestors.step + 1 FROM ancestors JOIN adapters a"
    " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = ancestors.version"
    # in a damaged store, the parents can form a circle
    " WHERE a.parent < a.version AND ancestors.step < ?4) "
)
ALL_STEPS = 1 << 62


def steps_to(oldest: int, head: int) -> int:
    """Return a number of steps that reaches every ancestor of `head` from the version `oldest` on. Each step
    goes to a lower number. After years, a walk over all ancestors takes 20 ms."""
    return max(1, head - oldest + 1)


def enforce(db: Database, table: str, subject: str, fingerprint: str, name: str, head: int) -> None:
    """Mark the ratings or preferences that made the head or one of its ancestors as in force, and all other
    rows of this adapter as not in force. Call inside a transaction.

    subject: the SQL columns that name the rated reply or replies; of the rows with equal subjects, only the
        newest is in force
    head: the version in use
    """
    db.execute(
        WITH_ANCESTORS + f", led AS MATERIALIZED (SELECT max(id) AS id FROM {table}"
        " WHERE fingerprint = ?1 AND adapter = ?2 AND version IN (SELECT version FROM ancestors)"
        f" GROUP BY {subject}) UPDATE {table} SET in_force = NOT in_force"
        " WHERE fingerprint = ?1 AND adapter = ?2 AND in_force != (id IN (SELECT id FROM led))",
        fingerprint,
        name,
        head,
        ALL_STEPS,
    )


def newest_version(db: Database, table: str, fingerprint: str, name: str, head: int) -> int:
    """Return the newest version, among the head and its ancestors, that a row of the table (a rating or a
    preference) made; 0 if there is no such version."""
    found = db.value(
        WITH_ANCESTORS + f"SELECT max(version) FROM {table} WHERE fingerprint = ?1 AND adapter = ?2"
        " AND version IN (SELECT version FROM ancestors)",
        fingerprint,
        name,
        head,
        ALL_STEPS,
    )
    return found or 0

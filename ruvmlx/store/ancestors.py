"""SQL for a version and its ancestors, shared by the parts that walk the tree of an adapter's versions."""

from .database import Database

# A common table `ancestors(version, step)`: a version, then its parents down to version 0.
# ?1 fingerprint, ?2 adapter name, ?3 version to begin with (the head), ?4 largest number of steps.
WITH_ANCESTORS = (
    "WITH RECURSIVE ancestors(version, step) AS (SELECT ?3, 1 UNION ALL"
    " SELECT a.parent, ancestors.step + 1 FROM ancestors JOIN adapters a"
    " ON a.fingerprint = ?1 AND a.name = ?2 AND a.version = ancestors.version"
    " WHERE a.parent < a.version AND ancestors.step < ?4) "  # a damaged store may have a circle
)
ALL_STEPS = 1 << 62


def enforce(db: Database, table: str, subject: str, fingerprint: str, name: str, head: int) -> None:
    """Put the rows of the table that led to a version in force, and no others. Call inside a transaction.

    subject: SQL columns that say what a row is about; only the newest row about one subject is in force.
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
    """The newest version that a row of the table made, among the head and its ancestors; 0: none did."""
    found = db.value(
        WITH_ANCESTORS + f"SELECT max(version) FROM {table} WHERE fingerprint = ?1 AND adapter = ?2"
        " AND version IN (SELECT version FROM ancestors)",
        fingerprint,
        name,
        head,
        ALL_STEPS,
    )
    return found or 0

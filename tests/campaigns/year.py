"""The size of a store after a year of 20 ratings a day, by table and column.

    python -m tests.campaigns.year            makes such a store in a scratch folder, and prints its sizes
    python -m tests.campaigns.year 18         for 18 days
    python -m tests.campaigns.year 365 attention      with ratings that change these matrices (learn_targets)

Replies, ratings and weights are simulated as two_years.py does, with one training: each that is kept adds its
base LoRA. test_year.py runs it on a small store.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ruvmlx import settings
from ruvmlx.runtime import Runtime
from ruvmlx.store import Store

from .two_years import Opener, Use, live

PER_DAY = 20
BYTES = 200_000_000  # the limit of a year


@dataclass(frozen=True)
class Sizes:
    """bytes: {(table, column): the bytes of its values}.  file: the bytes of the file."""

    bytes: dict[tuple[str, str], int]
    file: int

    def lines(self, days: int) -> list[str]:
        tables: dict[str, int] = {}
        for (table, _), size in self.bytes.items():
            tables[table] = tables.get(table, 0) + size
        said = [f"{'':32}{'MB':>9}{'bytes per rating':>19}"]
        large = [name for name, size in tables.items() if 1000 * size > self.file]
        for table in sorted(large, key=lambda name: -tables[name]):
            said.append(_line(table, tables[table], days))
            columns = sorted((-size, column) for (name, column), size in self.bytes.items() if name == table)
            said += [_line(f"  {column}", -size, days) for size, column in columns[:3]]
        mark = "  OVER" if self.file > BYTES * max(1, days / 365) else ""
        return [*said, _line("the file", self.file, days) + mark]


def _line(name: str, size: int, days: int) -> str:
    return f"{name:32}{size / 1e6:9.2f}{size / (PER_DAY * days):19.0f}"


def use_of(days: int) -> Use:
    """What a user does in so many days."""
    ratings = PER_DAY * days
    return Use(max(2, days), ratings, ratings, 1, 0)


def sizes_of(store: Store) -> Sizes:
    """Measure a store that no process writes."""
    store.db.truncate_log()
    found = {}
    for (table,) in store.db.rows(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE '%VIRTUAL%'"
    ):
        for _, column, *_ in store.db.rows(f'PRAGMA table_info("{table}")'):
            sql = f'SELECT coalesce(sum(length(CAST("{column}" AS BLOB))), 0) FROM "{table}"'
            found[table, column] = store.db.value(sql)
    return Sizes(found, store.path.stat().st_size)


def simulate(open_runtime: Opener, days: int) -> Sizes:
    """Write the days and measure the store."""
    live(open_runtime, use_of(days))
    with open_runtime() as runtime:
        return sizes_of(runtime.store)


def main() -> None:
    days = int(sys.argv[1]) if len(sys.argv) > 1 else 365
    targets = sys.argv[2] if len(sys.argv) > 2 else "head"
    with tempfile.TemporaryDirectory(prefix="ruvmlx-campaign-") as folder:
        os.environ["RUVMLX_HOME"] = str(Path(folder))
        found = simulate(lambda: Runtime.open(settings.Settings(learn_targets=targets)), days)
    print("\n".join(found.lines(days)))


if __name__ == "__main__":
    sys.exit(main())

"""Plants the mistakes of data/mutants.tsv and says which tests find them: are fewer found than before?

    python -m tests.mutants CHECKOUT --out after.json [--only TEXT] [--full]
    python -m tests.mutants --table before.json after.json

CHECKOUT is a clone or worktree with an environment of its own (`uv sync`) in which nothing is changed. One
line is changed, the tests that concern it run, and it is put back. Tests with inputs, as `full("neon")`,
take part, as in the checkout of whoever makes the change. A C mistake is found by the programs of neon/tests,
which compile the sources; the installed library is not built again.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    right: str  # occurs once in the file
    wrong: str
    tests: str  # files, apart by a space

    @property
    def name(self) -> str:
        return f"{self.file}: {self.right} -> {self.wrong}"


TABLE = Path(__file__).parent / "data" / "mutants.tsv"
MUTANTS = [Mutant(*line.split("\t")) for line in TABLE.read_text().splitlines()]


def run(checkout: Path, mutant: Mutant, options: list[str]) -> dict[str, object]:
    """Plant it, run its tests, put the line back."""
    file = checkout / mutant.file
    sound = file.read_text()
    if sound.count(mutant.right) != 1:
        return {"outcome": "not planted"}
    begun = time.monotonic()
    try:
        file.write_text(sound.replace(mutant.right, mutant.wrong))
        done = pytest(checkout, mutant, "-x", *options)
    finally:
        file.write_text(sound)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    outcome = {0: "survived", 1: "found"}.get(done.returncode, "no tests" if not found else "found")
    return {"outcome": outcome, "by": found[1] if found else "", "s": round(time.monotonic() - begun)}


def pytest(checkout: Path, mutant: Mutant, *options: str) -> subprocess.CompletedProcess[str]:
    there = [name for name in mutant.tests.split() if (checkout / name).exists()]
    command = [".venv/bin/python", "-m", "pytest", "-q", "-n", "0", *options, *there]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def all_of(checkout: Path, only: str, options: list[str], out: Path) -> None:
    """Results so far are kept in `out`, so that a run that was stopped goes on."""
    found = json.loads(out.read_text()) if out.exists() else {}
    for mutant in MUTANTS:
        if only in mutant.name and mutant.name not in found:
            pytest(checkout, mutant, "--collect-only")  # its inputs as they are count as tested
            found[mutant.name] = run(checkout, mutant, options)
            out.write_text(json.dumps(found, indent=1))
            print(f"{found[mutant.name]} {mutant.name!r}", flush=True)


def table(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> None:
    print("| mutant | before | after | by |\n|---|---|---|---|")
    for mutant in MUTANTS:
        was, now = (found.get(mutant.name, {"outcome": "not run"}) for found in (before, after))
        print(f"| `{mutant.name.strip()}` | {was['outcome']} | {now['outcome']} | {now.get('by', '')} |")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("checkout", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"))
    parser.add_argument("--only", default="", help="mutants whose name has this text")
    parser.add_argument("--full", action="store_true", help="pass --full to pytest")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; the line is put back"))
    if given.table:
        table(*(json.loads(file.read_text()) for file in given.table))
    elif given.checkout:
        all_of(given.checkout.resolve(), given.only, ["--full"] if given.full else [], given.out)
    else:
        sys.exit("a checkout, or --table")


if __name__ == "__main__":
    main()

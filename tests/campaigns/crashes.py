"""Each writing verb, killed and failed at each call that changes files, and after a crash of the machine.

    python -m tests.campaigns.crashes [VERB...]            a sample (crash_sample.py): seconds for a verb
    python -m tests.campaigns.crashes [VERB...] --full     every call, 1,000 images a verb: hours for all

A kill ends the process before one call. A verb whose run takes long is stopped before each call of one run
instead; a copy of its folder is what a kill there leaves (`--compare` tries both). A fault lets one call fail
(EIO, ENOSPC), write a half, or finds the disk full from that call on. An image is what the disk can hold
after a crash of the machine: later writes without the earlier ones, names without contents, cut writes
(crash_images.py). After each the next start must find the state from before the verb or the state after it,
or a state between two commits that the verb's row names (crash_verbs.py); `doctor` must find nothing, and no
unfinished file may stay. A verb that fails says so in one line; one that says it is done has its new state on
the disk. The same holds with a clock that jumps, in a read-only data folder, on a file system without locks,
and with a full folder of temporary files (crash_places.py).

Linux, with gcc; it works in memory (/dev/shm) where there is room. Exit code 1: there are findings.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from .crash_row import HEADING, add_up
from .crash_trial import Bench, is_loaded, start_with_shim
from .crash_verb_trials import Extent, Trials
from .crash_verbs import WRITES, Verb


def prepare_bench(folder: Path, wanted: Collection[str]) -> Bench:
    """Return a bench with its bases. This process must have the shim. It imports what the verbs need."""
    _plant()
    import ruvmlx.apps.cli

    import ruvmlx.backends.native.backend
    import ruvmlx.runtime  # noqa: F401 - the same

    from .crash_bases import prepare, speed_up_tiny_model

    speed_up_tiny_model()
    bench = Bench(folder)
    prepare(bench, wanted)
    bench.reset("empty")
    bench.check()
    bench.import_again()
    return bench


def _plant() -> None:
    """Put a mistake into the program, for the test of the campaign: RUVMLX_PLANTED names another files.py."""
    if planted := os.environ.get("RUVMLX_PLANTED"):
        from ruvmlx.platform import files

        exec(compile(Path(planted).read_text(), planted, "exec"), vars(files))


def select_verbs(names: Sequence[str], with_slow: bool) -> list[Verb]:
    """Return the verbs whose names begin with one of `names`. Without names, return all verbs; the slow
    ones only with `with_slow`."""
    found = [verb for verb in WRITES if any(verb.name.startswith(name) for name in names)]
    return found if names else [verb for verb in WRITES if with_slow or not verb.is_slow]


def scratch() -> Path:
    memory = Path("/dev/shm")
    return Path(
        tempfile.mkdtemp(prefix="ruvmlx-crashes-", dir=memory if os.access(memory, os.W_OK) else None)
    )


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("verbs", nargs="*", help="their names, or how these begin")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--kills", type=int, default=10, help="of each verb, without --full")
    parser.add_argument("--faults", type=int, default=10, help="of each verb, without --full")
    parser.add_argument("--images", type=int, help="of each verb: 1,000 with --full, else 30")
    parser.add_argument("--compare", action="store_true", help="also compare stops of a run with kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; it is removed")
    given = parser.parse_args()
    folder = given.folder or Path(os.environ.get("RUVMLX_CRASHES") or scratch())
    if not is_loaded():
        os.environ["RUVMLX_CRASHES"] = str(folder)
        start_with_shim(folder)
    images = given.images if given.images is not None else 1000 if given.full else 30
    few = (None, None) if given.full else (given.kills, given.faults)
    extent = Extent(*few, images, given.seed, given.compare)
    try:
        verbs = select_verbs(given.verbs, given.full)
        bench = prepare_bench(folder, {verb.base for verb in verbs})
        print(HEADING)
        rows = []
        for verb in verbs:
            rows.append(Trials(bench, verb).all(extent))
            print(rows[-1].line(), flush=True)
            for finding in rows[-1].findings[:12]:
                print(f"    {finding}", flush=True)
    finally:
        _remove(folder)
    total = add_up(rows)
    print(total.line())
    return 1 if total.findings else 0


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())

"""Random calls of the C library's API, guided by coverage, under -fsanitize=address: neon/tests/fuzz.c.

    python -m tests.campaigns.fuzz_c --seconds 3600

It needs clang with libFuzzer. A finding ends it; its input is kept in the folder --found. Put that file into
tests/data/fuzz_c, where test_fuzz_c.py tries it from then on.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from ..kernels.c_programs import build, compiler

CASES = Path(__file__).parents[1] / "data" / "fuzz_c"
# By default, libFuzzer limits the peak memory of its own process. It reads the peak from ru_maxrss. The
# kernel keeps ru_maxrss when a process calls exec, so the peak includes the memory of the process that
# started libFuzzer. For this reason, the campaign limits each single allocation instead.
LIMITS = ("-timeout=60", "-max_len=65536", "-rss_limit_mb=0", "-malloc_limit_mb=2048")
FLAGS = "-fsanitize=address,fuzzer-no-link -fno-sanitize-recover=all -Wno-pass-failed"


def program() -> Path:
    """Compile the calls; pytest's Skipped without a compiler for them."""
    options = [f"-DCMAKE_C_FLAGS={FLAGS}", "-DRVM_FUZZ=ON", "-DRVM_MATRIX_O=-O1"]
    return build("rvm_fuzz", compiler("clang"), *options)


def fuzz(*options: str, corpus: Path) -> int:
    """The exit code of libFuzzer; 0: nothing was found."""
    folders = [corpus, *([CASES] if CASES.is_dir() else [])]
    command = [str(program()), *LIMITS, *options, *map(str, folders)]
    return subprocess.run(command, check=False).returncode


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--corpus", type=Path, default=Path("build/fuzz/corpus/c"))
    parser.add_argument("--found", type=Path, default=Path("build/fuzz/found/c"))
    given = parser.parse_args()
    for folder in (given.corpus, given.found):
        folder.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={given.seconds}", f"-artifact_prefix={given.found}/", "-print_final_stats=1"]
    sys.exit(fuzz(*options, corpus=given.corpus))


def sample(runs: int) -> int:
    """The committed cases and so many random inputs, the same each time."""
    with tempfile.TemporaryDirectory(prefix="ruvmlx-fuzz-") as folder:
        return fuzz(f"-runs={runs}", "-seed=1", f"-artifact_prefix={folder}/", corpus=Path(folder))


if __name__ == "__main__":
    main()

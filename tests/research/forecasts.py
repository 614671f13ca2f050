"""This script compares the forecast of `ruvmlx launch` with the measured rate, on this machine (Linux).

    python -m tests.research.forecasts [-n 2] [--model M] [--runs 3] [--tokens 48]

Each run starts `ruvmlx launch -n N -- generate`, then `ruvmlx generate` alone. A row has the forecast and the
measured rate of all processes, those of one process, and the share of the processors that other programs had
in each. A rate beside a share over OTHERS does not count, because other programs took processors from it. The
script makes at most three times as many runs. The last line has the largest differences that count. The
script exits with 1 if that of all processes is over LIMIT.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT, OTHERS = 0.2, 0.05
PROMPT = "Tell me about the rivers of Europe."
FORECAST = re.compile(r"about (\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
IDLE = (3, 4)  # the columns of /proc/stat for idle time


def run_words(words: Sequence[str]) -> tuple[float, list[float]]:
    """Run a command of ruvmlx. Return the measured tokens per second, and the rates in its forecast."""
    done = subprocess.run(
        [sys.executable, "-m", "ruvmlx", *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["generation_tps"], [float(x) for x in FORECAST.findall(done.stderr)]


def other_seconds() -> float:
    """Return the processor time that others than this program's children have had, and a hypervisor's."""
    ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    busy = sum(t for i, t in enumerate(ticks) if i not in IDLE) / os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    return busy - own.ru_utime - own.ru_stime


def measure(words: Sequence[str]) -> tuple[float, list[float], float]:
    """Return what `run_words` returns, and the share of the processors that others had meanwhile."""
    before, begun = other_seconds(), time.monotonic()
    rate, forecast = run_words(words)
    share = (other_seconds() - before) / (time.monotonic() - begun) / (os.cpu_count() or 1)
    return rate, forecast, share


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", dest="processes", type=int, default=2)
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    flags = parser.parse_args()
    words = ["generate", PROMPT, "--max-tokens", str(flags.tokens), "--temp", "0", "--json"]
    words += ["--model", flags.model] if flags.model else []
    counted: list[list[float]] = [[], []]
    print(f"{flags.processes} processes: forecast, measured; one: the same; tokens per second", flush=True)
    for _ in range(3 * flags.runs):
        together, forecast, share = measure(["launch", "-n", str(flags.processes), "--", *words])
        alone, _, own_share = measure(words)
        rows = zip(forecast, (together, alone), (share, own_share), counted, strict=True)
        print("; ".join(cell(*row) for row in rows), flush=True)
        if min(map(len, counted)) >= flags.runs:
            break
    worst = [max(differences, default=1.0) for differences in counted]
    print(
        f"largest difference {worst[0]:.0%} of {len(counted[0])}, alone {worst[1]:.0%} of {len(counted[1])}"
    )
    sys.exit(worst[0] > LIMIT)


def cell(said: float, found: float, share: float, counted: list[float]) -> str:
    """Return the text of a forecast and a rate. Add their difference to `counted`, if it counts."""
    if share <= OTHERS:
        counted.append(abs(said / found - 1))
    beside = f"others {share:.0%}" + ("" if share <= OTHERS else ", does not count")
    return f"{said:.3g} {found:.3g} ({said / found - 1:+.0%}, {beside})"


if __name__ == "__main__":
    main()

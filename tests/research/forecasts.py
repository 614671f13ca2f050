"""Compares the forecast of `ruvmlx launch` with the rate that it then writes, on this machine.

    python -m tests.research.forecasts [-n 2] [--model M] [--runs 3] [--tokens 48]

Each run starts `ruvmlx launch -n N -- generate`, then `ruvmlx generate` alone. A run's row has the forecast
and the measured rate of all processes, then those of one process. The last line has the largest difference.
The script exits with 1 if the difference is over LIMIT.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence

LIMIT = 0.2
PROMPT = "Tell me about the rivers of Europe."
FORECAST = re.compile(r"about (\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def run_words(words: Sequence[str]) -> tuple[float, list[float]]:
    """Run a command of ruvmlx. Return the measured tokens per second, and the rates in its forecast."""
    done = subprocess.run(
        [sys.executable, "-m", "ruvmlx", *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)["generation_tps"], [float(x) for x in FORECAST.findall(done.stderr)]


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
    worst = 0.0
    print("processes: forecast, measured; one process: forecast, measured (tokens per second)", flush=True)
    for _ in range(flags.runs):
        together, forecast = run_words(["launch", "-n", str(flags.processes), "--", *words])
        alone, _ = run_words(words)
        pairs = list(zip(forecast, (together, alone), strict=False))
        worst = max(worst, *(abs(said / found - 1) for said, found in pairs))
        print(
            "  ".join(f"{said:.4g} {found:.4g} ({said / found - 1:+.0%})" for said, found in pairs),
            flush=True,
        )
    print(f"largest difference {worst:.0%} (limit {LIMIT:.0%})")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()

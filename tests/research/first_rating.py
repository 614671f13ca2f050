"""Measures the first rating of a new installation.

    python -m tests.research.first_rating [--rounds N]

Each round starts `ruvmlx serve` with an empty data folder, lets the starter write one reply, and rates this
reply at once. A row has the seconds of the request, and the seconds of the learner's own work in it. The
difference is the time that the rating waits for work that the server began after the reply.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

QUESTION = [{"role": "user", "content": "Name three rivers, please."}]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def first_rating() -> tuple[float, float]:
    """Return (seconds of the request, seconds of the learner's work)."""
    with tempfile.TemporaryDirectory(prefix="ruvmlx-first-") as home:
        command = [sys.executable, "-m", "ruvmlx", "serve", "--json", "--port", "0", "--model", "starter"]
        process = subprocess.Popen(
            command,
            env={**os.environ, "RUVMLX_HOME": home},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["base_url"]
            reply = post(
                f"{url}/chat/completions", {"model": "starter", "messages": QUESTION, "max_tokens": 60}
            )
            begun = time.perf_counter()
            rated = post(f"{url}/ratings", {"id": reply["id"], "rating": "up"})
            return time.perf_counter() - begun, rated["seconds"]
        finally:
            process.terminate()
            process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    for _ in range(parser.parse_args().rounds):
        whole, own = first_rating()
        print(f"the request {whole:.2f} s, of it the learner's work {own:.2f} s", flush=True)


if __name__ == "__main__":
    main()

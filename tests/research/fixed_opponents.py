"""Compare two ways to count the wins of drawn users, from a finished run of `ruvmlx prove --drawn`.

    python -m tests.research.fixed_opponents apps/prove/DRAWN-STYLE.jsonl --arm style

`prove` compares each new reply with one reply of the untouched model, which is the same in every run. So a
user whose untouched replies are better than usual by chance seems to lose. The stars say more. A reply with s
stars is in the fifth number s of the untouched model's replies to the question, so it beats a random one of
these replies with a probability of (s - 0.5) / 5. A line has, in percent: the wins against the fixed replies,
the wins of a random untouched reply against the fixed replies, and the wins of the new replies against random
untouched replies with a 95% interval (bootstrap over questions).
"""

import argparse
import json
from pathlib import Path

import numpy as np

from apps.prove.statistics import mean_interval, win_rate

SHARES = (np.arange(1, 6) - 0.5) / 5  # the wins against a random untouched reply, by stars


def stars_of(line: str, arm: str) -> tuple[int, np.ndarray, np.ndarray]:
    """Return a user's number, and the stars [Q] of the untouched model's and of the new replies."""
    result = json.loads(line)
    stars = result["checkpoints"][-1]["stars"]
    return result["user"], np.array(stars["original"]), np.array(stars[arm])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--arm", default="style")
    flags = parser.parse_args()
    lines = filter(str.strip, flags.file.read_text().splitlines())
    users = sorted((stars_of(line, flags.arm) for line in lines), key=lambda found: found[0])
    rates = []
    for user, old, new in users:
        random_stars = np.repeat(np.arange(1, 6), len(old))
        fixed, chance = win_rate(new, old), win_rate(random_stars, np.tile(old, 5))
        shares = SHARES[new - 1]
        low, high = mean_interval(shares)
        rates.append((fixed, chance, shares.mean(), low, high))
        print(
            f"user {user:2}  {fixed:6.1%}  {chance:6.1%}  {shares.mean():6.1%} ({low:.1%} to {high:.1%})",
            flush=True,
        )
    table = np.array(rates)
    low, high = mean_interval(table[:, 2])
    worst = users[int(table[:, 3].argmin())][0]
    fixed, chance, share = table[:, :3].mean(axis=0)
    print(f"mean     {fixed:6.1%}  {chance:6.1%}  {share:6.1%} ({low:.1%} to {high:.1%})")
    print(f"lowest lower end: user {worst}, {table[:, 3].min():.1%}")


if __name__ == "__main__":
    main()

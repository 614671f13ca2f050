"""This study prints how the KL and the rise of prose fall if the scale s of a style becomes smaller.

    python -m tests.research.style_shares

The style loop of users of `ruvmlx prove` finds the largest s after 30 ratings with the starter model. For
each share of this s, the study prints two numbers:

* the measured KL divided by its estimate, which is share**MIN_POWER times the KL of the largest s
* the measured rise of prose minus its estimate (share times the rise of the largest s), divided by the limit

The style loop can use a smaller s without a measurement (`MeasuredBase.safe_share`). So the first number must
be at most 1, and the second number at most 0.
"""

import argparse
import os
import tempfile

from ruvmlx.apps.prove import prompts
from ruvmlx.apps.prove.users import TASTES

import ruvmlx
from ruvmlx.runtime import Runtime
from ruvmlx.sona.optional.style_choice import StyleChoice
from ruvmlx.sona.optional.style_scale import MIN_POWER, RISE
from ruvmlx.sona.taste_push import END_KL

from .style_cost import rate_replies

SHARES = (0.9, 0.7, 0.4)


def falls(runtime: Runtime) -> list[tuple[float, float, float]]:
    """Run one step of the style loop. Return (share, first number, second number) of each share."""
    loop, learner = runtime.learning.loops.style(), runtime.learner
    report = runtime.learning.loops.consolidate()
    basis = loop._source.basis(lambda *_: None, lambda: None)
    choice = StyleChoice.of(learner.taste.model, basis, loop._end_kl / END_KL)
    scale = report["scale"] / report["share"]
    largest, *smaller = (loop._at(basis, choice, s * scale, lambda: None) for s in (1.0, *SHARES))
    return [
        (s, one.kl / (s**MIN_POWER * largest.kl), (one.rise - s * largest.rise) / RISE)
        for s, one in zip(SHARES, smaller, strict=True)
    ]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--users", nargs="+", choices=TASTES, default=[*TASTES])
    parser.add_argument("--ratings", type=int, default=30)
    given = parser.parse_args()
    print("| user | share | KL / estimate | (rise - estimate) / limit |\n|---|---|---|---|")
    for user in given.users:
        questions = iter([*prompts.own("train"), *prompts.own("heldout")])
        with tempfile.TemporaryDirectory() as home:
            os.environ["RUVMLX_HOME"] = home
            with ruvmlx.open(threads=1, learn_when_idle="off") as model:
                rate_replies(model, user, questions, given.ratings)
                for share, kl, rise in model._call(falls):
                    print(f"| {user} | {share} | {kl:.2f} | {rise:.2f} |", flush=True)


if __name__ == "__main__":
    main()

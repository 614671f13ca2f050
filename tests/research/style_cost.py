"""This study prints the processor time of the style loop's steps with the starter model.

    python -m tests.research.style_cost --steps 4

A user of `ruvmlx prove` rates replies to its questions. The study runs each step after as many new ratings as
the chat waits for, and the first step after twice as many. For each step, the study prints the processor time
in seconds, this time divided by the number of new ratings, and the step's reason. All parts of a step count,
also the unshown replies to the questions of the new ratings. The first step also makes measurements that the
store then keeps.
The study uses one thread, because the processor time of several threads includes the time in which a thread
waits for the other threads.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator

from ruvmlx.apps.prove import prompts
from ruvmlx.apps.prove.users import TASTES, USERS

import ruvmlx
from ruvmlx.sona.slow_loops import STYLE, new_ratings_for


def rate_replies(model: ruvmlx.LocalModel, user: str, questions: Iterator[str], count: int) -> None:
    for _ in range(count):
        question = next(questions)
        reply = model.reply(question, max_tokens=96)
        reply.rate(USERS[user](question, reply.text, reply.finish_reason == "stop"))


def step_cost(model: ruvmlx.LocalModel) -> tuple[float, str]:
    """Run one step of the style loop. Return its processor time in seconds, and its reason."""
    started = time.process_time()
    report = model._call(lambda runtime: runtime.learning.loops.consolidate())
    return time.process_time() - started, report["reason"]


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--user", choices=TASTES, default="lists")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    each, questions = new_ratings_for(STYLE), iter([*prompts.own("train"), *prompts.own("heldout")])
    with tempfile.TemporaryDirectory() as home:
        os.environ["RUVMLX_HOME"] = home
        with ruvmlx.open(threads=1, learn_when_idle="off") as model:
            rate_replies(model, given.user, questions, each)  # the first step needs more ratings
            print("| step | s | s for each new rating | reason |\n|---|---|---|---|")
            for step in range(1, given.steps + 1):
                rate_replies(model, given.user, questions, each)
                new = 2 * each if step == 1 else each
                seconds, reason = step_cost(model)
                print(f"| {step} | {seconds:.1f} | {seconds / new:.1f} | {reason} |", flush=True)


if __name__ == "__main__":
    main()

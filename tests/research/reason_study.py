"""How much shorter or longer the replies get after a reason for a bad rating, with the starter model.

    python -m tests.research.reason_study --reason "too long"
    python -m tests.research.reason_study --reason ""            the same bad ratings without a reason

A user asks questions of `ruvmlx prove`, and rates each reply down with the reason. After each rating, the
model answers other questions, each with its own seed. The study prints the mean and the median number of
words of these replies, and how many replies the token limit cut.
"""

import argparse
import os
import statistics
import tempfile

from ruvmlx.apps.prove import prompts

import ruvmlx


def line(model: ruvmlx.LocalModel, questions: list[str], limit: int) -> str:
    replies = [model.reply(question, seed=seed, max_tokens=limit) for seed, question in enumerate(questions)]
    words = [len(reply.text.split()) for reply in replies]
    cut = sum(reply.finish_reason == "length" for reply in replies)
    return f"{statistics.mean(words):.0f} | {statistics.median(words):.0f} | {cut} of {len(words)} |"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--reason", default="too long", help='"too long", "too short" or "wrong tone"')
    parser.add_argument("--ratings", type=int, default=4)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=300)
    given = parser.parse_args()
    unseen = prompts.own("heldout")
    questions = unseen[:: max(1, len(unseen) // given.questions)][: given.questions]
    print("| bad ratings | mean words | median | cut |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        os.environ["RUVMLX_HOME"] = home
        with ruvmlx.open(threads=given.threads) as model:
            print("| 0 |", line(model, questions, given.max_tokens), flush=True)
            for count, question in enumerate(prompts.own("train")[: given.ratings], 1):
                model.reply(question, seed=1000 + count, max_tokens=given.max_tokens).rate(
                    "down", given.reason
                )
                print(f"| {count} |", line(model, questions, given.max_tokens), flush=True)


if __name__ == "__main__":
    main()

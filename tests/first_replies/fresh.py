"""Counts the faults of first replies as a new user gets them: a new process, an empty data folder each time.

    uv run --group replies python -m tests.first_replies.fresh [--times 5]

Twenty of the questions to report on are put several times to `ruvmlx generate` and `ruvmlx chat --plain`,
with nothing set. Prints a Markdown table. Exits with 1 if over LANGUAGE_FAULTS of a hundred replies are in
another language than English, if a reply repeats itself up to the limit without a word to the user, or if a
command fails.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from ruvmlx.engine.repetition import REPEATS

from .faults import FAULTS, faults
from .questions import Question, questions

LANGUAGE_FAULTS = 2  # of a hundred
QUESTIONS = 20
RUVMLX = (sys.executable, "-m", "ruvmlx")
SPEAKER = "Assistant: "
KEPT = Path("build/fresh-replies.jsonl")  # the replies of the last run, to read


def ordinary_questions() -> list[Question]:
    """QUESTIONS of the report's half, at even distances, that ask for an English reply."""
    english = [question for question in questions("report") if not question.foreign]
    return english[:: len(english) // QUESTIONS][:QUESTIONS]


def first_output(words: list[str], typed: str) -> subprocess.CompletedProcess[str]:
    """What a command prints whose data folder is empty."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [*RUVMLX, *words],
            input=typed,
            capture_output=True,
            text=True,
            env=os.environ | {"RUVMLX_HOME": home},
            timeout=300,
            check=True,
        )


def generate_reply(question: str) -> tuple[str, str, bool]:
    """The reply of `generate`, why it ended, and whether a loop was noticed."""
    reply = json.loads(first_output(["generate", question, "--json"], "").stdout)
    return reply["text"], reply["finish_reason"], reply["repeats"]


def chat_reply(question: str) -> tuple[str, str, bool]:
    """The same of `chat --plain`, from what it shows."""
    done = first_output(["chat", "--plain"], f"{question}\n")
    shown = done.stdout.partition(SPEAKER)[2]
    is_noticed = REPEATS.rstrip(".") in shown + done.stderr
    ended = "length" if "cut at the length limit" in shown + done.stderr else "stop"
    return shown, ended, is_noticed


COMMANDS = {"generate": generate_reply, "chat --plain": chat_reply}


def row(command: str, times: int) -> tuple[str, Counter[str]]:
    """A command's line of the table, and its counts."""
    found: Counter[str] = Counter()
    asked = list(itertools.product(range(times), ordinary_questions()))
    for time, question in asked:
        text, ended, is_noticed = COMMANDS[command](question.text)
        names = faults(question, text, ended)
        found.update(names)
        found["any"] += bool(names)
        found["unnoticed loop"] += "loop" in names and ended == "length" and not is_noticed
        fields = {"command": command, "time": time, "question": question.text, "text": text}
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(json.dumps(fields | {"ended": ended, "faults": sorted(names)}) + "\n")
    found["asked"] = len(asked)
    counts = " | ".join(str(found[name]) for name in (*FAULTS, "unnoticed loop", "any"))
    return f"| `{command}` | {len(asked)} | {counts} |", found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.unlink(missing_ok=True)
    print(f"| command | starts | {' | '.join(FAULTS)} | unnoticed loop | any |")
    print(f"|---|---|{'---|' * (len(FAULTS) + 2)}")
    total: Counter[str] = Counter()
    for command in COMMANDS:
        line, found = row(command, given.times)
        print(line, flush=True)
        total += found
    is_good = total["language"] <= LANGUAGE_FAULTS * total["asked"] / 100 and not total["unnoticed loop"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())

"""The command `ruvmlx learn check` shows how the replies to the same questions differ with and without what
the model learned."""

from pathlib import Path
from typing import Any

import click

from ruvmlx.errors import UsageError, unreadable
from ruvmlx.text import one_line

from .number_types import WholeNumber
from .options import model_options, open_runtime, resolve
from .output import json_option, print_json, show
from .text_output import TableColumn, hint, say, table
from .verb import Verb

COLUMNS = (
    TableColumn("QUESTION", cut=True),
    TableColumn("WORDS BEFORE", right=True),
    TableColumn("WORDS NOW", right=True),
)
PREDICTED = TableColumn("YOU WOULD PREFER")
PREFERRED = {"after": "now", "before": "before", "same": "either"}


@click.command("check", cls=Verb)
@click.option(
    "--questions", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="Questions to ask instead, one a line.",
)  # fmt: skip
@click.option("--full", is_flag=True, help="Also print all replies.")
@click.option(
    "--max-tokens", type=WholeNumber(1), default=200, show_default=True, help="Longest reply, in tokens."
)
@model_options
@json_option
def check(file: Path | None, full: bool, max_tokens: int, as_json: bool, **flags: Any) -> None:
    """Answer ten fixed questions and ten of your own, with and without what was learned.

    It says what differs only where that is clear. Nothing is stored and nothing is learned.
    """
    from ..progress import watching
    from ..prove import learn_check

    questions = None if file is None else _read_questions(file)
    with open_runtime(resolve(flags)) as runtime, watching() as watch:
        found = learn_check.check(runtime, questions, max_tokens, watch)
    if as_json:
        print_json(found)
        return
    _show(found, full)
    for sentence in learn_check.sentences(found.summary):
        say(sentence)
    if not full:
        hint("`ruvmlx learn check --full` asks again and prints the replies, too.")


def _show(found: Any, full: bool) -> None:
    from ..prove.learn_check import reply_lines

    if full:
        for row in found.rows:
            show(f"{one_line(row.question)} ({row.words_before} → {row.words_after} words)")
            for line in reply_lines(row):
                show(line)
        return
    has_taste = found.summary.is_taste_clear
    table(
        (*COLUMNS, PREDICTED) if has_taste else COLUMNS,
        [
            (row.question, f"{row.words_before:,}", f"{row.words_after:,}")
            + ((PREFERRED[row.predicted],) if has_taste else ())
            for row in found.rows
        ],
    )


def _read_questions(file: Path) -> list[str]:
    from ruvmlx.chats.chat_file import read_bytes

    from ..prove import prompts

    try:
        questions = prompts.lines(read_bytes(file).decode("utf-8"))
    except UnicodeDecodeError as e:
        raise unreadable(str(file), e) from e
    if not questions:
        raise UsageError(f"{file} has no questions; write one a line.")
    return questions

"""What verbs print, at 80 and 120 columns, with colours and without: transcripts/ has it, for people to read.

`python -m tests.cli.write_transcripts` writes the files again; read the difference.
"""

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from .write_transcripts import FOLDER, SETS, WIDTHS, difference, paths

NAMES = [f"{verbs}-{width}" for verbs in SETS for width in WIDTHS]
# Data, which is for files and programs, and commands to copy: a line stays whole.
DATA = ("sessions export", "log export", "learn export", "connect", "mcp", "serve", "stop")
WIDER = (
    "bench",
    "prove",
    "chat --plain",
)  # tables of measurements; the plain chat leaves lines to the terminal
LONG = re.compile(r"ruvmlx: |.*\S{60}")  # an error is one line; a path stays whole


def verbs_of(verbs: str) -> list[str]:
    return SETS[verbs].strip().splitlines()


def rows_of(text: str) -> dict[str, str]:
    """What was printed, by verb; of a verb that runs twice, all of it."""
    found: dict[str, str] = {}
    for row in text.removeprefix("$ ruvmlx ").split("\n$ ruvmlx "):
        verb, _, printed = row.partition("\n")
        found[verb] = found.get(verb, "") + printed
    return found


def test_every_verb_has_a_transcript():
    """The verbs come from the parser: a new one fails here until it has a row."""
    rows = [row for verbs in SETS for row in verbs_of(verbs)]
    missing = [path for path in paths() if not any(f"{row} ".startswith(f"{path} ") for row in rows)]
    assert not missing, f"write a row for {missing} in write_transcripts.py"


@pytest.mark.parametrize("name", NAMES)
def test_transcripts_have_all_rows_fit_the_terminal_and_count_well(name):
    text = (FOLDER / f"{name}.txt").read_text("utf-8")
    rows, (verbs, width) = rows_of(text), name.split("-")
    assert list(rows) == list(dict.fromkeys(verbs_of(verbs)))
    wrapped = (said for verb, said in rows.items() if not verb.startswith((*DATA, *WIDER)))
    lines = [line for said in wrapped for line in said.splitlines()]
    assert not [line for line in lines if len(line) > int(width) and not LONG.match(line)]
    assert not re.search(r"\b\d{7,}\b", text)  # a size in digits
    assert not re.search(r"\b1 (ratings|replies|chats|tokens|seeds|checks|messages|files|rows)\b", text)


def compare(verbs: str, width: int, folder) -> None:
    """Run the verbs again, and compare what they print with the committed files."""
    command = [sys.executable, "-m", "tests.cli.write_transcripts", verbs, "--width", str(width)]
    done = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    for file in (f"{verbs}-{width}.txt", f"{verbs}-{width}-colour.txt"):
        now, kept = (rows_of((place / file).read_text("utf-8")) for place in (folder, FOLDER))
        if find_spec("mcp") is None:  # an extra
            now, kept = ({verb: x[verb] for verb in x if not verb.startswith("mcp ")} for x in (now, kept))
        assert difference("\n".join(kept.values()), "\n".join(now.values())) == ""
        assert list(now) == list(kept)


@pytest.mark.parametrize("width", WIDTHS)
def test_verbs_print_what_is_committed(width, tmp_path, starter_file):
    """Those that need no weights of a model."""
    compare("plain", width, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("width", WIDTHS)
def test_verbs_of_the_starter_print_what_is_committed(width, tmp_path, starter_file):
    compare("starter", width, tmp_path)

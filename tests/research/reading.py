"""Draws sentences of the code at random, for someone who has not seen the code and explains each one.

python -m tests.research.reading [--count 60] [--seed 0]

A sentence comes from a docstring or a comment of ruvmlx/, apps/, neon/ or metal_kernels/, with its file and
the line of its class or function. Sentences of four words or fewer are left out.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHON, C = ("ruvmlx", "apps"), ("neon", "metal_kernels")
FEWEST_WORDS = 5


class Sentence(NamedTuple):
    """place: file and line. beside: the line of code that the text belongs to."""

    place: str
    beside: str
    text: str


def sentences() -> list[Sentence]:
    """Return every sentence of every docstring and comment."""
    found = list[Sentence]()
    for path in sorted(path for top in PYTHON for path in (ROOT / top).rglob("*.py")):
        found += _of_python(path)
    for path in sorted(path for top in C for path in (ROOT / top).rglob("*.[ch]")):
        found += _of_c(path)
    return found


def _of_python(path: Path) -> Iterator[Sentence]:
    source = path.read_text("utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            line = getattr(node, "lineno", 1)
            beside = "" if isinstance(node, ast.Module) else lines[line - 1].strip()
            yield from _split(path, line, beside, ast.get_docstring(node) or "")
    comments = [
        t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
    ]
    for line, text in _blocks(comments):
        beside = lines[line - 1].split("#")[0].strip() or lines[min(line, len(lines) - 1)].strip()
        yield from _split(path, line, beside, text)


def _of_c(path: Path) -> Iterator[Sentence]:
    source = path.read_text("utf-8")
    for match in re.finditer(r"/\*(.*?)\*/|((?:[ \t]*//[^\n]*\n)+)", source, re.DOTALL):
        text = re.sub(r"^\s*(\*|//+)\s?", "", match[1] or match[2], flags=re.MULTILINE)
        after = source[match.end() :].lstrip().partition("\n")[0]
        yield from _split(path, source.count("\n", 0, match.start()) + 1, after, text)


def _blocks(comments: Sequence[tokenize.TokenInfo]) -> Iterator[tuple[int, str]]:
    """Join whole-line comments of consecutive lines: (last line, text)."""
    text, last = "", -1
    for comment in comments:
        line, is_whole_line = comment.start[0], comment.line.lstrip().startswith("#")
        if text and not (is_whole_line and line == last + 1):
            yield last, text
            text = ""
        text, last = f"{text} {comment.string.lstrip('#: ')}", line if is_whole_line else -1
        if not is_whole_line:
            yield line, text
            text = ""
    if text:
        yield last, text


def _split(path: Path, line: int, beside: str, text: str) -> Iterator[Sentence]:
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*\w+(?:, \w+)*: )", text):
        for sentence in re.split(r"(?<=[.?!])\s+(?=[A-Z`(])", " ".join(paragraph.split())):
            if len(sentence.split()) >= FEWEST_WORDS:
                yield Sentence(f"{path.relative_to(ROOT)}:{line}", beside, sentence)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    found = sentences()
    print(f"{flags.count} of {len(found):,} sentences, seed {flags.seed}\n")
    for i, sentence in enumerate(random.Random(flags.seed).sample(found, flags.count), 1):
        print(
            f"{i}. {sentence.text}\n   ({sentence.place}{' | ' if sentence.beside else ''}{sentence.beside})"
        )


if __name__ == "__main__":
    main()

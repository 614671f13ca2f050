"""The documentation as text: its pages, links, code and command lines."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").glob("*.md"))]
RUNNABLE = "<!-- runnable -->"  # before a Python block that the tests run

_FENCE = re.compile(r"^```(\w*|\{[\w-]+\})[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}.*)?\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_OPERATORS = {"|", "&&", "||", ";", ">", "<"}


@dataclass(frozen=True)
class Line:
    """A `ruvmlx ...` command line: its words after `ruvmlx`.

    whole: it stands in a block, so it has all its arguments.
    """

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: ruvmlx {shlex.join(self.words)}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks(page: Path) -> Iterator[tuple[str, bool]]:
    """Every Python block, and whether the tests shall run it."""
    text = page.read_text("utf-8")
    for block in _FENCE.finditer(text):
        if block[1] == "python":
            yield block[2], text[: block.start()].rstrip().endswith(RUNNABLE)


def links(page: Path) -> list[str]:
    """Targets of all links and images to places within the repository."""
    prose = _FENCE.sub("", page.read_text("utf-8"))
    return [t for t in _LINK.findall(prose) if not t.startswith(("http:", "https:", "mailto:"))]


def anchors(page: Path) -> set[str]:
    """What `#name` may stand for: a page's headings, as GitHub and MyST write them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code(page: Path) -> str:
    """All that is set as code: inline, in blocks, indented; a piece a line."""
    text = page.read_text("utf-8")
    prose = _FENCE.sub("", text)
    pieces = [block[2] for block in _FENCE.finditer(text)] + _INDENTED.findall(prose) + _INLINE.findall(prose)
    return "\n".join(pieces)


def command_lines(page: Path) -> Iterator[Line]:
    """Every command line of ruvmlx on a page."""
    text = page.read_text("utf-8")
    prose = _FENCE.sub("", text)
    blocks = [block[2] for block in _FENCE.finditer(text)] + _INDENTED.findall(prose)
    for whole, lines in ((True, "\n".join(blocks).splitlines()), (False, _INLINE.findall(prose))):
        for line in lines:
            for words in _commands(line):
                yield Line(name_of(page), words, whole)


def _commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of ruvmlx in one line of a shell."""
    if not re.search(r"(^|\s)ruvmlx ", line):
        return
    lexer = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word not in _OPERATORS:
            words.append(word)
            continue
        if words[:2] == ["uv", "run"]:
            words = words[2:]
        if words[:1] == ["ruvmlx"]:
            yield tuple(words[1:])
        words = []

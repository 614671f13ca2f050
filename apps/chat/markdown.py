"""Markdown that streams: replies grow block by block and end exactly as if rendered in one go.

A Markdown document is a list of top-level blocks, and new text changes the last one or joins it to the
one before ("1. a", then a paragraph "2" that becomes "2. b"); only a link definition reaches further
back. So while a reply streams, its last two blocks are parsed again and those that differ are replaced;
when it is complete the same is done once with the whole.

Differences from Textual's Markdown: a single newline breaks the line, HTML is shown as it was written
instead of vanishing, and what entities decode to ("&#x202e;") passes the sanitiser.
"""

from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual.await_complete import AwaitComplete
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock, MarkdownFence, MarkdownParagraph

from ruvmlx.text import sanitize

Shape = tuple[Any, ...]


@cache
def parser() -> MarkdownIt:
    made = MarkdownIt("gfm-like", {"html": False})
    made.core.ruler.push("safe_text", _safe_text)
    return made


def _safe_text(state: StateCore) -> None:
    for token in state.tokens:
        _make_safe(token)


def _make_safe(token: Token) -> None:
    token.content, token.info = sanitize(token.content), sanitize(token.info)
    if token.type == "softbreak":
        token.type = "hardbreak"
    for child in token.children or ():
        _make_safe(child)


def top_level(tokens: list[Token]) -> list[list[Token]]:
    """Tokens of each top-level block: a block ends where the nesting is back at zero."""
    blocks: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            blocks.append([])
        blocks[-1].append(token)
        depth += token.nesting
    return blocks


def shape_of(tokens: list[Token]) -> Shape:
    """Everything of a block that is shown; two blocks of one shape look the same."""
    return tuple(
        (t.type, t.tag, t.info, t.content, tuple(sorted(t.attrs.items())), shape_of(t.children or []))
        for t in tokens
    )


class ReplyMarkdown(Markdown):
    """Markdown whose text is grown with `show(text)` and completed with `show(text, final=True)`."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=parser, open_links=False)
        self._text = text
        self._shapes: list[Shape] = []
        self._starts: list[int] = []  # each block's first line

    @property
    def source(self) -> str:
        return self._text

    def update(self, markdown: str) -> AwaitComplete:
        return AwaitComplete(self.show(markdown, final=True))

    async def show(self, text: str, final: bool = False) -> None:
        """Show `text`: the text so far and more, or (final) any text, whole."""
        async with self.lock:
            self._text = text
            kept = 0 if final else max(0, len(self._shapes) - 2)
            first_line = self._starts[kept] if kept else 0
            blocks = top_level(parser().parse(_from_line(text, first_line)))
            await self._replace(kept, first_line, blocks)

    async def _replace(self, kept: int, first_line: int, blocks: list[list[Token]]) -> None:
        """Blocks from number `kept` on become `blocks`; those that would look the same stay."""
        shapes = [shape_of(block) for block in blocks]
        same = _common_prefix(self._shapes[kept:], shapes)
        starts = [first_line + (block[0].map or [0])[0] for block in blocks]
        self._shapes[kept:], self._starts[kept:] = shapes, starts
        kept += same
        old = [child for child in self.children if isinstance(child, MarkdownBlock)][kept:]
        new = list(self._parse_markdown(token for block in blocks[same:] for token in block))
        if old or new:
            with self.app.batch_update():
                await self._swap(old, new)

    async def _swap(self, old: list[MarkdownBlock], new: list[MarkdownBlock]) -> None:
        """Paragraphs and code grow in place, which is quick; all other blocks are built anew."""
        if old and new and _grows(old[0], new[0]):
            await old[0]._update_from_block(new[0])
            old, new = old[1:], new[1:]
        if old:
            await self.remove_children(old)
        if new:
            await self.mount_all(new)


def _grows(old: MarkdownBlock, new: MarkdownBlock) -> bool:
    return type(old) is type(new) and isinstance(new, MarkdownParagraph | MarkdownFence)


def _from_line(text: str, line: int) -> str:
    return "\n".join(text.split("\n")[line:]) if line else text


def _common_prefix(left: list[Shape], right: list[Shape]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count

"""This module renders a reply's Markdown while the reply grows, block by block. A complete reply looks
exactly as if the module had rendered the reply in one piece.

A Markdown document is a list of top-level blocks. New text changes the last block, or it joins the last block
to the block before ("1. a", then a paragraph "2" that becomes "2. b"). Only a link definition changes earlier
blocks. So while a reply streams, the module parses the last two blocks again, and replaces a block if it
differs. When the reply is complete, the module parses all blocks again. Within a list, a quote or a table,
the module replaces only the parts that differ (markdown_stream.py), because a list item has four widgets, and
each widget takes a millisecond.

The display differs from Textual's Markdown in five points. A single newline in the text begins a new line. A
horizontal rule inside a quote or a list stays there. HTML is shown as it was written. Decoded entities
("&#x202e;") are sanitised. If a code block names no language, the module does not guess the language.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from functools import cache, lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from pygments.lexers import find_lexer_class_by_name
from pygments.util import ClassNotFound
from textual.await_complete import AwaitComplete
from textual.content import Content
from textual.geometry import Size
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock, MarkdownFence

from ruvmlx.text import sanitize

from .markdown_stream import Shape, StreamedTable, common_prefix, shape_of, swap
from .windowed import Windowed

# Textual would move each "hr" (horizontal rule) out of its quote or list
_NAMES = {"softbreak": "hardbreak", "hr": "rule"}
TEXT_SECONDS = 0.2  # the longest wait, in seconds, for the widgets of the texts of an opened chat


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
    token.type = _NAMES.get(token.type, token.type)
    for child in token.children or ():
        _make_safe(child)


def top_level(tokens: list[Token]) -> list[list[Token]]:
    """Return the tokens of each top-level block. A top-level block ends at the token after which the nesting
    depth is zero again."""
    blocks: list[list[Token]] = []
    depth = 0
    for token in tokens:
        if depth == 0:
            blocks.append([])
        blocks[-1].append(token)
        depth += token.nesting
    return blocks


@lru_cache(256)
def known_language(info: str) -> str:
    """Return the language that the fence of a code block names: "js title=x" -> "js". Return "text" if
    Pygments has no lexer for the language."""
    language = (info.split() or [""])[0].lower()
    try:
        find_lexer_class_by_name(language)
    except ClassNotFound:
        return "text"
    return language


class Code(MarkdownFence):
    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Colour code by the language that its fence names. Textual's own method would try each of 500 lexers
        on code without a language at every frame, which stops the app for seconds."""
        return super().highlight(code, known_language(language), ansi, dark)


class ReplyMarkdown(Windowed, Markdown):
    """A widget that shows Markdown. `show(text)` shows a growing text, which must begin with the text that
    was shown before. `show(text, final=True)` shows a complete text."""

    BLOCKS = {  # noqa: RUF012 - Textual declares it so
        **Markdown.BLOCKS,
        "fence": Code,
        "code_block": Code,
        "table_open": StreamedTable,
    }

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=parser, open_links=False)
        self._text = text
        self._shapes: list[Shape] = []
        self._starts: list[int] = []  # for each block, the number of its first line in the text
        self.has_text = asyncio.Event()  # set when the widgets of the first text are mounted

    def unhandled_token(self, token: Token) -> MarkdownBlock | None:
        return self.get_block_class("hr")(self, token) if token.type == "rule" else None

    @property
    def source(self) -> str:
        return self._text

    def update(self, markdown: str) -> AwaitComplete:
        return AwaitComplete(self.show(markdown, final=True))

    async def show(self, text: str, final: bool = False) -> None:
        """Show `text`, which must begin with the text that the widget showed before. final: True if the
        method parses the whole text again; then `text` can be any text."""
        async with self.lock:
            self._text = text
            kept = 0 if final else max(0, len(self._shapes) - 2)
            first_line = self._starts[kept] if kept else 0
            blocks = top_level(parser().parse(_from_line(text, first_line)))
            await self._replace(kept, first_line, blocks)
        self.has_text.set()

    async def _replace(self, kept: int, first_line: int, blocks: list[list[Token]]) -> None:
        """Replace the blocks from number `kept` on by the new `blocks`. Keep the widgets of those first
        blocks that look the same as before."""
        was, now = self._shapes[kept:], [shape_of(block) for block in blocks]
        same = common_prefix(was, now)
        starts = [first_line + (block[0].map or [0])[0] for block in blocks]
        self._shapes[kept:], self._starts[kept:] = now, starts
        old = [child for child in self.children if isinstance(child, MarkdownBlock)][kept + same :]
        new = list(self._parse_markdown(token for block in blocks[same:] for token in block))
        if old or new:
            with self.app.batch_update():
                await swap(self, old, new, was[same:], now[same:])

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Return the height of the blocks without the bottom margin of the last block. If a CSS rule
        removed this margin, Textual would restyle the last two blocks, with all their widgets, for each
        added block."""
        height = super().get_content_height(container, viewport, width)
        return max(0, height - self.children[-1].styles.margin.bottom) if self.children else height


def _from_line(text: str, line: int) -> str:
    return "\n".join(text.split("\n")[line:]) if line else text


async def wait_for_texts(texts: Iterable[ReplyMarkdown]) -> None:
    """Wait until the app has mounted the widgets of all these texts. Without this wait, the app would lay out
    the conversation twice. The wait ends after TEXT_SECONDS even if some widgets are not mounted yet."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(text.has_text.wait() for text in texts)), TEXT_SECONDS)

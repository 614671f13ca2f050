"""This module finds the code blocks in replies."""

from functools import cache

from markdown_it import MarkdownIt


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False})


def code_blocks(text: str) -> list[str]:
    """Return the text of each fenced or indented code block of a reply, without the block's last newline."""
    return [t.content.removesuffix("\n") for t in _parser().parse(text) if t.type in ("fence", "code_block")]

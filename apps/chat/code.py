"""Code in replies, to be copied."""

from functools import cache

from markdown_it import MarkdownIt


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False})


def code_blocks(text: str) -> list[str]:
    """What stands in fences or is indented as code, wherever it is; without the last newline."""
    return [t.content.removesuffix("\n") for t in _parser().parse(text) if t.type in ("fence", "code_block")]

"""This module updates the widgets of Markdown blocks. The widgets of blocks that look the same in the old and
in the new text stay on the screen. The first block that differs is changed in place if possible, and the
widgets of the blocks after it are replaced. So the number of widgets that a frame replaces depends on the
length of the new text, and not on the length of a list or table.

The shape of a block is a tuple with everything that the screen shows of the block. Two blocks of equal shape
look the same.
"""

from collections.abc import Sequence
from typing import Any

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.widget import Widget
from textual.widgets._markdown import (
    MarkdownBlock,
    MarkdownBlockQuote,
    MarkdownBullet,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownParagraph,
    MarkdownTable,
    MarkdownTableContent,
)

# a tuple that has one tuple for each Markdown token; this inner tuple begins with the token's `nesting`: 1
# opens a block, -1 closes a block
Shape = tuple[Any, ...]


def shape_of(tokens: list[Token]) -> Shape:
    return tuple(
        (
            t.nesting,
            t.type,
            t.tag,
            t.info,
            t.content,
            tuple(sorted(t.attrs.items())),
            shape_of(t.children or []),
        )
        for t in tokens
    )


def inner(shape: Shape) -> list[Shape]:
    """Return the shape of each block inside a block, for example of each item of a list."""
    parts: list[list[Any]] = []
    depth = 0
    for token in shape[1:-1]:
        if depth == 0:
            parts.append([])
        parts[-1].append(token)
        depth += token[0]
    return [tuple(part) for part in parts]


def common_prefix(left: Sequence[Shape], right: Sequence[Shape]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


async def swap(
    parent: Widget,
    old: Sequence[Widget],
    new: Sequence[MarkdownBlock],
    was: Sequence[Shape],
    now: Sequence[Shape],
) -> None:
    """Replace the widgets `old`, the last children of `parent`, by `new`. was, now: the shapes of the
    Markdown blocks in `old` and in `new`."""
    if old and new and await _grow(old[0], new[0], was[0], now[0]):
        old, new = old[1:], new[1:]
    if old:
        await parent.remove_children(old)
    if new:
        await parent.mount_all(new)


async def _grow(old: Widget, new: MarkdownBlock, was: Shape, now: Shape) -> bool:
    """Change the widget `old` in place so that it looks like `new`. Return False if the widget cannot be
    changed in this way."""
    if type(old) is not type(new):
        return False
    if isinstance(old, MarkdownParagraph | MarkdownFence):
        await old._update_from_block(new)
        return True
    if isinstance(old, MarkdownList):
        return await _grow_list(old, new, inner(was), inner(now))
    if isinstance(old, MarkdownBlockQuote):
        await _grow_inside(old, new._blocks, inner(was), inner(now))
        return True
    if isinstance(old, StreamedTable) and isinstance(new, StreamedTable):
        return await _grow_table(old, new, inner(was), inner(now))
    return False


async def _grow_inside(parent: Widget, new: list[MarkdownBlock], was: list[Shape], now: list[Shape]) -> None:
    """Replace the blocks inside `parent` by `new`. was, now: the shapes of the blocks before and after the
    replacement."""
    same = common_prefix(was, now)
    await swap(parent, list(parent.children)[same:], new[same:], was[same:], now[same:])


async def _grow_list(old: Widget, new: MarkdownBlock, was: list[Shape], now: list[Shape]) -> bool:
    """Change the list `old` in place so that it looks like `new`. Each row of a list is a bullet and the
    blocks of one item. Return False if the bullets change, for example become wider from "9." to "10."; in
    this case the caller builds all rows again."""
    items = list(new._blocks)  # make a copy, because new.compose() empties new._blocks
    blocks = [list(item._blocks) for item in items if isinstance(item, MarkdownListItem)]
    rows, new_rows = list(old.children), list(new.compose())
    same = common_prefix(was, now)
    bullets = [_bullet(row.children) for row in rows[: len(new_rows)]]
    if bullets != [_bullet(row._pending_children) for row in new_rows[: len(rows)]]:
        new._blocks[:] = items
        return False
    if same < min(len(rows), len(new_rows)):
        await _grow_inside(rows[same].children[1], blocks[same], inner(was[same]), inner(now[same]))
        same += 1
    if rows[same:]:
        await old.remove_children(rows[same:])
    if new_rows[same:]:
        await old.mount_all(new_rows[same:])
    return True


def _bullet(row: Sequence[Widget]) -> str:
    return next(widget.symbol for widget in row if isinstance(widget, MarkdownBullet))


async def _grow_table(old: "StreamedTable", new: "StreamedTable", was: list[Shape], now: list[Shape]) -> bool:
    """Change the table `old` in place so that it looks like `new`. Return False if the heads of the tables
    differ. The cells of the head and the body are children of one grid, row by row."""
    if was[0] != now[0] or not old.children:
        return False
    content, (fresh, *_) = old.children[0], list(new.compose())
    assert isinstance(content, TableContent) and isinstance(fresh, TableContent)
    same = common_prefix(*(inner(shape[1]) if len(shape) > 1 else [] for shape in (was, now)))
    cells, kept = list(fresh.compose()), (same + 1) * len(fresh.headers)
    await content.remove_children(list(content.children)[kept:])
    await content.mount_all(cells[kept:])
    content.rows, content.last_row = fresh.rows, fresh.last_row
    old._rows = new._rows
    return True


class TableContent(MarkdownTableContent):
    def compose(self) -> ComposeResult:
        """Yield the cells of the table without tooltips. A tooltip would only repeat the text of its cell,
        and Textual would read brackets in this text as markup."""
        for cell in super().compose():
            cell.tooltip = None
            yield cell


class StreamedTable(MarkdownTable):
    def compose(self) -> ComposeResult:
        for content in super().compose():
            assert isinstance(content, MarkdownTableContent)
            yield TableContent(content.headers, content.rows)

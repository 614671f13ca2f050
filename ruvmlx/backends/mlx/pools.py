"""This module has functions for the pools of storage.py. A pool is an MLX array of KV pages."""

from collections.abc import Sequence

from ...platform.mx import mx


def resize_pool(pool: mx.array | None, kept: list[int], capacity: int, page: tuple[int, int]) -> mx.array:
    """Return a pool of `capacity` pages that begins with the old pages `kept`; the other pages are zero.

    pool: uint8 [pages, *page]; None: no pool yet
    page: the shape of a page
    """
    if pool is None or not kept:
        return mx.zeros((capacity, *page), mx.uint8)
    some = pool if len(kept) == len(pool) else pool[mx.array(kept)]
    return mx.pad(some, [(0, capacity - len(kept)), (0, 0), (0, 0)])


def spread_pool(pool: mx.array | None, kept: list[int], capacity: int) -> mx.array:
    """Return the pool of `capacity` pages from which `resize_pool` made `pool`. The pages that are not in
    `kept` are zero."""
    assert pool is not None
    whole = mx.zeros((capacity, *pool.shape[1:]), mx.uint8)
    if kept:
        whole[mx.array(kept)] = pool[: len(kept)]
    return whole


def runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Divide a list of page numbers into ranges. In a range, each number is the number before plus 1. Return
    the indexes (start, stop) of each range; the number at `stop` is not in the range."""
    cuts = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(numbers)], strict=True)) if len(numbers) else []

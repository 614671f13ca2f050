"""This module checks the GPU kernels, first for the attention heads of the starter model, and then for all
shapes of heads that models have."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import product
from typing import Any

from ruvmlx.backends.mlx.check_results import STARTER, Shapes

from ..bench.stage import PlayerError
from .speed import Deadline, PlayerProcess

HEAD_DIMS, DTYPES, GROUPS = (64, 80, 128, 256), ("float16", "bfloat16"), (1, 3, 4, 7, 8)
N_KV_HEADS = 2


def shapes() -> list[Shapes]:
    """Return the shapes with each head size, dtype and group (query heads per KV head). The first half of the
    list has each combination of two of these three, in case the time ends before the second half."""
    pairs = list(product(HEAD_DIMS, GROUPS))
    by_turns = [(turn + half) % 2 for half in range(2) for turn in range(len(pairs))]
    return [
        Shapes(head_dim, N_KV_HEADS * group, N_KV_HEADS, DTYPES[dtype])
        for (head_dim, group), dtype in zip(pairs * 2, by_turns, strict=True)
    ]


def of_the_starter(deadline: Deadline) -> list[dict[str, Any]]:
    """Return the verdicts on the kernels for the starter's heads: [{"name", "ok", "why", "ratio",
    "message"}]."""
    player = PlayerProcess("kernels")
    try:
        return player.call(deadline, "verdicts", *astuple(STARTER))
    finally:
        player.leave()


def of_all(wanted: Sequence[Shapes], deadline: Deadline) -> list[dict[str, Any]]:
    """Return the verdicts for each wanted shape: [{"head_dim", "dtype", "group", "results" or "error"}]. A
    shape for which no time is left has an error."""
    player = PlayerProcess("kernels")
    try:
        return [_shape_facts(shapes) | _results(player, shapes, deadline) for shapes in wanted]
    finally:
        player.leave()


def _shape_facts(shapes: Shapes) -> dict[str, Any]:
    group = shapes.n_heads // shapes.n_kv_heads
    return {"head_dim": shapes.head_dim, "dtype": shapes.dtype, "group": group}


def _results(player: PlayerProcess, shapes: Shapes, deadline: Deadline) -> dict[str, Any]:
    if deadline.left() <= 0:
        return {"error": "not checked: no time was left (--seconds)"}
    try:
        return {"results": player.call(deadline, "verdicts", *astuple(shapes))}
    except PlayerError as error:
        return {"error": error.public}

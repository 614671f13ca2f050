"""This module checks the GPU kernels. The kernels are checked first for the attention heads of the starter
model, and then for the shapes of attention heads of other models."""

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
    """Return the shapes of attention heads to check: each combination of a head size, a dtype and a group
    (query heads for each KV head). The time for the report can end before the second half of the list was
    checked. So the first half of the list has each combination of a head size and a group, and each dtype
    with every head size and every group."""
    pairs = list(product(HEAD_DIMS, GROUPS))
    by_turns = [(turn + half) % 2 for half in range(2) for turn in range(len(pairs))]
    return [
        Shapes(head_dim, N_KV_HEADS * group, N_KV_HEADS, DTYPES[dtype])
        for (head_dim, group), dtype in zip(pairs * 2, by_turns, strict=True)
    ]


def of_the_starter(deadline: Deadline) -> list[dict[str, Any]]:
    """Check the kernels for the starter model's attention heads, and return the verdicts: [{"name", "ok",
    "why", "ratio", "message"}]."""
    player = PlayerProcess("kernels")
    try:
        return player.call(deadline, "verdicts", *astuple(STARTER))
    finally:
        player.leave()


def of_all(wanted: Sequence[Shapes], deadline: Deadline) -> list[dict[str, Any]]:
    """Check the kernels for each wanted shape, and return the verdicts: [{"head_dim", "dtype", "group",
    "results" or "error"}]. A shape has the key "error" if its check failed, or if no time was left for it."""
    player = PlayerProcess("kernels")
    try:
        return [_shape_facts(shapes) | _results(player, shapes, deadline) for shapes in wanted]
    finally:
        player.leave()


def _shape_facts(shapes: Shapes) -> dict[str, Any]:
    group = shapes.n_heads // shapes.n_kv_heads
    return {"head_dim": shapes.head_dim, "dtype": shapes.dtype, "group": group}


def _results(player: PlayerProcess, shapes: Shapes, deadline: Deadline) -> dict[str, Any]:
    if deadline.seconds_left() <= 0:
        return {"error": "not checked: no time was left (--seconds)"}
    try:
        return {"results": player.call(deadline, "verdicts", *astuple(shapes))}
    except PlayerError as error:
        return {"error": error.public}

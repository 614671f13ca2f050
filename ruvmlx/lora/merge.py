"""This module merges two low-rank changes of one matrix, alpha A B and beta a b, into one change of a given
rank, and a remainder.

    alpha A B + beta a b  =  [alpha A | beta a] [B; b]  =  Qa (Ra Rb^T) Qb^T  =  (Qa U) S (Qb V)^T

A QR decomposition of [alpha A | beta a] and of [B; b] leaves a core Ra Rb^T of at most (r + q) x (r + q)
numbers for the ranks r and q. So the SVD of the sum of both changes is cheap. The first singular directions
of the sum are the change of the given rank that is nearest to the sum (Eckart and Young 1936). The factors A
+ a and B + b would be wrong, because they add the cross terms A b + a B, which can be larger than the smaller
change.
"""

from dataclasses import dataclass, replace

import numpy as np

from ..kernels.micro import NotFinite
from .base_lora import BaseLoRA, Pair
from .micro_lora import MicroLoRA

HEAD = ("lm_head", 0)
_NOTHING = 1e-12  # singular values below this share of the largest singular value are rounding errors


@dataclass(frozen=True)
class Merged:
    """The result of a merge: kept + tail is equal to the sum of both changes, up to an error of `lost` and
    float32 rounding. All factors are float32 and contiguous, and no scale must be applied to them.

    kept: the factors [in, r], [r, out] of the change of the given rank
    tail: the factors [in, t], [t, out] of the next t directions of the sum, at most `tail_rank`; t can be 0
    lost: the Frobenius norm of the error
    """

    kept: Pair
    tail: Pair
    lost: float


def merge_changes(one: Pair, alpha: float, other: Pair, beta: float, rank: int, tail_rank: int = 0) -> Merged:
    """Return the sum alpha * one + beta * other in three parts: its best approximation of rank `rank`, its
    next `tail_rank` singular directions, and the norm of the rest."""
    left, values, right = _svd(one, alpha, other, beta)
    used = int(np.sum(values > _NOTHING * values[0])) if values.size else 0
    middle, end = min(rank, used), min(rank + tail_rank, used)
    lost = float(np.sqrt(np.sum(values[end:] ** 2)))
    return Merged(_pair(left, values, right, 0, middle), _pair(left, values, right, middle, end), lost)


def _svd(one: Pair, alpha: float, other: Pair, beta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the SVD of alpha * one + beta * other in float64: left [in, n], singular values [n], right [n,
    out]."""
    a = np.hstack([alpha * one[0].astype(np.float64), beta * other[0].astype(np.float64)])
    b = np.vstack([one[1], other[1]]).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise NotFinite("a low-rank change to be merged holds NaN or Inf")
    (qa, ra), (qb, rb) = np.linalg.qr(a), np.linalg.qr(b.T)
    u, values, vt = np.linalg.svd(ra @ rb.T)
    n = values.size
    return qa @ u[:, :n], values, vt[:n] @ qb.T


def _pair(left: np.ndarray, values: np.ndarray, right: np.ndarray, first: int, last: int) -> Pair:
    """Return the singular directions first ... last - 1 as two factors of equal norm, so that both factors
    train about equally fast."""
    root = np.sqrt(values[first:last])
    a, b = left[:, first:last] * root, root[:, None] * right[first:last]
    return np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)


def fold_micro(
    base: BaseLoRA, micro: MicroLoRA, rank: int, kept: np.ndarray | None = None
) -> tuple[BaseLoRA, MicroLoRA]:
    """Move the change of the output head from the MicroLoRA into the base LoRA, whose head pair then has at
    most `rank` directions. The remainder of the change (the tail) stays in the MicroLoRA. Return the new base
    LoRA and MicroLoRA.

    Apart from rounding errors, the model's output does not change, unless both changes together have more
    than rank + micro.rank directions. Without a tail, the MicroLoRA keeps lora_a and its evidence, so later
    ratings add to the change that the base LoRA now has. With a tail, lora_a changes, so the evidence is
    discarded. Columns of lora_a that the tail does not need are made orthogonal to the tail; their rows of
    lora_b are zero.

    kept: [r, V], the part of lora_b that stays in the MicroLoRA; None for no part. If there is a tail, the
        function also folds this part.
    """
    if kept is not None:
        new, rest = fold_micro(base, replace(micro, lora_b=micro.lora_b - kept), rank)
        if not rest.lora_b.any():
            return new, replace(rest, lora_b=kept)
    d, v = micro.lora_a.shape[0], micro.lora_b.shape[1]
    old = base.pairs.get(HEAD, (np.zeros((d, 0), np.float32), np.zeros((0, v), np.float32)))
    found = merge_changes(old, base.scale, (micro.lora_a, micro.lora_b), micro.scale, rank, micro.rank)
    pairs = {place: pair for place, pair in base.pairs.items() if place != HEAD}
    if found.kept[0].shape[1]:
        pairs[HEAD] = (found.kept[0], np.ascontiguousarray(found.kept[1] / np.float32(base.scale)))
    return replace(base, pairs=pairs), _rest(micro, found.tail)


def _rest(micro: MicroLoRA, tail: Pair) -> MicroLoRA:
    """Return a MicroLoRA that has only the tail of a merge. The columns of its lora_a get the
    root-mean-square length of the old columns, so that ratings change the weights about as strongly as
    before."""
    if tail[0].shape[1] == 0:
        return replace(micro, lora_b=np.zeros_like(micro.lora_b))
    a, b = (w.astype(np.float64) for w in tail)
    length = np.linalg.norm(micro.lora_a) / np.sqrt(micro.rank)
    sizes = np.linalg.norm(a, axis=0)
    a, b = a * (length / sizes), b * (sizes / length / micro.scale)[:, None]
    free = micro.rank - a.shape[1]
    reads = np.hstack([a, _unused_directions(micro.lora_a.astype(np.float64), a, free) * length])
    writes = np.vstack([b, np.zeros((free, b.shape[1]))])
    fresh = MicroLoRA.fresh(reads, writes.shape[1], micro.alpha)
    return replace(fresh, lora_b=np.ascontiguousarray(writes, np.float32))


def _unused_directions(directions: np.ndarray, taken: np.ndarray, count: int) -> np.ndarray:
    """Return `count` orthonormal columns [D, count]: the main directions of the part of `directions` [D, r]
    that is orthogonal to `taken`."""
    if taken.shape[1]:
        q = np.linalg.qr(taken)[0]
        directions = directions - q @ (q.T @ directions)
    return np.linalg.svd(directions, full_matrices=False)[0][:, :count]

"""What a rating asks for and how far that leads, over NumPy arrays, each beside its obvious twin.

Kernels of micro.py in a row, in one call: after a reply no cache holds what they read, nor the code of an
interpreter that would go from one to the next. Shapes: A tokens that ratings may move, k features of them,
R rank, M contexts, V columns. Twins compute in float64. Formulas: neon/include/rvm.h, "A rating".

`impl` as in micro.py. Wrong shapes or types raise ValueError, NaN or Inf raises NotFinite.
"""

import ctypes as C
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import matmul, micro
from .library import _load, functions
from .micro import Array, _done, _in, _inout, _shape

_P, _N = C.c_void_p, C.c_size_t
_GROUPS = 3


@dataclass(frozen=True)
class Push:
    """How evidence becomes weights (micro.evidence_push)."""

    step: float
    agree: float
    noise: float


class _Push(C.Structure):
    _fields_ = [(name, C.c_float) for name in ("step", "agree", "noise")]


class _Text(C.Structure):
    _fields_ = [
        *((name, _P) for name in ("p0", "log_ratio", "u", "following", "rest", "slope")),
        ("ends", C.c_uint64 * _GROUPS), ("share", C.c_double * _GROUPS),
        ("vocab", C.c_uint64), ("rank", C.c_uint64),
    ]  # fmt: skip


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_evidence_scratch.restype, lib.rvm_evidence_scratch.argtypes = _N, [_P, _N]
    lib.rvm_evidence_block.argtypes = [_P, _P, _P, _P, _P, _P, _N, _P, _P]
    lib.rvm_distance.argtypes = [_P, _P, _P, C.c_float, _P]
    return lib


@functools.cache
def _tables(impl: str | None) -> tuple[int, int]:
    """Addresses of the kernels and of the matrix kernels of an implementation."""
    functions(impl)  # refuses an unknown one
    kernels = _lib().rvm_impl(impl.encode() if impl else None)
    matrices = matmul._lib().rvm_matmul_impl(impl.encode() if impl == "scalar" else None)
    return C.addressof(kernels.contents), C.addressof(matrices.contents)


def evidence_block(
    evidence: Array,
    precision: Array,
    features: matmul.Matrix,
    tokens: Push,
    along: Push,
    impl: str | None = None,
) -> Array:
    """What the evidence [3, R, A + k] asks for, of tokens and `along` features [A, k]: [R, A + 1], and 0
    of all other tokens together.

    precision: [A + k]."""
    rank = evidence.shape[1]
    _shape("precision", precision, (features.rows + features.cols,))
    _shape("evidence", evidence, (3, rank, precision.size))
    how = (_Push * 2)(*[_Push(p.step, p.agree, p.noise) for p in (tokens, along)])
    block = np.empty((rank, features.rows + 1), np.float32)
    scratch = matmul.aligned(_lib().rvm_evidence_scratch(features.memory.ctypes.data, rank))
    _done(
        "evidence_block",
        _lib().rvm_evidence_block(
            *_tables(impl), _in(evidence), _in(precision), features.memory.ctypes.data, how, rank,
            scratch.ctypes.data, _inout(block),
        ),
    )  # fmt: skip
    return block


def evidence_block_ref(
    evidence: Array, precision: Array, features: np.ndarray, tokens: Push, along: Push
) -> np.ndarray:
    """features: [A, k]."""
    a, theta = len(features), np.empty(evidence.shape[1:], np.float32)
    for push, part in (tokens, slice(0, a)), (along, slice(a, None)):
        micro.evidence_push_ref(evidence, precision, push.step, push.agree, push.noise, part, theta)
    block = theta[:, :a].astype(np.float64) + theta[:, a:] @ features.T.astype(np.float64)
    return np.pad(block, ((0, 0), (0, 1)))


class Text:
    """Contexts of neutral text, in groups: the first in answers, the others in prose."""

    def __init__(
        self,
        p0: Array,
        log_ratio: Array | None,
        u: Array,
        following: NDArray[np.int32],
        groups: Sequence[tuple[int, float]],
        rest: Array | None = None,
        slope: Array | None = None,
    ):
        """p0: [M, V] probabilities without the adapter; log_ratio: [M, V] log(p0 / frozen), None where p0 is
        the frozen one itself; u: [M, R] readings; following: [M], the column of the token that follows.
        groups: how many contexts are in each, and what share of the prose each stands for: 0 for answers.
        rest, slope: [R, V] by which the rise grows beside what contexts say of it."""
        contexts, vocab = p0.shape
        sizes = [n for n, _ in groups]
        ends, shares = np.cumsum([*sizes, *[0] * _GROUPS])[:_GROUPS], [s for _, s in groups]
        if len(groups) > _GROUPS or sum(sizes) != contexts or min(sizes) < 0:
            raise ValueError(f"groups of {sizes} contexts, expected at most {_GROUPS}, {contexts} in all")
        _shape("u", u, (contexts, u.shape[-1]))
        _shape("following", following, (contexts,))
        if contexts and not 0 <= following.min() <= following.max() < vocab:
            raise ValueError(f"following spans {following.min()}..{following.max()}, of {vocab} columns")
        if log_ratio is not None:
            _shape("log_ratio", log_ratio, p0.shape)
        for name, x in ("rest", rest), ("slope", slope):
            if x is not None:
                _shape(name, x, (u.shape[1], vocab))
        self.p0, self.log_ratio, self.u, self.following = p0, log_ratio, u, following
        self.groups, self.rest, self.slope = groups, rest, slope
        floats = (None if x is None else _in(x) for x in (p0, log_ratio, u))
        more = (None if x is None else _in(x) for x in (rest, slope))
        self._size = u.shape[1], vocab
        self._spec = _Text(
            *floats, _in(following, np.dtype(np.int32)), *more,
            (C.c_uint64 * _GROUPS)(*ends.tolist()), (C.c_double * _GROUPS)(*shares), vocab, u.shape[1],
        )  # fmt: skip

    def read_as(self, u: Array) -> "Text":
        """The same contexts with other readings; of them nothing is known but what they say."""
        return Text(self.p0, self.log_ratio, u, self.following, self.groups)

    def distance(self, lora_b: Array, s: float, impl: str | None = None) -> tuple[float, float, float]:
        """Of an adapter that moves by s * lora_b [R, V]: mean KL to the frozen model in answers; rise of the
        mean negative log-likelihood of prose, nats; and its slope by s, where s is 0, if that is known."""
        _shape("lora_b", lora_b, self._size)
        out = (C.c_double * 3)()
        _done("distance", _lib().rvm_distance(_tables(impl)[0], C.byref(self._spec), _in(lora_b), s, out))
        return out[0], out[1], out[2]

    def distance_ref(self, lora_b: Array, s: float) -> tuple[float, float, float]:
        kl, rise, at = 0.0, 0.0, 0
        for group, (size, share) in enumerate(self.groups):
            part = slice(at, at + size)
            at += size
            if not size:
                continue
            ratio = None if self.log_ratio is None else self.log_ratio[part]
            found = micro.kl_to_frozen_ref(self.p0[part], self.u[part], lora_b, s, ratio)
            kl = found[0] if group == 0 else kl
            own = np.einsum("mr,rm->m", self.u[part], lora_b[:, self.following[part]].astype(np.float64))
            rise += share * (found[1] - s * own.mean())
        rest, slope = (
            0.0 if x is None else float(np.vdot(x.astype(np.float64), lora_b))
            for x in (self.rest, self.slope)
        )
        return float(kl), float(rise + s * rest), slope

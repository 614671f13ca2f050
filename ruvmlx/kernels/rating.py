"""This module computes an adapter's weights from ratings, and how far these weights move the model's
distribution of the next token. Each kernel has a twin (`..._ref` or `...Ref`), a simple version for tests.

One call runs several kernels of micro.py, because separate calls from Python would take longer: after a
reply, the CPU caches mostly hold other data than the kernels' data and the interpreter's code. Evidence is a
set of sums over all ratings (micro.evidence_add). In shapes, A is the number of tokens that ratings can move,
k the number of features of each token, R the rank, M the number of contexts, V the number of columns. Twins
compute mostly in float64. The formulas are in neon/include/rvm_rating.h.

`impl` names an implementation ("scalar", "avx2", ...); None is the fastest one on this machine. Wrong shapes
or types raise ValueError. An input or a result with NaN or Inf raises NotFinite; only `block` without
`answers` passes NaN on.
"""

import ctypes as C
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import matmul, micro
from .library import _load, functions
from .micro import Array, _done, _in, _inout, _shape

_P, _N = C.c_void_p, C.c_size_t
_U8 = np.dtype(np.uint8)
_GROUPS = 3


@dataclass(frozen=True)
class Push:
    """A Push is one rule that turns evidence (sums over all ratings) into weights. The fields are the
    parameters of micro.evidence_push."""

    step: float
    agree: float
    noise: float


@dataclass(frozen=True)
class Rule:
    """The rules that turn evidence (sums over all ratings) into weights.

    tokens: the rule for the weights of single tokens
    along: the rule for the weights of features, which many tokens share
    cap: the maximum KL in answers (nats); if the KL of a change exceeds the cap, the weights of all tokens
        except those that end a reply are scaled down until the KL is about the cap
    """

    tokens: Push
    along: Push
    cap: float = math.inf

    @functools.cached_property
    def spec(self) -> "_Rule":
        return _Rule(*(_Push(p.step, p.agree, p.noise) for p in (self.tokens, self.along)), self.cap)


class _Push(C.Structure):
    _fields_ = [(name, C.c_float) for name in ("step", "agree", "noise")]


class _Rule(C.Structure):
    _fields_ = [("tokens", _Push), ("along", _Push), ("cap", C.c_double)]


class _Asking(C.Structure):
    _fields_ = [("precision", _P), ("features", _P), ("ends", _P), ("n_ends", C.c_uint64)]


class _Rating(C.Structure):
    _fields_ = [
        ("gradient", _P),
        ("information", _P),
        ("rest", _P),
        ("weight", C.c_float),
        ("kept", C.c_float),
    ]


class _Text(C.Structure):
    _fields_ = [
        *((name, _P) for name in ("p0", "log_ratio", "u", "following", "rest", "slope")),
        ("ends", C.c_uint64 * _GROUPS), ("share", C.c_double * _GROUPS),
        ("vocab", C.c_uint64), ("rank", C.c_uint64),
    ]  # fmt: skip


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    lib.rvm_asking_scratch.restype, lib.rvm_asking_scratch.argtypes = _N, [_P, _N]
    lib.rvm_asked.argtypes = [_P, _P, _P, _P, _P, C.c_float, _P, _N, _P, _P]
    lib.rvm_rated.argtypes = [_P, _P, _P, _P, _P, C.c_float, _P, _P, C.c_float, _N, _P, _P, _P]
    lib.rvm_distance.argtypes = [_P, _P, _P, C.c_float, _P]
    return lib


@functools.cache
def _tables(impl: str | None) -> tuple[int, int]:
    """Return two addresses: the table of an implementation's kernels, and the table of its matrix kernels."""
    functions(impl)  # this call raises an error for an unknown implementation
    kernels = _lib().rvm_impl(impl.encode() if impl else None)
    matrices = matmul._lib().rvm_matmul_impl(impl.encode() if impl == "scalar" else None)
    return C.addressof(kernels.contents), C.addressof(matrices.contents)


class KLContexts:
    """Contexts (positions in fixed reference texts) at which the kernels measure the effect of an adapter.
    The first group of contexts is in answers, and all other groups are in prose."""

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
        """Keep the contexts in the form that the kernels read.

        p0: [M, V], probabilities without the adapter
        log_ratio: [M, V] = log(p0 / frozen); None: p0 is frozen
        u: [M, R] = hidden @ lora_a
        following: [M], for each context, the column (in p0) of the token that follows in the text
        groups: for each group, the number of its contexts and the share of the prose that these contexts
            represent; the share of answers is 0
        rest: [R, V]; the dot product of `rest` and s * lora_b is added to the rise of the negative
            log-likelihood of prose
        slope: [R, V]; the dot product of `slope` and lora_b is the derivative that `distance` returns
        """
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

    def read_as(self, u: Array) -> "KLContexts":
        """Return these contexts with another `u` (hidden states times another lora_a), without `rest` and
        `slope`."""
        return KLContexts(self.p0, self.log_ratio, u, self.following, self.groups)

    def distance(self, lora_b: Array, s: float, impl: str | None = None) -> tuple[float, float, float]:
        """Return the effects of an adapter whose second matrix is s * lora_b [R, V]: the mean KL to the
        frozen model in answers (nats), the rise of the mean negative log-likelihood of prose (nats), and the
        derivative of this rise with respect to s at s = 0. If the contexts have no `slope`, the third number
        is 0."""
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


class EvidenceSolver:
    """This class turns evidence [3, R, A + k] into a block of weights [R, A + 1], for A tokens and k features
    of each token. The last column of the block stands for all tokens that are not among the A tokens; the
    evidence gives it the weight 0."""

    def __init__(
        self, precision: Array, features: matmul.Matrix, rank: int, ends: NDArray[np.int32] | None = None
    ):
        """precision: [A + k], the numbers that evidence_push adds to L (micro.py). features: [A, k], the
        features of each token. ends: the tokens that end a reply."""
        a, n_ends = features.rows, 0 if ends is None else ends.size
        _shape("precision", precision, (a + features.cols,))
        if ends is not None and n_ends and not 0 <= ends.min() <= ends.max() < a:
            raise ValueError(f"ends spans {ends.min()}..{ends.max()}, of {a} tokens")
        self.precision, self.features, self.rank, self.ends = precision, features, rank, ends
        self._said, self._block = (rank, a + features.cols), (rank, a + 1)
        at = _in(ends, np.dtype(np.int32)) if ends is not None and n_ends else None
        self._spec = _Asking(_in(precision), features.memory.ctypes.data, at, n_ends)
        self._scratch = _lib().rvm_asking_scratch(C.byref(self._spec), rank)

    def block(
        self,
        evidence: Array,
        rule: Rule,
        answers: KLContexts | None = None,
        scale: float = 1.0,
        impl: str | None = None,
    ) -> Array:
        """Return the block of weights that follows from the evidence.

        answers: contexts in which the KL of `scale` times the block, without the columns of `ends`, is held
            to about the rule's cap; None: no cap
        """
        _shape("evidence", evidence, (3, *self._said))
        block, scratch = np.empty(self._block, np.float32), np.empty(self._scratch, np.uint8)
        text = None if answers is None else C.byref(answers._spec)
        _done(
            "asked",
            _lib().rvm_asked(
                *_tables(impl), C.byref(self._spec), C.byref(rule.spec), text, scale, _in(evidence),
                self.rank, _inout(scratch, _U8), _inout(block),
            ),
        )  # fmt: skip
        return block

    def add_rating(
        self,
        held: Array,
        gradient: Array,
        information: Array,
        rest: Array,
        weight: float,
        kept: float,
        rule: Rule,
        answers: KLContexts,
        scale: float,
        most: float,
        impl: str | None = None,
    ) -> tuple[Array, Array]:
        """Return the evidence with one more rating, and the block of weights that follows from all ratings,
        plus `rest`. Raises NotFinite if a number of the block has a magnitude above `most`, or a number of
        the evidence above the square of `most`.

        gradient, information: [R, A + k], the arrays that evidence_add takes for the new rating, at the
        weight 1
        kept: the factor of the older evidence (micro.evidence_add)
        rest: a block of weights that is added to the result
        """
        _shape("evidence", held, (3, *self._said))
        _shape("gradient", gradient, self._said)
        _shape("information", information, self._said)
        _shape("rest", rest, self._block)
        evidence, block = np.empty_like(held), np.empty(self._block, np.float32)
        scratch = np.empty(self._scratch, np.uint8)
        one = _Rating(_in(gradient), _in(information), _in(rest), weight, kept)
        _done(
            "rated",
            _lib().rvm_rated(
                *_tables(impl), C.byref(self._spec), C.byref(rule.spec), C.byref(answers._spec), scale,
                _in(held), C.byref(one), most, self.rank, _inout(scratch, _U8), _inout(evidence),
                _inout(block),
            ),
        )  # fmt: skip
        return evidence, block


class EvidenceSolverRef:
    """The simple version of EvidenceSolver for tests: features [A, k] is an array."""

    def __init__(self, precision: Array, features: np.ndarray, ends: Sequence[int] = ()):
        self.precision, self.features, self.ends = precision, features, list(ends)

    def block(
        self, evidence: Array, rule: Rule, answers: KLContexts | None = None, scale: float = 1.0
    ) -> np.ndarray:
        a, theta = len(self.features), np.empty(evidence.shape[1:], np.float32)
        for push, part in (rule.tokens, slice(0, a)), (rule.along, slice(a, None)):
            micro.evidence_push_ref(evidence, self.precision, push.step, push.agree, push.noise, part, theta)
        block = theta[:, :a].astype(np.float64) + theta[:, a:] @ self.features.T.astype(np.float64)
        block = np.pad(block, ((0, 0), (0, 1)))
        if answers is not None:
            others = np.setdiff1d(np.arange(a), self.ends)
            said, share = np.zeros(block.shape, np.float32), 1.0
            said[:, others] = block[:, others]
            # The KL depends on `share` almost as a parabola, so the second step corrects most of the first
            # step's error.
            for _ in range(2):
                if (kl := answers.distance_ref(said, share * scale)[0]) <= rule.cap:
                    break
                share *= math.sqrt(rule.cap / kl)
            block[:, others] *= share
        return block

    def add_rating(
        self,
        held: Array,
        gradient: Array,
        information: Array,
        rest: Array,
        weight: float,
        kept: float,
        rule: Rule,
        answers: KLContexts,
        scale: float,
    ) -> tuple[Array, np.ndarray]:
        evidence = micro.evidence_add_ref(held, gradient, information, weight, kept)
        return evidence, self.block(evidence, rule, answers, scale) + rest

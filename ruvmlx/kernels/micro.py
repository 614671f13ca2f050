"""This module has the MicroLoRA kernels over NumPy arrays. Most of these kernels have a twin (`..._ref`), a
simple version for tests.

Arrays are float32 (token ids: int32) and C-contiguous, with any alignment. The kernels copy no array and
release Python's global lock (GIL). In shapes, T is the number of tokens, D the hidden size, V the vocabulary
size, R the rank of the LoRA; lora_a [D, R], lora_b [R, V]. The twin of a kernel has the same parameters as
the kernel, without `impl`, and computes in float64. The formulas are in neon/include/rvm_kernels.h.

`impl` names an implementation ("scalar", "avx2", ...); None is the fastest one on this machine. Wrong shapes
or types raise ValueError. An input or a result with NaN or Inf raises NotFinite (a logit of -inf is allowed);
in this case the kernel changes no weights and no accumulators. Only head_add and the two evidence kernels
return NaN and Inf instead of raising an error, and all_within returns False.
"""

import ctypes as C
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels.library import BAD_ARGUMENT, MAX_RANK, NOT_FINITE, OK, Param, functions
from ruvmlx.kernels.replies import TRACE, ReplyStruct, ReplyWork

Array = NDArray[np.float32]
# one array of weights for `micro_step`, its velocity (None: no momentum), and its gradient
Step = tuple[Array, Array | None, Array]

_F32, _I32 = np.dtype(np.float32), np.dtype(np.int32)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_byte_at, _address = C.c_char.from_buffer, C.addressof


class NotFinite(ArithmeticError):
    """This error means that a kernel's input has NaN or Inf, or that its output would have NaN or Inf. No
    weights and no sums of a trace were changed."""


def all_within(x: Array, most: float, impl: str | None = None) -> bool:
    """Return True if no number in x is NaN or has a magnitude above `most`. most: a finite number, 0 or
    more."""
    rc = functions(impl).all_within(_in(x), x.size, most)
    if rc != NOT_FINITE:
        _done("all_within", rc)
    return rc == OK


def all_finite(x: Array, impl: str | None = None) -> bool:
    """Return True if every element is finite."""
    return all_within(x, _MAX_FLOAT32, impl)


def micro_update(
    w: Array, velocity: Array | None, grad: Array, eta: float, mu: float = 0.0, impl: str | None = None
) -> None:
    """Update the weights w in place by one gradient step with momentum: velocity = mu * velocity + eta *
    grad; w += velocity. If velocity is None, the step is w += eta * grad."""
    micro_step([(w, velocity, grad)], eta, mu, impl)


def micro_step(steps: Sequence[Step], eta: float, mu: float = 0.0, impl: str | None = None) -> None:
    """Run micro_update for several arrays of weights as one step: either all arrays change, or no array
    changes."""
    params = (Param * len(steps))()
    for param, (w, velocity, grad) in zip(params, steps, strict=True):
        _shape("grad", grad, w.shape)
        param.w, param.g, param.n = _inout(w), _in(grad), w.size
        if velocity is not None:
            _shape("velocity", velocity, w.shape)
            param.velocity = _inout(velocity)
    _done("micro_update", functions(impl).micro_update(_address(params), len(steps), eta, mu))


def micro_step_ref(steps: Sequence[Step], eta: float, mu: float = 0.0) -> None:
    moves = [
        eta * grad.astype(np.float64) + (0 if velocity is None else mu * velocity.astype(np.float64))
        for _, velocity, grad in steps
    ]
    if not all(np.isfinite(w + move).all() for (w, _, _), move in zip(steps, moves, strict=True)):
        raise NotFinite("micro_update: a new weight is not finite")
    for (w, velocity, _), move in zip(steps, moves, strict=True):
        w[...] = w + move
        if velocity is not None:
            velocity[...] = move


def head_add(
    logits: Array, hidden: Array, lora_a: Array, lora_b: Array, s: float, impl: str | None = None
) -> None:
    """Add s * (hidden @ lora_a) @ lora_b to logits, in place. hidden: [T, D] or [D]; logits: [T, V] or
    [V]."""
    dim, vocab, rank = _lora(lora_a, lora_b)
    _shape("hidden", hidden, (*hidden.shape[:-1], dim))
    _shape("logits", logits, (*hidden.shape[:-1], vocab))
    f, tokens = functions(impl), hidden.size // dim
    args = _in(hidden), _in(lora_a), _in(lora_b), s, tokens, dim, vocab, rank, _inout(logits)
    _done("head_add", f.head_add(*args))


def head_add_ref(logits: Array, hidden: Array, lora_a: Array, lora_b: Array, s: float) -> None:
    u = hidden.astype(np.float64) @ lora_a
    logits[...] = logits + s * (u @ lora_b)


def trace_accumulate(
    h: Array,
    logits: Array,
    y: int,
    lora_a: Array,
    lora_b: Array,
    s: float,
    e_a: Array,
    e_b: Array,
    impl: str | None = None,
) -> tuple[float, float]:
    """Add the eligibility (the gradient of log p(y)) of one generated token y to e_a [D, R] and e_b [R, V],
    in place. Returns log p(y) with the adapter, and without it.

    u = lora_a^T h; delta = onehot(y) - softmax(logits); e_b += s u delta^T; e_a += s h (lora_b delta)^T. h:
    [D]; logits: [V], with the adapter applied.
    """
    dim, vocab, rank = _lora(lora_a, lora_b)
    _shape("h", h, (dim,))
    _shape("logits", logits, (vocab,))
    _shape("e_a", e_a, lora_a.shape)
    _shape("e_b", e_b, lora_b.shape)
    if not 0 <= y < vocab:
        raise ValueError(f"token y = {y} is outside the vocabulary of {vocab}")
    out = (C.c_double * 2)()
    args = _in(h), _in(logits), _in(lora_a), _in(lora_b), s, dim, vocab, rank, y
    rc = functions(impl).trace_accumulate(*args, _inout(e_a), _inout(e_b), _address(out))
    _done("trace_accumulate", rc)
    return out[0], out[1]


def trace_work(
    h: Array,
    logits: Array,
    y: int,
    lora_a: Array,
    lora_b: Array,
    s: float,
    e_a: Array,
    e_b: Array,
    traced: Callable[[float, float], None],
) -> ReplyWork:
    """Return the call of trace_accumulate as a ReplyWork, which can run together with the calls of other
    replies. After the call, the function `traced` receives log p(y) with the adapter, and without it. This
    function does not check shapes."""
    dim, rank = lora_a.shape
    fields = ReplyStruct(what=TRACE, token=y, scale=s, dim=dim, vocab=logits.size, rank=rank)
    fields.hidden, fields.logits, fields.lora_a, fields.lora_b = _in(h), _in(logits), _in(lora_a), _in(lora_b)
    fields.e_a, fields.e_b = _inout(e_a), _inout(e_b)

    def done(after: ReplyStruct) -> None:
        _done("trace_accumulate", after.status)
        traced(*after.logprob)

    return ReplyWork(fields, done, h, logits, lora_a, lora_b, e_a, e_b)


def trace_accumulate_ref(
    h: Array, logits: Array, y: int, lora_a: Array, lora_b: Array, s: float, e_a: Array, e_b: Array
) -> tuple[float, float]:
    h64, z, b = h.astype(np.float64), logits.astype(np.float64), lora_b.astype(np.float64)
    u = h64 @ lora_a
    live, frozen = _log_softmax(z)[y], _log_softmax(z - s * (u @ b))[y]
    if not np.isfinite([live, frozen]).all():
        raise NotFinite("trace_accumulate: NaN, Inf or a token of probability 0")
    delta = -np.exp(_log_softmax(z))
    delta[y] += 1
    e_b[...] = e_b + s * np.outer(u, delta)
    e_a[...] = e_a + s * np.outer(h64, b @ delta)
    return float(live), float(frozen)


def kl_to_frozen(
    p0: Array, u: Array, lora_b: Array, s: float, log_ratio: Array | None = None, impl: str | None = None
) -> tuple[float, float]:
    """Return two means over M contexts (positions in texts). Let `new` be the distribution of the next token
    with the adapter, new ~ p0 * exp(d) with d = s * u @ lora_b, and `frozen` the distribution of the model
    without adapters. The first mean is KL(new || frozen) in nats. The second mean is log sum_v p0 exp(d); in
    each context, the adapter changes the log-probability of token v by d[v] minus log sum_v p0 exp(d). The
    absolute error is about 1e-6 nats.

    p0: [M, V], probabilities without this adapter
    u: [M, R] = hidden @ lora_a
    log_ratio: [M, V] = log(p0 / frozen); None: p0 is frozen
    """
    contexts, vocab = p0.shape
    rank = lora_b.shape[0]
    _shape("u", u, (contexts, rank))
    _shape("lora_b", lora_b, (rank, vocab))
    if log_ratio is not None:
        _shape("log_ratio", log_ratio, p0.shape)
    out = (C.c_double * 2)()
    ratio = None if log_ratio is None else _in(log_ratio)
    args = _in(p0), ratio, _in(u), _in(lora_b), s, contexts, vocab, rank
    _done("kl_to_frozen", functions(impl).kl_to_frozen(*args, _address(out)))
    return out[0], out[1]


def kl_to_frozen_ref(
    p0: Array, u: Array, lora_b: Array, s: float, log_ratio: Array | None = None
) -> tuple[float, float]:
    d = s * (u.astype(np.float64) @ lora_b)
    top = d.max(axis=-1, keepdims=True)
    new = p0 / np.sum(p0, axis=-1, keepdims=True, dtype=np.float64) * np.exp(d - top)
    total = new.sum(axis=-1, keepdims=True)
    lost = top + np.log(total)
    ratio = d - lost if log_ratio is None else d - lost + log_ratio  # log(new / frozen)
    return float(np.mean(np.sum(new / total * ratio, axis=-1))), float(np.mean(lost))


def evidence_add(
    held: Array, gradient: Array, information: Array, w: float, kept: float, impl: str | None = None
) -> Array:
    """Return the evidence (sums over all ratings) with one more rating: kept * held + (w g, (w g)^2, |w| f),
    [3, R, N]. g: gradient; f: Fisher information; w: the rating's weight. NaN stays NaN.

    held: [3, R, N]: the sums G, S and L of (w g, (w g)^2, |w| f) over the earlier ratings
    gradient, information: [R, N] of the new rating
    """
    _shape("held", held, (3, *gradient.shape))
    _shape("information", information, gradient.shape)
    out = np.empty_like(held)
    args = _in(held), _in(gradient), _in(information), w, kept, gradient.size, _inout(out)
    _done("evidence_add", functions(impl).evidence_add(*args))
    return out


def evidence_add_ref(held: Array, gradient: Array, information: Array, w: float, kept: float) -> Array:
    step = w * gradient.astype(np.float64)
    return (kept * held + np.stack([step, step**2, abs(w) * information])).astype(np.float32)


def evidence_push(
    evidence: Array,
    precision: Array,
    step: float,
    agree: float,
    noise: float,
    part: slice,
    theta: Array,
    impl: str | None = None,
) -> None:
    """Set the columns theta[:, part] to the weights that follow from the evidence (sums over all ratings):
    step * G / (precision + L), times G^2 / (G^2 + agree * S), times `beyond_noise` of each row. All other
    columns of theta do not change. NaN stays NaN.

    evidence: [3, R, N]: the sums G, S and L of evidence_add
    precision: [N]
    theta: [R, N]
    """
    rank, n = theta.shape
    _shape("evidence", evidence, (3, rank, n))
    _shape("precision", precision, (n,))
    args = _in(evidence), _in(precision), step, agree, noise, rank, n, part.start, part.stop, _inout(theta)
    _done("evidence_push", functions(impl).evidence_push(*args))


def evidence_push_ref(
    evidence: Array, precision: Array, step: float, agree: float, noise: float, part: slice, theta: Array
) -> None:
    g, s, information = evidence[..., part].astype(np.float64)
    agreed = g**2 / (g**2 + agree * s + 1e-12)
    theta[:, part] = step * g / (precision[part] + information) * agreed * beyond_noise(g, s, noise)


def beyond_noise(g: Array, s: Array, noise: float) -> NDArray[np.float64]:
    """Return, for each row of g [R, N], the share of the row's sum of squares that chance (`noise` times the
    sum of s) does not explain: [R, 1]. (James and Stein 1961)"""
    signal, chance = np.sum(np.square(g), axis=1, keepdims=True), np.sum(s, axis=1, keepdims=True)
    return np.maximum(0, 1 - noise * chance / np.maximum(signal, 1e-12))


def micro_place(
    lora_b: Array,
    c: float,
    block: Array,
    at: NDArray[np.int32],
    s: float,
    most: float,
    impl: str | None = None,
) -> Array:
    """Return c * lora_b [R, V], but with the columns `at` [n] replaced by s times the first n columns of
    block. If c is 0, the old weights lora_b have no effect. Raises NotFinite if a number in c * lora_b or in
    s * block has a magnitude above `most`."""
    rank, vocab = lora_b.shape
    _shape("block", block, (rank, block.shape[1]))
    if block.shape[1] < at.size:
        raise ValueError(f"block has {block.shape[1]} columns, expected at least {at.size}")
    out = np.empty_like(lora_b)
    old = _in(lora_b) if c else None
    args = old, c, _in(block), _in(at, _I32), s, rank, vocab, at.size, block.shape[1], most, _inout(out)
    rc = functions(impl).micro_place(*args)
    if rc == BAD_ARGUMENT and (at.min() < 0 or at.max() >= vocab):
        raise ValueError(f"token ids span {at.min()}..{at.max()}, outside the vocabulary of {vocab}")
    _done("micro_place", rc)
    return out


def micro_place_ref(
    lora_b: Array, c: float, block: Array, at: NDArray[np.int32], s: float, most: float
) -> Array:
    out = c * lora_b.astype(np.float64) if c else np.zeros(lora_b.shape)
    if not (np.abs(out) <= most).all() or not (np.abs(s * block.astype(np.float64)) <= most).all():
        raise NotFinite("micro_place: a weight is beyond all measure")
    out[:, at] = s * block[:, : at.size].astype(np.float64)
    return out.astype(np.float32)


def logprobs(logits: Array, y: NDArray[np.int32], impl: str | None = None) -> NDArray[np.float64]:
    """Return log p(y_t) = logits[t, y_t] - logsumexp(logits[t]). logits: [T, V]; y: int32 [T]."""
    tokens, vocab = logits.shape
    _shape("y", y, (tokens,))
    if tokens and (y.min() < 0 or y.max() >= vocab):
        raise ValueError(f"token ids span {y.min()}..{y.max()}, outside the vocabulary of {vocab}")
    out = np.empty(tokens)
    _done("logprobs", functions(impl).logprobs(_in(logits), _in(y, _I32), tokens, vocab, out.ctypes.data))
    return out


def logprobs_ref(logits: Array, y: NDArray[np.int32]) -> NDArray[np.float64]:
    return _log_softmax(logits.astype(np.float64))[np.arange(len(y)), y]


def _log_softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.sum(np.exp(z), axis=-1, keepdims=True))


def _lora(lora_a: Array, lora_b: Array) -> tuple[int, int, int]:
    """Return D, V and R of a LoRA's two matrices."""
    dim, rank = lora_a.shape
    _shape("lora_b", lora_b, (rank, lora_b.shape[-1]))
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"rank is {rank}, must be 1 to {MAX_RANK}")
    return dim, lora_b.shape[1], rank


def _shape(name: str, x: NDArray, expected: tuple[int, ...]) -> None:
    if x.shape != expected:
        raise ValueError(f"{name} has shape {x.shape}, expected {expected}")


def _inout(x: NDArray, dtype: np.dtype = _F32) -> int:
    """Return the address of an array for a kernel that writes to the array."""
    if x.dtype != dtype:
        raise ValueError(f"array is {x.dtype}, expected {dtype}")
    try:
        return _address(_byte_at(x))  # type: ignore[arg-type]  # 4x faster than x.ctypes.data
    except (TypeError, ValueError):
        why = "not contiguous" if not x.flags.c_contiguous else "empty" if not x.size else "read-only"
        raise ValueError(f"array of shape {x.shape} is {why}") from None


def _in(x: NDArray, dtype: np.dtype = _F32) -> int:
    """Return the address of an array for a kernel that only reads the array."""
    if x.flags.writeable:
        return _inout(x, dtype)
    if x.dtype != dtype or not x.flags.c_contiguous:
        raise ValueError(f"array is {x.dtype} with strides {x.strides}, expected contiguous {dtype}")
    return x.ctypes.data


def _done(kernel: str, rc: int) -> None:
    if rc == OK:
        return
    if rc == NOT_FINITE:
        raise NotFinite(f"{kernel}: NaN or Inf in its input, or it would have produced one")
    raise ValueError(f"{kernel}: bad argument (an empty array or a rank over {MAX_RANK})")

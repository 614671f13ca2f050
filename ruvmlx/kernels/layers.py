"""This module has the kernels that a decoder runs between its matrix products (norms, RoPE, attention and
others), over NumPy arrays. Most of these kernels have a twin (`..._ref`), a simple version for tests.

Arrays are float32 and C-contiguous, except the pages of a KV cache. The formulas are in
neon/include/rvm_layers.h. `impl` names an implementation ("scalar", "avx2", ...); None is the fastest one on
this machine. The twin of a kernel has the same parameters as the kernel, without `impl` (`attend_ref` also
takes the keys and values).
"""

import ctypes as C
import functools
from dataclasses import dataclass, field
from math import erfc, sqrt
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ruvmlx.kernels.library import LibraryError, _load, implementations
from ruvmlx.kernels.micro import _done, _in, _inout, _shape
from ruvmlx.tiers import HOT, PAGE

Array = NDArray[np.float32]
Half = NDArray[np.uint16]  # the bits of float16
Factor = NDArray[np.float32] | NDArray[np.uint32]  # a factor of a LoRA: plain, or packed with 4 bits

_P, _N, _F, _I = C.c_void_p, C.c_size_t, C.c_float, C.c_int

# The functions that the C struct rvm_layers points to, in the order of its fields, with the types of each
# function's arguments.
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_P, _P, _F, _N, _N, _P],
    "layer_norm": [_P, _P, _P, _F, _N, _N, _P],
    "rope": [_P, _P, _N, _N, _N, _I, _P],
    "swiglu": [_P, _P, _N, _P],
    "gelu": [_P, _N, _P],
    "to_half": [_P, _N, _P],
    "from_half": [_P, _N, _P],
    "lora_project": [_P, _P, _I, _F, _N, _N, _N, _P],
    "lora_add": [_P, _P, _I, _N, _N, _N, _N, _N, _P, _N],
    "append": [_P, _P, _N, _P, _N, _N, _N, _P, _P],
    "attend": [_P],
    "merge": [_P, _N, _N, _N, _N, _P],
    "demote": [_I, _P, _I, _P, _N, _N],
}
KERNELS = tuple(_SIGNATURES)


class _LayerTable(C.Structure):
    _fields_ = [("name", C.c_char_p), *((name, _P) for name in KERNELS)]


class _Page(C.Structure):
    _fields_ = [("data", _P), ("tier", C.c_uint32), ("unused", C.c_uint32)]


class _Attention(C.Structure):
    _fields_ = [
        ("pages", _P),
        ("rows", _P),
        ("head", _N),
        ("matmul", _P),
        ("head_dim", _N),
        ("group", _N),
        ("q", _P),
        ("q_stride", _N),
        ("turn", _P),
        ("queries", _N),
        ("position", _N),
        ("slopes", _P),
        ("window", _N),
        ("first_page", _N),
        ("end_page", _N),
        ("out", _P),
        ("out_stride", _N),
        ("partial", _P),
        ("scratch", _P),
    ]


@functools.cache
def functions(impl: str | None = None) -> SimpleNamespace:
    """Return the kernels KERNELS of one implementation (None: the fastest) as ctypes functions that release
    Python's global lock (GIL), and `scratch`, the size of attention's scratch memory."""
    lib = _load()
    lib.rvm_layers_impl.restype, lib.rvm_layers_impl.argtypes = C.POINTER(_LayerTable), [C.c_char_p]
    lib.rvm_attention_scratch.restype, lib.rvm_attention_scratch.argtypes = _N, [_N, _N]
    table = lib.rvm_layers_impl(impl.encode() if impl else None)
    if not table:
        raise LibraryError(f"no implementation {impl!r} here; there are {', '.join(implementations())}.")
    made = {
        name: C.CFUNCTYPE(C.c_int, *types)(getattr(table.contents, name))
        for name, types in _SIGNATURES.items()
    }
    return SimpleNamespace(**made, scratch=lib.rvm_attention_scratch)


def rms_norm(x: Array, weight: Array, eps: float, impl: str | None = None) -> Array:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis. x: [T, D]."""
    _shape("weight", weight, x.shape[1:])
    y = np.empty_like(x)
    _done("rms_norm", functions(impl).rms_norm(_in(x), _in(weight), eps, *x.shape, _inout(y)))
    return y


def rms_norm_ref(x: Array, weight: Array, eps: float) -> Array:
    x64 = x.astype(np.float64)
    return (x64 / np.sqrt(np.mean(x64**2, -1, keepdims=True) + eps) * weight).astype(np.float32)


def layer_norm(x: Array, weight: Array, bias: Array | None, eps: float, impl: str | None = None) -> Array:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight (+ bias) over the last axis. x: [T, D]."""
    _shape("weight", weight, x.shape[1:])
    if bias is not None:
        _shape("bias", bias, x.shape[1:])
    y = np.empty_like(x)
    rows = _in(x), _in(weight), None if bias is None else _in(bias)
    _done("layer_norm", functions(impl).layer_norm(*rows, eps, *x.shape, _inout(y)))
    return y


def layer_norm_ref(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    centred = x.astype(np.float64) - x.mean(-1, dtype=np.float64, keepdims=True)
    y = centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps) * weight
    return (y if bias is None else y + bias).astype(np.float32)


def turns(positions: NDArray[np.int64], frequencies: NDArray[np.float64]) -> Array:
    """Return the rotations of RoPE [T, 2 n] for n frequencies (n = head_dim / 2): the cosines, then the
    sines, of position * frequency."""
    angles = np.outer(positions, frequencies)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rope(x: Array, turn: Array, traditional: bool = False, impl: str | None = None) -> Array:
    """Return a copy of x in which RoPE rotates pairs of numbers of each head: the numbers i and i + d/2, or
    2i and 2i + 1 if `traditional` is True. x: [T, heads, d]; turn: [T, d]."""
    tokens, heads, head_dim = x.shape
    _shape("turn", turn, (tokens, head_dim))
    y = np.empty_like(x)
    args = _in(x), _in(turn), tokens, heads, head_dim, traditional, _inout(y)
    _done("rope", functions(impl).rope(*args))
    return y


def rope_ref(x: Array, turn: Array, traditional: bool = False) -> Array:
    half = x.shape[-1] // 2
    c, s = turn[:, None, :half], turn[:, None, half:]
    a, b = (x[..., ::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    y = np.empty_like(x)
    # `first` and `second` are views of y, so a write to them changes y.
    first, second = (y[..., ::2], y[..., 1::2]) if traditional else (y[..., :half], y[..., half:])
    first[...], second[...] = a * c - b * s, a * s + b * c
    return y


def swiglu(gate: Array, up: Array, impl: str | None = None) -> Array:
    """Return gate / (1 + e^-gate) * up (SwiGLU)."""
    _shape("up", up, gate.shape)
    y = np.empty_like(gate)
    _done("swiglu", functions(impl).swiglu(_in(gate), _in(up), gate.size, _inout(y)))
    return y


def swiglu_ref(gate: Array, up: Array) -> Array:
    g = gate.astype(np.float64)
    return (g / (1 + np.exp(-np.clip(g, -700, 700))) * up).astype(np.float32)


def gelu(x: Array, impl: str | None = None) -> Array:
    """Return gelu(x) = x * P(Z < x), where Z is a standard normal random number."""
    y = np.empty_like(x)
    _done("gelu", functions(impl).gelu(_in(x), x.size, _inout(y)))
    return y


def gelu_ref(x: Array) -> Array:
    tail = np.array([erfc(-z / sqrt(2)) / 2 for z in x.reshape(-1).tolist()])
    return (x.reshape(-1) * tail).reshape(x.shape).astype(np.float32)


def lora_shapes(width: int, out: int, rank: int, bits: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the factors lora_a and lora_b of a LoRA. bits: 32 (float32), or 4 (uint32, the
    packed rows of neon/include/rvm_layers.h)."""
    if bits == 32:
        return (width, rank), (rank, out)
    return (rank, 6 * -(-width // 32)), (rank, 6 * -(-out // 32))


def lora_bits(lora_a: Factor) -> int:
    """Return the bits of each weight of a factor: 4 if it is packed (uint32), else 32."""
    return 4 if lora_a.dtype == np.uint32 else 32


def lora_add(y: Array, x: Array, lora_a: Factor, lora_b: Factor, s: float, impl: str | None = None) -> None:
    """Add s (x @ lora_a) @ lora_b to y, in place. x: [T, in]; y: [T, out]. The factors have the shapes of
    `lora_shapes`; packed factors are uint32."""
    (tokens, width), out, rank, bits = x.shape, y.shape[1], lora_b.shape[0], lora_bits(lora_a)
    for name, factor, shape in zip("ab", (lora_a, lora_b), lora_shapes(width, out, rank, bits), strict=True):
        _shape(f"lora_{name}", factor, shape)
    _shape("y", y, (tokens, out))
    u, f = np.empty((tokens, rank), np.float32), functions(impl)
    a, b = _in(lora_a, lora_a.dtype), _in(lora_b, lora_a.dtype)
    _done("lora_project", f.lora_project(_in(x), a, bits, s, tokens, width, rank, _inout(u)))
    _done("lora_add", f.lora_add(_in(u), b, bits, tokens, rank, out, 0, out, _inout(y), out))


def lora_add_ref(y: Array, x: Array, lora_a: Array, lora_b: Array, s: float) -> None:
    y[...] = y + s * (x.astype(np.float64) @ lora_a @ lora_b)


@dataclass
class PagedKV:
    """The keys and values of one head in pages of 64 tokens, in the layout of the C decoder."""

    head_dim: int
    # an array of Half if the page is hot (16-bit numbers), else an array of bytes
    pages: list[NDArray[Any]] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)
    tokens: int = 0

    @property
    def width(self) -> int:
        return -(-self.head_dim // 16) * 16

    def append(self, k: Array, v: Array, turn: Array, impl: str | None = None) -> None:
        """Append tokens. k, v: [T, head_dim]; turn: [T, head_dim], the rotations (see `turns`) of their
        positions."""
        f, done = functions(impl), 0
        while done < len(k):
            at = self.tokens % PAGE
            if at == 0:
                self.pages.append(np.zeros(PAGE * (self.head_dim + self.width), np.uint16))
                self.tiers.append(HOT)
            n, page = min(PAGE - at, len(k) - done), self.pages[-1]
            keys, values = page.ctypes.data, page.ctypes.data + 2 * PAGE * self.head_dim
            rows = k[done:].ctypes.data, v[done:].ctypes.data, self.head_dim, turn[done:].ctypes.data
            _done("append", f.append(*rows, n, self.head_dim, at, keys, values))
            self.tokens, done = self.tokens + n, done + n

    def attend(
        self,
        q: Array,
        turn: Array,
        position: int,
        window: int = 0,
        parts: int = 1,
        impl: str | None = None,
        matmul: str | None = None,
        slopes: Array | None = None,
    ) -> Array:
        """Return softmax(q . k / sqrt(d) + slope * (key's position - query's)) v: [T, group, d].

        q: [T, group, d], the queries, not rotated yet, of the `group` query heads that share this head's
            keys, at `position`, position + 1, ...
        matmul: the name of the implementation of matmul.py whose kernels read quantised pages
        slopes: [group], ALiBi's slopes; None: no ALiBi, so all slopes are 0
        """
        queries, group, head_dim = q.shape
        f, out = functions(impl), np.empty_like(q)
        pages = (_Page * len(self.pages))(
            *(_Page(page.ctypes.data, tier) for page, tier in zip(self.pages, self.tiers, strict=True))
        )
        stop = -(-(position + queries) // PAGE)
        row = queries * group * (head_dim + 2)
        partial = np.empty((parts, row), np.float32)
        scratch = np.empty(f.scratch(queries * group, head_dim), np.float32)
        table = C.cast(_load().rvm_matmul_impl(matmul.encode() if matmul else None), _P)
        call = _Attention(C.addressof(pages), None, 0, table, head_dim, group, _in(q), group * head_dim)
        call.turn, call.queries, call.position, call.window = _in(turn), queries, position, window
        call.out, call.out_stride, call.scratch = _inout(out), group * head_dim, _inout(scratch)
        call.slopes = None if slopes is None else _in(slopes)
        for i in range(parts):
            call.first_page, call.end_page = i * stop // parts, (i + 1) * stop // parts
            call.partial = partial[i].ctypes.data if parts > 1 else None
            _done("attend", f.attend(C.addressof(call)))
        if parts > 1:
            merged = _in(partial), parts, row, queries * group, head_dim, _inout(out)
            _done("merge", f.merge(*merged))
        return out


def attend_ref(
    q: Array,
    k: Array,
    v: Array,
    turn: Array,
    position: int,
    window: int = 0,
    slopes: Array | None = None,
) -> NDArray[np.float64]:
    """Return the result of `PagedKV.attend` (hot pages only) for keys k and values v: [S, d]; k is not
    rotated yet. turn: [S, d], the rotations of the keys' positions."""
    half = np.float16
    keys = rope_ref(k[:, None], turn[: len(k)])[:, 0].astype(half).astype(np.float64)
    values = v.astype(half).astype(np.float64)
    at = position + np.arange(len(q))
    queries = rope_ref(q, turn[at]).astype(np.float64)
    scores = np.einsum("tgd,sd->tgs", queries, keys) / np.sqrt(q.shape[-1])
    s = np.arange(len(k))
    if slopes is not None:
        scores = scores + slopes[:, None] * (s - at[:, None])[:, None]
    seen = (s <= at[:, None]) & (at[:, None] - s < (window or len(k) + len(q)))
    scores = np.where(seen[:, None], scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("tgs,sd->tgd", p / p.sum(-1, keepdims=True), values)

"""This module wraps the C decoder (neon/include/rvm_decoder.h): one call runs a whole step of a model (a
token, or a chunk of a prompt) and does not hold Python's global lock (GIL).

Arrays are float32 and C-contiguous. In shapes, T is the number of tokens, V the vocabulary size, D the hidden
size. A Decoder holds references to the packed matrices and norms that it reads, so Python does not free their
memory. Keys and values belong to the caller (ruvmlx/kv): pages of 64 tokens in a
kernels.page_table.NativePageTable. A decoder runs one call at a time, except `demote`; a second call raises
RuvmlxError.
"""

import ctypes as C
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ruvmlx.errors import RuvmlxError
from ruvmlx.kernels.decoder_weights import DecoderShape, DecoderWeights
from ruvmlx.kernels.layers import Factor, lora_bits, lora_shapes
from ruvmlx.kernels.library import BAD_ARGUMENT, NOT_FINITE, OK, LibraryError, _load
from ruvmlx.kernels.micro import NotFinite, _in, _inout
from ruvmlx.kernels.page_table import NativePageTable, row
from ruvmlx.kernels.replies import ReplyStruct, ReplyWork

Array = NDArray[np.float32]

CANCELLED, NO_MEMORY, BUSY = 3, 4, 5
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# the numbers of the C enum rvm_module
_NUMBERS = {module: i for i, module in enumerate((*MODULES, "lm_head", "embed_tokens"))}

# the fields of the C struct rvm_row: the page table, the number of earlier tokens and the new token of one
# sequence
ROW = np.dtype([("pages", np.uint64), ("offset", np.uint64), ("token", np.int32)], align=True)

_P, _N, _F, _I, _U = C.c_void_p, C.c_size_t, C.c_float, C.c_int, C.c_uint32


class Cancelled(Exception):
    """This error means that the cancel flag was set during a call. The keys and values of the tokens before
    the call have not changed."""


class _Config(C.Structure):
    _fields_ = [
        *(
            (name, _U)
            for name in (
                "n_layers",
                "n_heads",
                "n_kv_heads",
                "head_dim",
                "hidden_size",
                "intermediate_size",
                "vocab_size",
                "sliding_window",
                "max_tokens",
                "threads",
                "precise",
                "layer_norm",
                "rope_dims",
            )
        ),
        ("norm_eps", _F),
        ("alibi_slopes", _P),
        ("rope_frequencies", _P),
        ("rope_factor", C.c_double),
        ("query_beta", C.c_double),
        ("query_span", C.c_double),
        ("impl", C.c_char_p),
    ]


class _Layer(C.Structure):
    _fields_ = [
        ("matrix", _P * len(MODULES)),
        ("bias", _P * len(MODULES)),
        ("input_norm", _P),
        ("post_norm", _P),
        ("input_norm_bias", _P),
        ("post_norm_bias", _P),
        ("q_norm", _P),
        ("k_norm", _P),
        ("no_rope", _U),
    ]


class _Weights(C.Structure):
    _fields_ = [
        ("embedding", _P),
        ("lm_head", _P),
        ("norm", _P),
        ("layers", C.POINTER(_Layer)),
        ("norm_bias", _P),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rvm_decoder_create": (_I, [_P, _P, _P]),
    "rvm_decoder_destroy": (None, [_P]),
    "rvm_decoder_matmul_name": (C.c_char_p, [_P]),
    "rvm_decoder_bytes": (_N, [_P]),
    "rvm_decoder_use_threads": (_I, [_P, _U]),
    "rvm_decoder_forward": (_I, [_P, _P, _N, _P, _N, _N, _P, _P, _P]),
    "rvm_decoder_prefill": (_I, [_P, _P, _N, _P, _N, _P, _P, _P]),
    "rvm_decoder_layers": (_I, [_P, _P, _N, _P, _N, _P, _P]),
    "rvm_decoder_step": (_I, [_P, _P, _N, _I, _P, _P, _P]),
    "rvm_decoder_page_bytes": (_N, [_P, _I]),
    "rvm_decoder_demote": (_I, [_P, _P, _P]),
    "rvm_decoder_replies": (_I, [_P, _P, _N]),
    "rvm_decoder_head": (_I, [_P, _P, _N, _I, _P]),
    "rvm_decoder_set_lora": (_I, [_P, _N, _I, _P, _P, _I, _N, _F]),
    "rvm_matmul_impl_name": (C.c_char_p, [_N]),
}


@functools.cache
def _lib() -> C.CDLL:
    lib = _load()
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise LibraryError(
            f"librvm is older than these sources ({error}); rebuild it with "
            "`uv sync --reinstall-package ruvmlx` or `pip install .`."
        ) from None
    return lib


class Decoder:
    """A decoder runs one model."""

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        *,
        threads: int = 1,
        max_tokens: int = 256,
        impl: str | None = None,
        precise: bool = True,
    ):
        self.shape, self.max_tokens, self.threads = shape, max_tokens, threads
        self._keep: list[Any] = [weights]
        config = self._config(threads, max_tokens, precise, impl)
        described, handle = self._describe(weights), _P()
        rc = _lib().rvm_decoder_create(C.byref(config), C.byref(described), C.byref(handle))
        if rc == NO_MEMORY:
            raise RuvmlxError("no memory for the decoder's activations; close other programs and try again.")
        if rc != OK or not handle.value:
            raise ValueError(f"the decoder refuses this model's shape or weights (impl {impl!r}): {shape}")
        self.handle = handle.value

    def __del__(self, library: Callable[[], C.CDLL] = _lib) -> None:
        if getattr(self, "handle", None):  # `library`: as in PageMemory.free
            library().rvm_decoder_destroy(self.handle)

    def _config(self, threads: int, max_tokens: int, precise: bool, impl: str | None) -> _Config:
        s = self.shape
        frequencies = np.ascontiguousarray(s.rope_frequencies, np.float64)
        self._keep.append(frequencies)
        sizes = [getattr(s, name) for name, _ in _Config._fields_[:8]]  # type: ignore[misc]
        address = frequencies.ctypes.data
        name = impl.encode() if impl else None
        rope = address, s.rope_factor, s.query_beta, s.query_span
        kinds = precise, s.layer_norm, 2 * len(frequencies)
        slopes = _address(s.alibi_slopes)
        self._keep.append(s.alibi_slopes)
        return _Config(*sizes, max_tokens, threads, *kinds, s.norm_eps, slopes, *rope, name)

    def _describe(self, w: DecoderWeights) -> _Weights:
        layers = (_Layer * len(w.layers))()
        for to, layer in zip(layers, w.layers, strict=True):
            for i, module in enumerate(MODULES):
                if module in layer.matrices:
                    to.matrix[i] = layer.matrices[module].ctypes.data
                to.bias[i] = _in(layer.biases[module]) if module in layer.biases else None
            to.input_norm, to.post_norm = _in(layer.input_norm), _in(layer.post_norm)
            to.input_norm_bias = _address(layer.input_norm_bias)
            to.post_norm_bias = _address(layer.post_norm_bias)
            if layer.q_norm is not None and layer.k_norm is not None:
                to.q_norm, to.k_norm = _in(layer.q_norm), _in(layer.k_norm)
            to.no_rope = layer.no_rope
        self._keep.append(layers)
        matrices = w.embedding.ctypes.data, w.lm_head.ctypes.data
        return _Weights(*matrices, _in(w.norm), layers, _address(w.norm_bias))

    @property
    def matmul_name(self) -> str:
        return _lib().rvm_decoder_matmul_name(self.handle).decode()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the decoder's activations and scratch memory."""
        return _lib().rvm_decoder_bytes(self.handle)

    def page_bytes(self, tier: int) -> int:
        """Return the bytes of a page of 64 tokens with the precision of this tier, for all layers and
        heads."""
        return _lib().rvm_decoder_page_bytes(self.handle, tier)

    def demote(self, page: int, tier: int, to: int, to_tier: int) -> None:
        """Convert a full page of keys and values to a tier of lower precision, and write the result to
        another address. Any thread can call `demote` at any time.

        page, to: the addresses of the full page and of the memory for the result
        """
        source, target = row(page, tier), row(to, to_tier)
        rc = _lib().rvm_decoder_demote(self.handle, source.ctypes.data, target.ctypes.data)
        if rc != OK:
            raise ValueError(f"cannot demote a page of tier {tier} to tier {to_tier}")

    def forward(
        self,
        tokens: Sequence[int],
        table: NativePageTable,
        offset: int,
        *,
        outputs: int = 1,
        head: bool = True,
        prompt: bool = False,
        cancel: C.c_int | None = None,
    ) -> tuple[Array, Array | None]:
        """Append tokens after `offset` earlier tokens. The pages of the new tokens must exist and be hot
        (16-bit numbers). Returns the hidden states [outputs, D] of the last `outputs` tokens and, with
        `head`, their logits [outputs, V], else None.

        prompt: True: the tokens are a part of a prompt, and `outputs` is 0 or 1. With quantised
            weights, the decoder reads a prompt faster and less exactly (rvm_decoder_prefill).
        Raises Cancelled, or NotFinite when a logit is NaN or infinite. After an error, the keys and values of
        the older tokens have not changed.
        """
        n, shape = len(tokens), self.shape
        hidden: Array = np.empty((outputs, shape.hidden_size), np.float32)
        logits: Array | None = np.empty((outputs, shape.vocab_size), np.float32) if head and outputs else None
        assert not prompt or outputs <= 1
        run = _lib().rvm_decoder_prefill if prompt else _lib().rvm_decoder_forward
        rc = run(
            self.handle,
            table.pointer(offset + n),
            offset,
            (C.c_int32 * n)(*tokens),
            n,
            *(() if prompt else (outputs,)),
            _inout(hidden) if outputs else None,
            None if logits is None else _inout(logits),
            None if cancel is None else C.addressof(cancel),
        )
        _done("forward", rc)
        return hidden, logits

    def layers(
        self, tokens: Sequence[int], table: NativePageTable, offset: int, cancel: C.c_int | None = None
    ) -> Array:
        """Append T tokens, as `forward` does. Return the output of the last layer [T, D] without the final
        norm, for a decoder that has only the first layers of a model."""
        n = len(tokens)
        raw: Array = np.empty((n, self.shape.hidden_size), np.float32)
        pages, flag = table.pointer(offset + n), None if cancel is None else C.addressof(cancel)
        ids = (C.c_int32 * n)(*tokens)
        _done("layers", _lib().rvm_decoder_layers(self.handle, pages, offset, ids, n, _inout(raw), flag))
        return raw

    def step(
        self,
        tokens: Sequence[int],
        tables: Sequence[NativePageTable],
        offsets: Sequence[int],
        *,
        coarse: bool = False,
        cancel: C.c_int | None = None,
    ) -> tuple[Array, Array]:
        """Append one token to each of B different sequences. Returns the hidden states [B, D] and the logits
        [B, V] of the tokens. With quantised weights, the bits of a row do not depend on the other rows, and
        are those of `forward` for the sequence alone if `coarse` is False. Raises Cancelled, or NotFinite
        when a logit is NaN or infinite.

        coarse: True: the activations for quantised weights have 8 bits, as in most of a prompt. A step with
            many sequences then takes about two thirds of the time.
        """
        n, shape = len(tokens), self.shape
        rows = np.zeros(n, ROW)
        rows["pages"] = [table.pointer(at + 1) for table, at in zip(tables, offsets, strict=True)]
        rows["offset"], rows["token"] = offsets, tokens
        hidden: Array = np.empty((n, shape.hidden_size), np.float32)
        logits: Array = np.empty((n, shape.vocab_size), np.float32)
        rc = _lib().rvm_decoder_step(
            self.handle,
            rows.ctypes.data,
            n,
            coarse,
            _inout(hidden),
            _inout(logits),
            None if cancel is None else C.addressof(cancel),
        )
        _done("step", rc)
        return hidden, logits

    def together(self, some: Sequence[ReplyWork]) -> None:
        """Run the kernel calls of several replies on this decoder's threads, and put the results into the
        fields of each ReplyWork. The caller must then call `ReplyWork.finish`."""
        structs = (ReplyStruct * len(some))(*(work.fields for work in some))
        _done("replies", _lib().rvm_decoder_replies(self.handle, C.addressof(structs), len(some)))
        for work, fields in zip(some, structs, strict=True):
            work.fields = fields

    def head(self, hidden: Array, lora: bool = False) -> Array:
        """Return the logits [T, V] of hidden states [T, D], from the output head. lora: True: add the LoRA of
        lm_head."""
        if hidden.shape[1:] != (self.shape.hidden_size,) or not len(hidden):
            raise ValueError(f"hidden has shape {hidden.shape}, expected [T, {self.shape.hidden_size}]")
        logits: Array = np.empty((len(hidden), self.shape.vocab_size), np.float32)
        _done("head", _lib().rvm_decoder_head(self.handle, _in(hidden), len(hidden), lora, _inout(logits)))
        return logits

    def set_lora(
        self, module: str, layer: int, lora_a: Factor | None, lora_b: Factor | None, scale: float = 1.0
    ) -> None:
        """Add a LoRA to one linear layer (input x, output y) in place of its old LoRA, from the next call on:
        y += scale * (x @ lora_a) @ lora_b. None removes the LoRA. Both arrays are copied. They are float32,
        or uint32 for factors that are packed with 4 bits (layers.lora_shapes).

        The LoRA of the embedding ("embed_tokens") adds scale * lora_a[t] @ lora_b to the row of token t, with
        lora_a [V, rank] and lora_b [rank, D]. It does not change the output head, even of a model that has
        one matrix for both.

        module: one of MODULES, or "lm_head" or "embed_tokens", for which the parameter `layer` is ignored
        """
        number = _NUMBERS[module]
        if lora_a is None or lora_b is None:
            _done("set_lora", _lib().rvm_decoder_set_lora(self.handle, layer, number, None, None, 32, 0, 0.0))
            return
        rank, wanted, bits = lora_b.shape[0], self.lora_shape(module), lora_bits(lora_a)
        if (lora_a.shape, lora_b.shape) != lora_shapes(*wanted, rank, bits):
            raise ValueError(
                f"{module} maps {wanted[0]} to {wanted[1]} values; "
                f"got lora_a {lora_a.shape}, lora_b {lora_b.shape}"
            )
        a, b = _in(lora_a, lora_a.dtype), _in(lora_b, lora_a.dtype)
        _done("set_lora", _lib().rvm_decoder_set_lora(self.handle, layer, number, a, b, bits, rank, scale))

    def lora_shape(self, module: str) -> tuple[int, int]:
        """Return (number of inputs, number of outputs) of a linear layer. The embedding has an input for each
        token."""
        s = self.shape
        d, f, q, kv = s.hidden_size, s.intermediate_size, s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim
        sizes = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
        sizes |= {"gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d), "lm_head": (d, s.vocab_size)}
        sizes["embed_tokens"] = s.vocab_size, d
        return sizes[module]

    def use_threads(self, n: int) -> None:
        """Use only n of the decoder's threads from the next call on."""
        _done("use_threads", _lib().rvm_decoder_use_threads(self.handle, n))


def _address(array: Array | None) -> int | None:
    return None if array is None else _in(array)


def _done(what: str, rc: int) -> None:
    if rc == OK:
        return
    if rc == NOT_FINITE:
        raise NotFinite(f"{what}: NaN or infinity instead of logits")
    if rc == CANCELLED:
        raise Cancelled
    if rc == BUSY:
        raise RuvmlxError("the native backend is already at work in another thread; one call at a time.")
    if rc == NO_MEMORY:
        raise RuvmlxError("no memory for the LoRA; close other programs and try again.")
    assert rc == BAD_ARGUMENT
    raise ValueError(
        f"{what}: bad argument (no tokens, too many, one outside the vocabulary, or no hot page for one)"
    )

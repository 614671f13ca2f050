"""This module packs a model's weight matrices for the C decoder, one matrix at a time.

Only the packed copy of a matrix stays in memory. After a matrix is packed, the module returns the memory of
its part of the memory-mapped file to the system, and keeps no other copy.
"""

import contextlib
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...errors import CorruptFile, RuvmlxError
from ...kernels.decoder import MODULES
from ...kernels.decoder_weights import DecoderWeights, LayerWeights
from ...kernels.packing import ALIGNMENT, SUPER_BLOCKS, PackedMatrix
from ...models.config.layout import matrices, vectors
from ...models.config.model import ModelConfig, Weights
from ...models.files.affine import as_eight_bits
from ...models.files.gguf_blocks import AffineArrays
from ...models.files.gguf_codes import q3_k_as_q6_k
from ...models.files.mapped import release
from ...models.weights.stored import StoredMatrix, stored_matrix, stored_tensor

Arrays = dict[str, np.ndarray]
BLOCKS = {*SUPER_BLOCKS, "Q3_K"}  # the GGUF types that are packed block by block; Q3_K as Q6_K


def packed_weights(weights: Weights, config: ModelConfig, threads: int) -> DecoderWeights:
    """Check the names and shapes of all tensors against the configuration, and return the packed matrices and
    the float32 vectors (norms and biases)."""
    _check_names(weights, config)
    shapes, found = dict(matrices(config)), {}
    memory = _Memory()
    with ThreadPoolExecutor(threads) as pool:
        for module, shape in shapes.items():
            planned = _plan(weights, module, shape)
            found[module] = memory.take(planned.nbytes)
            planned.pack(found[module], pool)
            for array in (planned.weight, planned.scales, planned.biases):
                if array is not None:
                    release(array)
    return _arrange_weights(
        found, {name: _vector(weights, name, shape) for name, shape in vectors(config)}, config
    )


def _arrange_weights(found: Arrays, vector: Arrays, config: ModelConfig) -> DecoderWeights:
    embedding = found["model.embed_tokens"]
    return DecoderWeights(
        embedding=embedding,
        lm_head=found.get("lm_head", embedding),
        norm=vector["model.norm.weight"],
        norm_bias=vector.get("model.norm.bias"),
        layers=[_layer(found, vector, i, config) for i in range(config.n_layers)],
    )


def _layer(found: Arrays, vector: Arrays, layer: int, config: ModelConfig) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    path = {m: f"{prefix}{'mlp' if m in MODULES[4:] else 'self_attn'}.{m}" for m in MODULES}
    return LayerWeights(
        matrices={m: found[path[m]] for m in MODULES if path[m] in found},
        biases={m: vector[f"{path[m]}.bias"] for m in MODULES if f"{path[m]}.bias" in vector},
        input_norm=vector[f"{prefix}input_layernorm.weight"],
        post_norm=vector[f"{prefix}post_attention_layernorm.weight"],
        input_norm_bias=vector.get(f"{prefix}input_layernorm.bias"),
        post_norm_bias=vector.get(f"{prefix}post_attention_layernorm.bias"),
        q_norm=vector.get(f"{prefix}self_attn.q_norm.weight"),
        k_norm=vector.get(f"{prefix}self_attn.k_norm.weight"),
        no_rope=layer in config.layers_without_rope,
    )


class _Memory:
    """An allocator of aligned pieces of large memory mappings. The operating system provides memory only when
    a part of a mapping is written. The mappings ask for huge pages (large units of memory) if the system has
    them."""

    SEGMENT = 64 << 20

    def __init__(self) -> None:
        self._segment, self._used = np.empty(0, np.uint8), 0

    def take(self, nbytes: int) -> np.ndarray:
        if self._used + nbytes > len(self._segment):
            self._segment, self._used = _map_memory(max(nbytes, self.SEGMENT)), 0
        start = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._segment[start : start + nbytes]


def _map_memory(nbytes: int) -> np.ndarray:
    try:
        made = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuvmlxError(
            f"no memory for the model's weights ({error.strerror}); close other programs"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the call `madvise` fails on a Linux kernel without huge pages
            made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, np.uint8)


def _plan(weights: Weights, module: str, shape: tuple[int, int]) -> PackedMatrix:
    out, width = shape
    tensor = stored_tensor(weights, module)
    if tensor is not None and tensor.type.name in BLOCKS:
        return PackedMatrix.plan_blocks(*_blocks(weights, module, shape), width)
    if tensor is not None and tensor.type.affine_bits not in (4, 8):
        return PackedMatrix.plan(*_eight_bits(weights, module, shape), width)
    weight, scales = weights[f"{module}.weight"], weights.get(f"{module}.scales")
    if scales is None:
        _check(f"{module}.weight", weight.shape, shape)
        return PackedMatrix.plan(weight)
    biases = weights[f"{module}.biases"]
    groups = scales.shape[-1]
    if scales.shape != biases.shape or len(scales) != out or len(weight) != out or width % groups:
        raise CorruptFile(f"{module}: scales {scales.shape} do not fit a matrix [{out}, {width}]")
    bits, rest = divmod(32 * weight.shape[1], width)
    if rest or not 1 <= bits <= 8:
        raise CorruptFile(
            f"{module}: packed width {weight.shape[1]} is not 1 to 8 bits of {width} inputs each"
        )
    if bits not in (4, 8):
        weight, scales, biases = as_eight_bits(weight, scales, biases, bits)
    return PackedMatrix.plan(weight, scales, biases, width)


def _eight_bits(weights: Weights, module: str, shape: tuple[int, int]) -> AffineArrays:
    """Return a GGUF matrix, whose type has no kernel and no 4-bit or 8-bit codes, with codes of 8 bits,
    scales and biases, because C kernels exist only for 4 and 8 bits."""
    stored = stored_matrix(weights, module)
    assert isinstance(stored, StoredMatrix)
    arrays = stored.eight_bits()
    release(stored.raw)
    _check(f"{module}.weight", (len(arrays[0]), 4 * arrays[0].shape[1]), shape)
    return arrays


def _blocks(weights: Weights, module: str, shape: tuple[int, int]) -> tuple[str, np.ndarray]:
    """Return the type and the GGUF blocks of a matrix whose type is in BLOCKS. Q3_K is converted to Q6_K,
    because Q3_K has no kernel of its own."""
    stored = stored_matrix(weights, module)
    assert isinstance(stored, StoredMatrix)
    raw, kind = stored.raw, stored.type
    _check(f"{module}.weight", (len(raw), raw.shape[1] // kind.nbytes * kind.block), shape)
    if kind.name in SUPER_BLOCKS:
        return kind.name, raw
    blocks = q3_k_as_q6_k(raw.reshape(-1, kind.nbytes))
    release(raw)
    return "Q6_K", blocks.reshape(len(raw), -1)


def _vector(weights: Weights, name: str, shape: tuple[int]) -> np.ndarray:
    value = np.array(weights[name], np.float32)
    _check(name, value.shape, shape)
    return value


def _check(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(got) != tuple(expected):
        raise CorruptFile(f"{name} has shape {list(got)}; its configuration says {list(expected)}")


def _check_names(weights: Weights, config: ModelConfig) -> None:
    """Raise CorruptFile if a tensor of the model is missing, or if the file has a tensor that the model does
    not use."""
    wanted = {f"{m}.weight" for m, _ in matrices(config)} | {name for name, _ in vectors(config)}
    scales = {name for name in weights if name.endswith((".scales", ".biases"))}
    missing = sorted(wanted - set(weights)) + sorted(_missing_partners(scales))
    surplus = sorted(
        set(weights) - wanted - {s for s in scales if f"{s.rpartition('.')[0]}.weight" in wanted}
    )
    if missing or surplus:
        what = f"{missing[0]} is missing" if missing else f"{surplus[0]} is not part of it"
        raise CorruptFile(
            f"the weights do not fit the model: {what} ({len(missing) + len(surplus)} such tensors)"
        )


def _missing_partners(scales: set[str]) -> Iterator[str]:
    for name in scales:
        module, _, kind = name.rpartition(".")
        other = f"{module}.{'biases' if kind == 'scales' else 'scales'}"
        if other not in scales:
            yield other

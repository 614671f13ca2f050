"""This module defines the BaseLoRA: a set of low-rank changes of any linear layers of a model. The background
loop (sona/background.py) trains a BaseLoRA. With the matrix W and the input x of a layer, the changed output
is

y = W x + scale * lora_b^T (lora_a^T x)        scale = alpha / rank       (Hu et al. 2021)

The embedding E [V, D] has a change, too: lora_a is [V, rank], lora_b is [rank, D], and the row of token t is

E[t] + scale * lora_a[t] lora_b

So the embedding is a linear layer whose input is 1 for the token and 0 for all other tokens. A model with
tied embeddings keeps the weights of its output head: only the rows that the first layer reads change.
"""

import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import AdapterMismatch, CorruptFile
from ..models.config.model import ModelConfig, ModelShape
from .quantised import Packed, pack_pair, unpack_pair

_OF_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODULES = (*_OF_LAYERS, "lm_head", "embed_tokens")
Place = tuple[str, int]  # (module, layer) of a matrix; lm_head and embed_tokens have layer 0
EMBEDDING: Place = ("embed_tokens", 0)
Pair = tuple[np.ndarray, np.ndarray]  # (lora_a [in, rank], lora_b [rank, out]); float32, contiguous
# The sums of the squared elements of a matrix [in, out]: (row sums [in], column sums [out]).
Squares = tuple[np.ndarray, np.ndarray]


class PackedPairs(Mapping[Place, Pair]):
    """The factors of a BaseLoRA with 4 bits per weight. Each access to a pair unpacks it into new float32
    arrays, which are the slow twin of the kernels that read the packed factors."""

    def __init__(self, packed: Mapping[Place, tuple[Packed, Packed]]):
        """packed: the factors by place, in the layouts of quantised.pack_pair."""
        self.packed = dict(packed)

    def __getitem__(self, place: Place) -> Pair:
        return unpack_pair(*self.packed[place])

    def __iter__(self) -> Iterator[Place]:
        return iter(self.packed)

    def __len__(self) -> int:
        return len(self.packed)


@dataclass(frozen=True)
class BaseLoRA:
    """The factors lora_a and lora_b of each changed linear layer. If the scale is 1, lora_b is already
    multiplied by alpha / rank, so that layers can have different ranks. The arrays never change after
    construction.

    pairs: the factors by place; PackedPairs, if they are in memory with 4 bits per weight
    """

    pairs: Mapping[Place, Pair]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The largest rank of any changed layer; 0 if no layer is changed."""
        return max((a.shape[1] for a, _ in self.pairs.values()), default=0)

    @cached_property
    def of_keys(self) -> str:
        """A hash of the changes of all layers below the output head; "" if these layers are not changed. Keys
        and values in KV caches depend on these changes, so the hash identifies the caches that this LoRA can
        use."""
        named = hashlib.blake2b(np.float32(self.scale).tobytes(), digest_size=16)
        below = [place for place in sorted(self.pairs) if place[0] != "lm_head"]
        for place in below:
            a, b = self.pairs[place]
            named.update(f"{place} {a.shape}".encode() + a.tobytes() + b.tobytes())
        return named.hexdigest() if below else ""

    @property
    def parts(self) -> Mapping[Place, Pair | tuple[Packed, Packed]]:
        """The factors as they are in memory: Packed matrices or float32 arrays."""
        return self.pairs.packed if isinstance(self.pairs, PackedPairs) else self.pairs

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.parts.values())

    def to_4_bits(self) -> "BaseLoRA":
        """Return this LoRA with 4 bits per weight, or this LoRA itself if it has 4 bits. Raises CorruptFile
        if a pair holds NaN or Inf."""
        if isinstance(self.pairs, PackedPairs):
            return self
        try:
            return replace(self, pairs=PackedPairs({p: pack_pair(pair) for p, pair in self.pairs.items()}))
        except ValueError as e:
            raise CorruptFile(_NOT_FINITE.format("")) from e

    def select_places(self, places: Mapping[Place, Place]) -> "BaseLoRA | None":
        """Return the change of some places, with the same bits; None if none of them is changed. places:
        {place here: place in the result}."""
        found = {new: self.parts[old] for old, new in places.items() if old in self.parts}
        return replace(self, pairs=_as_pairs(found)) if found else None

    def to_bytes(self) -> bytes:
        """Encode this LoRA. The factors keep their bits. Of the embedding's lora_a [V, rank], only the rows
        that are not 0 are stored (a row of -0.0 comes back as 0): training changes only the rows of the
        tokens that it saw. Factors with 4 bits are stored whole."""
        out = io.BytesIO()
        arrays: dict[str, Any] = {"scale": np.float32(self.scale)}
        for (module, layer), (a, b) in self.parts.items():
            name = f"{layer}.{module}"
            if isinstance(a, Packed) and isinstance(b, Packed):
                arrays[f"{name}.widths"] = np.array([a.n, b.n])
                a, b = a.to_words(), b.to_words()
            elif (module, layer) == EMBEDDING and isinstance(a, np.ndarray):
                rows = np.flatnonzero(a.any(axis=1)).astype(np.int32)
                arrays |= {f"{name}.rows": rows, f"{name}.height": len(a)}
                a = a[rows]
            arrays |= {f"{name}.a": a, f"{name}.b": b}
        np.savez(out, **arrays)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "BaseLoRA":
        """Decode a stored BaseLoRA. Raises CorruptFile if the data is damaged."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                arrays = {k: f[k] for k in f.files}
            scale = np.float32(arrays.pop("scale")).item()
            is_packed = any(name.endswith(".widths") for name in arrays)
            parts: dict[Place, Any] = {}
            for name in arrays:
                layer, module, factor = name.split(".")
                if factor == "a":
                    parts[module, int(layer)] = _stored_parts(arrays, f"{layer}.{module}", is_packed)
        except (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as e:
            raise CorruptFile("the stored base adapter is damaged; `ruvmlx learn rollback` goes back.") from e
        return cls(_as_pairs(parts), scale)

    def shrunk(self, factor: float) -> "BaseLoRA":
        """Return this change of weights multiplied by `factor`. The new scale is rounded to float32, because
        files store the scale in float32."""
        return BaseLoRA(self.pairs, float(np.float32(self.scale * factor)))

    def check(self, config: ModelShape) -> None:
        """Raise AdapterMismatch if a pair (lora_a, lora_b) does not fit its linear layer of the model, and
        CorruptFile if a pair holds NaN or Inf."""
        for (module, layer), (a, b) in self.pairs.items():
            shape = place_shape(config, module, layer)
            if shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
                raise AdapterMismatch(
                    f"the adapter changes {module} of layer {layer} by {a.shape} and {b.shape}; "
                    f"the model's has (inputs, outputs) {shape}. Load the adapter's own model."
                )
            if not (np.isfinite(a).all() and np.isfinite(b).all()):
                raise CorruptFile(_NOT_FINITE.format(f" in {module} of layer {layer}"))


_NOT_FINITE = "the adapter holds NaN or Inf{}; `ruvmlx learn rollback` goes back."


def _stored_parts(arrays: Mapping[str, np.ndarray], name: str, is_packed: bool) -> tuple:
    """Return the two factors of the place `name` from the arrays of a stored BaseLoRA."""
    a, b = arrays[f"{name}.a"], arrays[f"{name}.b"]
    if is_packed:
        n_in, n_out = arrays[f"{name}.widths"].tolist()
        return Packed.from_words(a, n_in), Packed.from_words(b, n_out)
    if name == f"{EMBEDDING[1]}.{EMBEDDING[0]}":
        whole = np.zeros((int(arrays[f"{name}.height"]), a.shape[1]), np.float32)
        whole[arrays[f"{name}.rows"]] = a
        a = whole
    return np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32)


def _as_pairs(parts: Mapping[Place, Any]) -> Mapping[Place, Pair]:
    """Return factors in the form of `BaseLoRA.parts` as the `pairs` of a BaseLoRA."""
    return PackedPairs(parts) if any(isinstance(a, Packed) for a, _ in parts.values()) else parts


def missing_modules(config: ModelShape) -> frozenset[str]:
    """Return the modules of MODULES that the layers of this model do not have."""
    gated = not isinstance(config, ModelConfig) or config.gated_mlp
    return frozenset() if gated else frozenset({"gate_proj"})


def place_shape(config: ModelShape, module: str, layer: int) -> tuple[int, int] | None:
    """Return (number of inputs, number of outputs) of a linear layer; None if an adapter cannot change this
    linear layer, because the model does not have it or because mlx-lm's code runs the model (then only
    lm_head can change). The embedding has an input for each token. module: one of MODULES."""
    c, d = config, config.hidden_size
    if module == "lm_head":
        return (d, c.vocab_size) if layer == 0 else None
    if not isinstance(c, ModelConfig):
        return None
    if module == "embed_tokens":
        return (c.vocab_size, d) if layer == 0 else None
    q, kv, ffn = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.intermediate_size
    shapes = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    shapes |= {"gate_proj": (d, ffn), "up_proj": (d, ffn), "down_proj": (ffn, d)}
    there = 0 <= layer < c.n_layers and module not in missing_modules(c)
    return shapes.get(module) if there else None

"""BaseLoRA: low-rank changes of any linear layers, what the background loop trains.

y = W x + scale * lora_b^T (lora_a^T x)        scale = alpha / rank       (Hu et al. 2021)
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import CorruptFile

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
Place = tuple[str, int]  # module, layer; the layer of lm_head is 0
Pair = tuple[np.ndarray, np.ndarray]  # lora_a [in, rank], lora_b [rank, out]; float32, contiguous


@dataclass(frozen=True)
class BaseLoRA:
    """pairs: the changed layers. alpha is absorbed when scale is 1: ranks may differ from layer to layer.

    Arrays are never written after construction.
    """

    pairs: Mapping[Place, Pair]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max((a.shape[1] for a, _ in self.pairs.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values())

    def to_bytes(self) -> bytes:
        out, arrays = io.BytesIO(), {"scale": np.float32(self.scale)}
        for (module, layer), (a, b) in self.pairs.items():
            arrays |= {f"{layer}.{module}.a": a, f"{layer}.{module}.b": b}
        np.savez(out, **arrays)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "BaseLoRA":
        """Read back; CorruptFile if damaged."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                arrays = {k: np.ascontiguousarray(f[k], np.float32) for k in f.files}
            scale = arrays.pop("scale").item()
            pairs = {}
            for name in arrays:
                layer, module, factor = name.split(".")
                if factor == "a":
                    pairs[module, int(layer)] = (arrays[name], arrays[f"{layer}.{module}.b"])
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
            raise CorruptFile("the stored base adapter is damaged; `ruvmlx learn rollback` goes back.") from e
        return cls(pairs, scale)

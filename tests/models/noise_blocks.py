"""Blocks of noise for every packed type of GGUF: for shapes and speeds, and where no quantiser is at hand."""

import numpy as np

from ruvmlx.models.files.gguf_blocks import dequantise_blocks
from ruvmlx.models.files.gguf_types import ROWS, TensorType

BY_NAME = {row.name: row for row in ROWS}


def noise_blocks(name: str, n: int, spread: float, seed: int = 0) -> np.ndarray:
    """uint8 [n, bytes of a block]: weights of mean 0 (nearly) and this standard deviation."""
    kind, rng = BY_NAME[name], np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n, kind.nbytes), np.uint8)
    sizes = rng.uniform(0.5, 1.5, n)
    _scale(blocks, kind, sizes / 1024)
    found = dequantise_blocks(blocks, kind, "noise").std()
    _scale(blocks, kind, sizes / 1024 * spread / found)
    return blocks


def _scale(blocks: np.ndarray, kind: TensorType, sizes: np.ndarray) -> None:
    """Give each block its scale, and the lowest weight that balances its codes."""
    if kind.name == "MXFP4":
        blocks[:, 0] = 128 + np.rint(np.log2(sizes))
        return
    if kind.name == "Q8_K":
        blocks[:, :4] = sizes.astype("<f4")[:, None].view(np.uint8)
        return
    middle = (2**kind.bits - 1) / 2 * (-1 if kind.name.endswith("_1") else 1)
    for at, factor in zip(kind.halves, (1.0, middle), strict=False):
        blocks[:, at : at + 2] = (factor * sizes).astype("<f2")[:, None].view(np.uint8)

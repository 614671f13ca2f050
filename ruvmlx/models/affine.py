"""Quantised weights in MLX's affine layout: w = scale * q + bias, both per group of inputs."""

import numpy as np

from ..errors import CorruptFile


def dequantise(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, width: int) -> np.ndarray:
    """w = scale * q + bias: uint32 [out, width * bits / 32], scales and biases [out, width / group_size].

    Value i of a row is bits i * bits ... i * bits + bits - 1 of the row's bit string, low bit first.
    """
    bits, rest = divmod(32 * packed.shape[1], width)
    if rest or width % scales.shape[1]:
        raise CorruptFile(
            f"{packed.shape[1]} packed words and {scales.shape[1]} scales do not fit {width} inputs"
        )
    stream = np.unpackbits(packed.astype("<u4").view(np.uint8), axis=1, bitorder="little")
    digits = stream.reshape(len(packed), width, bits)
    q = np.zeros((len(packed), width), np.float32)
    for b in range(bits):
        q += digits[..., b] * np.float32(1 << b)
    group = width // scales.shape[1]
    wide = [np.repeat(np.asarray(a, np.float32), group, axis=1) for a in (scales, biases)]
    return wide[0] * q + wide[1]

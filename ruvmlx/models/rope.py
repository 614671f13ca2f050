"""Llama-3 rope scaling, from its parameters to the per-frequency factors and back.

GGUF files keep only the factors (`rope_freqs.weight`, [head_dim / 2], what each frequency is divided by).
With x_i = frequency_i / 2 pi, "high" and "low" the two factors, and n the original context:

    s_i = clip((n x_i - low) / (high - low), 0, 1)        1 / f_i = (1 - s_i) / factor + s_i

(n, low, high) may be scaled together without a change, so low = 1 (Meta's own choice) loses nothing.
"""

import numpy as np

from .model import Llama3Rope

TOLERANCE = 1e-3  # relative; the factors are stored as float32


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Unscaled rope frequencies in radians per token: [head_dim / 2]."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def llama3_divisors(scaling: Llama3Rope, head_dim: int, theta: float) -> np.ndarray:
    """What Llama-3 scaling divides each frequency by: [head_dim / 2], from 1 to `factor`."""
    x = frequencies(head_dim, theta) / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    s = np.clip((scaling.original_max_position * x - low) / (high - low), 0, 1)
    return 1 / ((1 - s) / scaling.factor + s)


def llama3_from_divisors(divisors: np.ndarray, theta: float) -> Llama3Rope | None:
    """The scaling behind stored divisors, or None when there is no such scaling."""
    f = np.asarray(divisors, np.float64)
    if not (np.isfinite(f).all() and f.min() > 0 and f.max() > 1):
        return None
    factor = float(f.max())
    for scaling in (Llama3Rope(factor, 1.0, 4.0, 8192), _fit(f, factor, theta)):
        if scaling and np.allclose(llama3_divisors(scaling, 2 * len(f), theta), f, rtol=TOLERANCE):
            return scaling
    return None


def _fit(f: np.ndarray, factor: float, theta: float) -> Llama3Rope | None:
    """Line through the blended frequencies: s_i = a x_i - b, then low = 1, high = 1 + 1/b, n = a / b."""
    s = (1 / f - 1 / factor) / (1 - 1 / factor)
    blended = (s > 1e-4) & (s < 1 - 1e-4)
    if blended.sum() < 2:
        return None
    a, minus_b = np.polyfit(frequencies(2 * len(f), theta)[blended] / (2 * np.pi), s[blended], 1)
    if not (a > 0 and minus_b < 0):
        return None
    return Llama3Rope(factor, 1.0, round(float(1 - 1 / minus_b), 4), round(float(-a / minus_b)))

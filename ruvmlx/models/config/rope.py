"""This module computes RoPE's frequencies and attention factor from a model's configuration. The module also
computes the parameters of Llama-3's RoPE scaling from divisors, because GGUF files store only the number by
which the scaling divides each frequency.

GGUF files store the divisor f_i of each frequency (`rope_freqs.weight`, [head_dim / 2]). Let x_i be
frequency_i / 2 pi, low and high Llama-3's two factors, and n the original context:

    s_i = clip((n x_i - low) / (high - low), 0, 1)        1 / f_i = (1 - s_i) / factor + s_i

If n, low and high are multiplied by the same number, the divisors do not change. The module can therefore
assume low = 1, which is also Meta's choice.
"""

import math
from typing import NamedTuple

import numpy as np

from .model import ModelConfig, QueryScale
from .rope_scaling import DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope

# the allowed relative error between stored divisors (float32) and computed divisors
TOLERANCE = 1e-3


class Rope(NamedTuple):
    """The parameters of RoPE, the rotation of queries and keys.

    frequencies: the rotation of each pair of numbers in radians per position, float64 [turned_dims / 2]
    factor: the number by which the rotated queries and keys are multiplied
    """

    frequencies: np.ndarray
    factor: float


def rope(config: ModelConfig, context: int | None = None) -> Rope:
    """Return RoPE for a maximum context. context: a number of tokens; None: the model's max_context.

    The frequencies of the scalings dynamic and longrope depend on the context. For dynamic, transformers and
    mlx-lm change the frequencies while a text grows beyond max_context. ruvmlx uses the frequencies of the
    maximum context from the first token on. (If the maximum context is at most max_context, the frequencies
    of all three programs are equal.) For longrope, mlx-lm always uses the divisors `long_factor`, and
    transformers uses the divisors for the current length of the text. ruvmlx chooses between short_factor and
    long_factor once, by the maximum context.
    """
    dims, scaling = config.turned_dims, config.rope_scaling
    f = frequencies(dims, config.rope_theta)
    longest = max(context or 0, config.max_context)
    match scaling:
        case None:
            return Rope(f, 1.0)
        case LinearRope():
            return Rope(f / scaling.factor, 1.0)
        case DynamicRope():
            return Rope(frequencies(dims, _ntk_theta(config, scaling.factor, longest)), 1.0)
        case Llama3Rope():
            return Rope(f / llama3_divisors(scaling, dims, config.rope_theta), 1.0)
        case YarnRope():
            keep = _yarn_kept(scaling, dims, config.rope_theta)
            return Rope(keep * f + (1 - keep) * f / scaling.factor, scaling.attention_factor)
        case LongRope():
            longer = (context or config.max_context) > scaling.original_max_position
            divisors = scaling.long_factor if longer else scaling.short_factor
            return Rope(f / np.array(divisors), scaling.attention_factor)


def frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return RoPE's frequencies without scaling, in radians per position: [head_dim / 2]."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def query_scales(scale: QueryScale, positions: np.ndarray) -> np.ndarray:
    """Return the factor of the query at each position: float32 [n] for n positions."""
    spans = np.floor(np.asarray(positions) / scale.original_max_position)
    return (1 + scale.beta * np.log1p(spans)).astype(np.float32)


def _ntk_theta(config: ModelConfig, factor: float, context: int) -> float:
    """Return the theta of dynamic NTK scaling, theta * (factor * n / max_context - factor + 1)^(d / (d - 2)).

    n: the context in tokens. d: the number of dimensions that RoPE rotates."""
    stretch = factor * context / config.max_context - factor + 1
    return config.rope_theta * stretch ** (config.turned_dims / max(1, config.turned_dims - 2))


def _yarn_kept(scaling: YarnRope, head_dim: int, theta: float) -> np.ndarray:
    """Return, for each pair of dimensions, the weight that YaRN gives to the unchanged frequency: [head_dim /
    2]. The weight is 1 for pairs that rotate fast, 0 for pairs that rotate slowly, and falls linearly with
    the index of the pairs between.

    The pair with index d ln(n / (2 pi r)) / (2 ln theta) makes r rotations over the original context of n
    tokens; d is head_dim. (Peng et al. 2023)
    """

    def pair(rotations: float) -> float:
        turns = scaling.original_max_position / (2 * math.pi * rotations)
        return head_dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair(scaling.beta_fast)), 0)
    high = min(math.ceil(pair(scaling.beta_slow)), head_dim - 1)
    width = high - low or 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)


def llama3_divisors(scaling: Llama3Rope, head_dim: int, theta: float) -> np.ndarray:
    """Return Llama-3's divisor of each frequency: [head_dim / 2], from 1 to `factor`."""
    x = frequencies(head_dim, theta) / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    s = np.clip((scaling.original_max_position * x - low) / (high - low), 0, 1)
    return 1 / ((1 - s) / scaling.factor + s)


def llama3_from_divisors(divisors: np.ndarray, theta: float) -> Llama3Rope | None:
    """Return Llama-3's parameters that give the stored divisors within TOLERANCE. Return None if neither
    Meta's usual parameters nor the parameters of `_fit` give these divisors."""
    f = np.asarray(divisors, np.float64)
    if not (np.isfinite(f).all() and f.min() > 0 and f.max() > 1):
        return None
    factor = float(f.max())
    for scaling in (Llama3Rope(factor, 1.0, 4.0, 8192), _fit(f, factor, theta)):
        if scaling and np.allclose(llama3_divisors(scaling, 2 * len(f), theta), f, rtol=TOLERANCE):
            return scaling
    return None


def _fit(f: np.ndarray, factor: float, theta: float) -> Llama3Rope | None:
    """Fit the line s_i = a x_i - b to the pairs with 0 < s_i < 1, and return Llama-3's parameters: low = 1,
    high = 1 + 1/b, original context a / b. Return None if fewer than two pairs are in this range, or if a or
    b is not positive."""
    s = (1 / f - 1 / factor) / (1 - 1 / factor)
    blended = (s > 1e-4) & (s < 1 - 1e-4)
    if blended.sum() < 2:
        return None
    a, minus_b = np.polyfit(frequencies(2 * len(f), theta)[blended] / (2 * np.pi), s[blended], 1)
    if not (a > 0 and minus_b < 0):
        return None
    return Llama3Rope(factor, 1.0, round(float(1 - 1 / minus_b), 4), round(float(-a / minus_b)))

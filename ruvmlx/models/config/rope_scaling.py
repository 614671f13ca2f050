"""The ways to stretch RoPE for longer contexts, as a model's files describe them. rope.py computes them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearRope:
    """Every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """NTK-aware: theta grows for contexts beyond the model's own."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama-3's scaling: low frequencies are stretched by `factor`, high ones are kept, those between are
    blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnRope:
    """Like Llama-3's, but blended by a line over the pairs. Queries and keys are multiplied by
    attention_factor."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0  # a pair with at least this many rotations over the original context is kept
    beta_slow: float = 1.0  # a pair with at most this many rotations is stretched


@dataclass(frozen=True)
class LongRope:
    """Each pair has its own divisor. Queries and keys are multiplied by attention_factor."""

    original_max_position: int
    attention_factor: float
    short_factor: tuple[float, ...]  # [head_dim / 2], for contexts up to the original one
    long_factor: tuple[float, ...]


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope

"""This module defines the parameters of the RoPE scalings for long contexts that ruvmlx supports. rope.py
computes the frequencies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearRope:
    """Linear scaling: every frequency of RoPE is divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """Dynamic NTK scaling: RoPE's theta is larger if the context is longer than the model's max_context."""

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Llama-3's scaling: low frequencies are divided by `factor`, high frequencies do not change, and each
    frequency between low and high is a weighted mean of its unchanged and its divided value."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN's scaling: like Llama-3's scaling, but the weights of the mean change linearly with the index of
    the rotated pair of dimensions. Queries and keys are multiplied by attention_factor."""

    factor: float
    original_max_position: int
    attention_factor: float
    # pairs of dimensions with more than beta_fast rotations over the original context keep their frequency
    beta_fast: float = 32.0
    # pairs with fewer than beta_slow rotations over the original context: the frequency is divided by
    # `factor`
    beta_slow: float = 1.0


@dataclass(frozen=True)
class LongRope:
    """LongRoPE's scaling: each frequency has its own divisor. Queries and keys are multiplied by
    attention_factor."""

    original_max_position: int
    attention_factor: float
    # [head_dim / 2], the divisors of the frequencies for contexts up to original_max_position
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope

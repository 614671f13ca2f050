"""This module leaves out random inputs of the trained LoRA factors, so that training depends less on single
inputs (dropout, Srivastava et al. 2014).

For one text, a mask of each matrix keeps an input with the probability 1 - rate. With the mask m [in], whose
numbers are 0 and 1, the change of the matrix is

    scale * ((m / (1 - rate) * lora_a) lora_b)        instead of        scale * (lora_a lora_b)

so the mean over masks is the change without dropout. All tokens of a text have the same mask (Gal and
Ghahramani 2016). So dropout is a change of lora_a, and the gradient with respect to lora_a is multiplied by
the same numbers. The masks depend only on the seed, so a run that was stopped continues with the same masks.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from ..lora.base_lora import BaseLoRA, Pair, Place

Masks = dict[Place, np.ndarray]  # {place: [in, 1] float32, 0 or 1 / (1 - rate)}


def draw_masks(base: BaseLoRA, rate: float, seed: Sequence[int]) -> Masks:
    """Return the masks of one text. seed: numbers, 0 or more, that name the text and the step.

    rate: the share of the inputs that are left out, 0 to below 1, else ValueError; at 0, there are no masks
    """
    if not 0 <= rate < 1:
        raise ValueError(f"the rate of a dropout is {rate}, must be 0 to below 1")
    if rate == 0:
        return {}
    rng, share = np.random.default_rng([*seed]), np.float32(1 / (1 - rate))
    return {p: (rng.random((base.pairs[p][0].shape[0], 1)) >= rate) * share for p in sorted(base.pairs)}


def leave_out(pairs: Mapping[Place, Pair], masks: Masks) -> dict[Place, Pair]:
    """Return the pairs with lora_a multiplied by the masks; pairs without a mask stay. For gradients with
    respect to the masked factors, the result is the gradient with respect to the factors themselves."""
    return {p: (a * masks[p], b) if p in masks else (a, b) for p, (a, b) in pairs.items()}

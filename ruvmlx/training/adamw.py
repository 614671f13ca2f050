"""This module is the AdamW optimiser for the factors lora_a and lora_b of a BaseLoRA. The state of a training
can be stored and resumed. For a weight w with gradient g, moments m and v, and learning rate lr, step t is

    m = b1 m + (1 - b1) g      v = b2 v + (1 - b2) g^2
    w -= lr (m' / (sqrt(v') + eps) + decay w),   m' = m / (1 - b1^t),   v' = v / (1 - b2^t)

(Loshchilov & Hutter 2019). The optimiser uses NumPy and float32, because the factors are small and NumPy
works with every backend.
"""

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..lora.base_lora import BaseLoRA, Pair, Place
from ..pausing import Pause

BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01
Pairs = dict[Place, Pair]


def norm(grads: Mapping[Place, Pair]) -> float:
    """Return the Euclidean norm of the gradients of all matrices together."""
    return float(np.sqrt(sum(np.vdot(g, g) for pair in grads.values() for g in pair)))


def _next_weights(
    w: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, lr: float, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weights w and the moments m and v after one optimiser step with the gradient g."""
    m = m + (1 - BETA1) * (g - m)
    v = v + (1 - BETA2) * (g * g - v)
    mean, square = m / (1 - BETA1**step), v / (1 - BETA2**step)
    return w - lr * (mean / (np.sqrt(square) + EPS) + DECAY * w), m, v


@dataclass
class Training:
    """The state of a training run.

    pairs: the trained factors (lora_a, lora_b) of each matrix
    scale: alpha / rank, the factor of lora_a lora_b
    step: the number of optimiser steps so far
    facts: data of the background loop that is stored together with this state
    mean, square: for each factor, the running mean m of its gradient and the running mean v of the squared
        gradient
    """

    pairs: Pairs
    scale: float
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    mean: Pairs = field(default_factory=dict)
    square: Pairs = field(default_factory=dict)

    def __post_init__(self) -> None:
        for moment in (self.mean, self.square):
            for place, (a, b) in self.pairs.items():
                moment.setdefault(place, (np.zeros_like(a), np.zeros_like(b)))

    @property
    def base(self) -> BaseLoRA:
        """A copy of the trained factors as a BaseLoRA. Later optimiser steps do not change the copy."""
        return BaseLoRA({p: (a.copy(), b.copy()) for p, (a, b) in self.pairs.items()}, self.scale)

    def update(
        self, grads: Mapping[Place, Pair], lr: float, clip: float, pause: Pause = lambda: None
    ) -> None:
        """Make one optimiser step against the gradients of the loss.

        grads: the gradients of the loss; they are scaled down if their norm exceeds `clip`
        lr: the learning rate
        pause: a function that is called after each matrix; if it raises an exception, no weight is changed
        """
        cut, moved = np.float32(min(1.0, clip / max(norm(grads), 1e-12))), {}
        for place, pair in grads.items():
            now = zip(self.pairs[place], self.mean[place], self.square[place], pair, strict=True)
            moved[place] = [_next_weights(w, m, v, g * cut, lr, self.step + 1) for w, m, v, g in now]
            pause()
        self.step += 1
        for place, (of_a, of_b) in moved.items():
            both = zip(of_a, of_b, strict=True)
            self.pairs[place], self.mean[place], self.square[place] = both

    def to_bytes(self) -> bytes:
        arrays: dict[str, Any] = {"scale": np.float32(self.scale), "step": self.step}
        arrays["facts"] = np.frombuffer(json.dumps(self.facts).encode(), np.uint8)
        for kind, pairs in (("w", self.pairs), ("m", self.mean), ("v", self.square)):
            for (module, layer), (a, b) in pairs.items():
                arrays |= {f"{kind}.{layer}.{module}.a": a, f"{kind}.{layer}.{module}.b": b}
        out = io.BytesIO()
        np.savez(out, **arrays)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, pause: Pause = lambda: None) -> "Training | None":
        """Decode the state of a training from the result of `to_bytes`. Return None if the data is damaged.
        `pause` can raise an exception to stop."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                arrays: dict[str, Any] = {}
                for k in f.files:
                    arrays[k] = f[k]
                    pause()
            facts = json.loads(arrays.pop("facts").tobytes())
            scale, step = float(arrays.pop("scale")), int(arrays.pop("step"))
            pairs: dict[str, Pairs] = {"w": {}, "m": {}, "v": {}}
            for name, array in arrays.items():
                kind, layer, module, factor = name.split(".")
                if factor == "a":
                    other = arrays[f"{kind}.{layer}.{module}.b"]
                    pairs[kind][module, int(layer)] = (array, other)
            return cls(pairs["w"], scale, step, facts, pairs["m"], pairs["v"])
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

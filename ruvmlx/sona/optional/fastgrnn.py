"""This module is FastGRNN, a small recurrent cell (Kusupati et al. 2018, NeurIPS). The router (router.py)
uses the cell to read the turns of a conversation.
    s = x W + h U                              the gate z and the candidate k both use s
    z = sigmoid(s + [x, h] G + b_z)            gate; the low-rank update G is not in the paper
    k = tanh(s + b_h)                          candidate for the next state
    h <- (zeta (1 - z) + nu) * k + z * h       zeta = sigmoid(zeta0), nu = sigmoid(nu0)

x is the vector of one turn, and h is the state. The cell's weights are drawn from a fixed seed and never
change; training changes only low-rank updates of U and G (router_lora.py). `backward` computes the gradients
of all parameters by backpropagation through time. `backward` uses float64, which is fast enough, because a
conversation has few turns and a state has 24 numbers. `step` is a slow and simple form of `forward` for one
turn of one conversation; tests compare the two.
"""

from dataclasses import dataclass, fields, replace
from functools import cache

import numpy as np

HIDDEN = 24  # the size of a state
ZETA0, NU0 = 1.0, -4.0  # the initial values of zeta0 and nu0, which are the paper's values
GATE_BIAS = -1.0  # the initial value of b_z; the gate z is then about 1/4, so the newest turn weighs most


@dataclass(frozen=True)
class FastGRNNCell:
    """The parameters of a cell in float64, for turns of size I and states of size H. The shapes are w [I, H],
    u [H, H], gate_w [I, H] and gate_u [H, H] (the two halves of G), bias_z [H], bias_h [H], zeta0 [], nu0
    []."""

    w: np.ndarray
    u: np.ndarray
    gate_w: np.ndarray
    gate_u: np.ndarray
    bias_z: np.ndarray
    bias_h: np.ndarray
    zeta0: np.ndarray
    nu0: np.ndarray

    @property
    def hidden_size(self) -> int:
        return len(self.u)


@dataclass(frozen=True)
class Tape:
    """The values that `forward` stores for `backward`. Each list has one item per turn.

    x: inputs; before: the states before the turn; z: gates; k: candidates; mask: 0 for padding, else 1
    """

    x: list[np.ndarray]
    before: list[np.ndarray]
    z: list[np.ndarray]
    k: list[np.ndarray]
    mask: list[np.ndarray]


@cache
def fresh(inputs: int, hidden: int = HIDDEN, seed: int = 0) -> FastGRNNCell:
    """Return a cell with random weights, which are the same on every machine. U is 0.9 times an orthogonal
    matrix, so that states do not quickly vanish or explode."""
    rng = np.random.Generator(np.random.PCG64(seed))
    w = rng.standard_normal((inputs, hidden)) / np.sqrt(inputs)
    u, _ = np.linalg.qr(rng.standard_normal((hidden, hidden)))
    bias_h = 0.1 * rng.standard_normal(hidden)
    return FastGRNNCell(
        w, 0.9 * u, np.zeros_like(w), np.zeros_like(u), np.full(hidden, GATE_BIAS), bias_h,
        np.array(ZETA0), np.array(NU0),
    )  # fmt: skip


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), computed with tanh, which does not overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


def step(cell: FastGRNNCell, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Return the state [H] after one turn of one conversation. x: [I], the turn; h: [H], the state before the
    turn."""
    s = x @ cell.w + h @ cell.u
    z = sigmoid(s + x @ cell.gate_w + h @ cell.gate_u + cell.bias_z)
    k = np.tanh(s + cell.bias_h)
    return (sigmoid(cell.zeta0) * (1 - z) + sigmoid(cell.nu0)) * k + z * h


def pad_conversations(turns: list[np.ndarray], inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad N conversations [T_n, I] at the front to one array [N, T, I] of T turns. Return the array and a
    mask [N, T], which is 0 for padding and 1 for turns."""
    longest = max((len(t) for t in turns), default=0)
    x, mask = np.zeros((len(turns), longest, inputs)), np.zeros((len(turns), longest))
    for row, t in enumerate(turns):
        x[row, longest - len(t) :] = t
        mask[row, longest - len(t) :] = 1
    return x, mask


def forward(cell: FastGRNNCell, x: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, Tape]:
    """Return the states after the last turn, and the tape for `backward`: x [N, T, I], mask [N, T] -> [N, H].
    A turn with mask 0 does not change the state."""
    h = np.zeros((len(x), cell.hidden_size))
    tape = Tape([], [], [], [], [])
    zeta, nu = sigmoid(cell.zeta0), sigmoid(cell.nu0)
    for t in range(x.shape[1]):
        xt, m = x[:, t], mask[:, t, None]
        s = xt @ cell.w + h @ cell.u
        z = sigmoid(s + xt @ cell.gate_w + h @ cell.gate_u + cell.bias_z)
        k = np.tanh(s + cell.bias_h)
        for f, value in zip(fields(tape), (xt, h, z, k, m), strict=True):
            getattr(tape, f.name).append(value)
        h = m * ((zeta * (1 - z) + nu) * k + z * h) + (1 - m) * h
    return h, tape


def backward(cell: FastGRNNCell, tape: Tape, grad: np.ndarray) -> FastGRNNCell:
    """Return the gradient of a loss by every parameter of the cell. grad: [N, H], the gradient of the loss by
    the states after the last turn."""
    zeta, nu = sigmoid(cell.zeta0), sigmoid(cell.nu0)
    sums = {f.name: np.zeros_like(getattr(cell, f.name)) for f in fields(cell)}
    for x, h, z, k, m in zip(*(reversed(getattr(tape, f.name)) for f in fields(tape)), strict=True):
        new = grad * m
        sums["zeta0"] += np.sum(new * (1 - z) * k) * zeta * (1 - zeta)
        sums["nu0"] += np.sum(new * k) * nu * (1 - nu)
        at_k = new * (zeta * (1 - z) + nu) * (1 - k * k)
        at_z = new * (h - zeta * k) * z * (1 - z)
        both = at_k + at_z
        for name, left, right in (
            ("w", x, both), ("u", h, both), ("gate_w", x, at_z), ("gate_u", h, at_z),
        ):  # fmt: skip
            sums[name] += left.T @ right
        sums["bias_z"] += at_z.sum(axis=0)
        sums["bias_h"] += at_k.sum(axis=0)
        grad = grad * (1 - m) + new * z + both @ cell.u.T + at_z @ cell.gate_u.T
    return replace(cell, **sums)

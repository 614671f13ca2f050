"""Elastic weight consolidation (EWC) penalises changes to weights that earlier tasks depend on.
    penalty = strength / 2 * sum over anchors, matrices, i, j of F[i, j] (dW - dW*)[i, j]^2

dW = scale * lora_a lora_b is the base LoRA's change of a matrix [in, out]. An anchor is the base LoRA at the
end of a task (Kirkpatrick et al. 2017). dW* is the value of dW at an anchor. With A for lora_a and B for
lora_b, the factors (A Q, Q^-1 B) give the same change for any invertible Q, but the Fisher information of the
elements of A and B depends on Q. So F is the diagonal Fisher information of dW. The matrix F is never
computed as a whole:
    F[i, j] = rows[i] columns[j] / sum(rows),    rows[i] = mean sum_j G[i, j]^2,  columns[j] = mean sum_i ...

G = sum_t x_t g_t^T is the gradient of one liked reply's mean log-probability. A product of an input and an
output side is K-FAC's factorisation (Martens & Grosse 2015; as a penalty between tasks, Ritter et al. 2018),
here with a diagonal matrix on each side. Of all products of a row factor and a column factor, the product of
the row and column sums of F is the nearest to F in I-divergence (Shazeer & Stern 2018). "mean" is an
exponential mean over replies. Let P = [A | -A*] and Q = [B; B*], both with their scales. Then the sum in the
penalty is
    sum_ij F (dW - dW*)^2 = trace((P^T diag(rows) P) (Q diag(columns) Q^T)) / sum(rows)
at a cost of rank^2 per input and output. tests/sona/test_ewc.py compares this formula with full matrices.

The script tests/sona/ewc_sweep.py --seeds 1 --steps 8 measured the table below. The starter model learned two
tasks; the style of the second task contradicts the style of the first. The table shows the negative
log-likelihood (nll) of both tasks and the KL on texts without ratings, in nats, after the second task. Before
the second task, the nll was 3.228 (first) and 3.710 (second), and the KL 0.129. With replay, the second
training uses the ratings of the first task, too.

              without replay            with replay
    strength  first  second   KL        first  second   KL
    0         3.392   2.940  0.261      3.206   2.996  0.186
    1e3       3.391   2.940  0.261      3.205   2.997  0.185
    1e5       3.364   2.985  0.239      3.195   3.058  0.163
    1e7       3.254   3.357  0.172      3.222   3.448  0.108

EWC works, but replay alone keeps more of the first task and learns more of the second task. With replay, the
penalty worsens the second task more than it improves the first task. So EWC is off unless the user asks for
it (`learn consolidate --ewc`). The table was measured with one random seed. With another seed and slightly
different texts, no nll differed by more than 0.04.
"""

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CorruptFile
from ...lora.base_lora import BaseLoRA, Pair, Place, Squares
from ...pausing import Pause
from ..adapter_history import AdapterHistory

DECAY = 0.999  # the factor by which each reply lowers the weights of earlier replies in the exponential mean
FADE = 0.95  # the weight of the earlier of two merged anchors (gamma of online EWC)
TASKS = 10  # the maximum number of anchors


@dataclass
class Fisher:
    """An estimate of the Fisher information F.

    squares: for each matrix, the exponential sums over replies of (rows [in], columns [out]) of the squared
        gradients
    mass: the sum of the replies' weights in these sums
    examples: the number of replies
    """

    squares: dict[Place, Squares]
    mass: float = 0.0
    examples: int = 0

    def add(self, example: Mapping[Place, Squares]) -> None:
        """Add the squared gradient of one reply to the estimate."""
        for place, new in example.items():
            known = self.squares.setdefault(place, (np.zeros_like(new[0]), np.zeros_like(new[1])))
            for total, more in zip(known, new, strict=True):
                total += (1 - DECAY) * (more - total)
        self.mass += (1 - DECAY) * (1 - self.mass)
        self.examples += 1

    @property
    def finite(self) -> bool:
        """True if the estimate has no NaN and no Inf."""
        return all(np.isfinite(x).all() for sides in self.squares.values() for x in sides)

    def mean(self, place: Place) -> Squares:
        """Return the mean (rows [in], columns [out]) of one matrix over the replies so far. Call this
        function only after at least one reply was added."""
        rows, columns = self.squares[place]
        return rows / self.mass, columns / self.mass

    def then(self, later: "Fisher") -> "Fisher":
        """Return the estimate for two tasks together (online EWC, Schwarz et al. 2018): FADE * this estimate
        + the later estimate."""
        out: dict[Place, Squares] = {}
        for place in self.squares.keys() | later.squares.keys():
            parts = [
                (weight * rows, weight * columns)
                for fisher, weight in ((self, FADE), (later, 1.0))
                if place in fisher.squares
                for rows, columns in [fisher.mean(place)]
            ]
            out[place] = (sum(p[0] for p in parts), sum(p[1] for p in parts))  # type: ignore[assignment]
        return Fisher(dict(sorted(out.items())), 1.0, self.examples + later.examples)

    def to_bytes(self) -> bytes:
        facts = json.dumps({"mass": self.mass, "examples": self.examples}).encode()
        arrays = {"facts": np.frombuffer(facts, np.uint8)}
        for (module, layer), (rows, columns) in self.squares.items():
            arrays |= {f"{layer}.{module}.rows": rows, f"{layer}.{module}.columns": columns}
        out = io.BytesIO()
        np.savez(out, **arrays)  # type: ignore[arg-type]
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Fisher":
        """Decode a stored estimate of the Fisher information. Raises CorruptFile if the data is damaged."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                arrays = {k: f[k] for k in f.files}
            facts = json.loads(arrays.pop("facts").tobytes())
            squares = {}
            for name in arrays:
                layer, module, side = name.split(".")
                if side == "rows":
                    squares[module, int(layer)] = (arrays[name], arrays[f"{layer}.{module}.columns"])
            return cls(squares, float(facts["mass"]), int(facts["examples"]))
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
            raise CorruptFile("a stored Fisher estimate is damaged.") from e


@dataclass(frozen=True)
class Anchor:
    """The base LoRA at the end of a task, and the importance of its weights for that task. If the base LoRA
    does not change a matrix, dW* of this matrix is 0."""

    base: BaseLoRA
    fisher: Fisher


class EWC:
    """The EWC anchors of one adapter. This class implements the protocol of sona/weight_anchors.py."""

    limit = TASKS

    def __init__(self, history: AdapterHistory):
        self._history = history

    def ids(self) -> list[int]:
        return [row.id for row in self._history.deep.anchors()]

    def load(self) -> list[Anchor]:
        rows = self._history.deep.anchors()
        return [Anchor(self._history.base(row.base), Fisher.from_bytes(row.fisher)) for row in rows]

    def last_version(self) -> int:
        rows = self._history.deep.anchors()
        return rows[-1].version if rows else 0

    def new_importance(self) -> Fisher:
        return Fisher({})

    def read_importance(self, data: bytes) -> Fisher:
        """Decode a stored estimate of the Fisher information. Raises CorruptFile if the data is damaged."""
        return Fisher.from_bytes(data)

    def end_run(
        self,
        version: int,
        base: int,
        importance: Fisher | None,
        report: dict[str, Any],
        pruned: dict[str, str],
    ) -> bool:
        data = importance.to_bytes() if importance is not None else None
        return self._history.deep.end_run(version, base, data, report, pruned, TASKS, merge_estimates)

    def penalty(
        self, base: BaseLoRA, anchors: Sequence[Anchor], strength: float, pause: Pause | None = None
    ) -> tuple[float, dict[Place, Pair]]:
        """Return the result of the function `penalty` below: the penalty on the base LoRA's distance to the
        anchors, and the penalty's gradient."""
        return penalty(base, anchors, strength, pause)


def merge_estimates(earlier: bytes, later: bytes) -> bytes:
    """Merge two stored estimates of the Fisher information by `Fisher.then`."""
    return Fisher.from_bytes(earlier).then(Fisher.from_bytes(later)).to_bytes()


def penalty(
    base: BaseLoRA,
    anchors: Sequence[Anchor],
    strength: float,
    pause: Pause | None = None,
) -> tuple[float, dict[Place, Pair]]:
    """Return the EWC penalty and the penalty's gradient by the base LoRA's lora_a and lora_b.

    The gradient by dW is strength * F (dW - dW*). The chain rule gives the gradients by lora_a and lora_b. A
    matrix without an estimate of F, such as the output head, gets no penalty.
    """
    total, grads = 0.0, dict[Place, Pair]()
    for anchor in anchors:
        for place in anchor.fisher.squares.keys() & base.pairs.keys():
            value, pair = _of_place(base, anchor, place, strength)
            total += value
            known = grads.get(place)
            grads[place] = (known[0] + pair[0], known[1] + pair[1]) if known else pair
            if pause is not None:
                pause()
    return total, {place: _as_float32(pair) for place, pair in grads.items()}


def _of_place(base: BaseLoRA, anchor: Anchor, place: Place, strength: float) -> tuple[float, Pair]:
    """Return the EWC penalty of one matrix, and the penalty's gradient by lora_a and lora_b. The computation
    is in float64, because dW and dW* almost cancel near the anchor."""
    rows, columns = (x.astype(np.float64) for x in anchor.fisher.mean(place))
    weight = strength / rows.sum() if rows.sum() > 0 else 0.0
    a, b = (x.astype(np.float64) for x in base.pairs[place])
    p, q = a * base.scale, b
    if (before := anchor.base.pairs.get(place)) is not None:
        p = np.hstack([p, before[0] * -np.float64(anchor.base.scale)])
        q = np.vstack([q, before[1]])
    by_row, by_column = p * rows[:, None], q * columns
    value = weight / 2 * float(np.sum((p.T @ by_row) * (q @ by_column.T)))
    slope = base.scale * weight
    return max(0.0, value), (by_row @ (by_column @ b.T) * slope, (a.T @ by_row) @ by_column * slope)


def _as_float32(pair: Pair) -> Pair:
    return pair[0].astype(np.float32), pair[1].astype(np.float32)

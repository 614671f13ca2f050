"""This module defines the MicroLoRA: a rank-2 change of the output head, which is small enough that each
rating can update it. With the head W and a hidden state h, the changed logits are

    z = W h + scale * lora_b^T (lora_a^T h)        scale = alpha / rank       (Hu et al. 2021)

Only the output head changes, so the keys and values in KV caches stay valid after a rating.
"""

import io
import zipfile
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import AdapterMismatch, CorruptFile
from ..kernels import micro as kernels

RANK = 2
ALPHA = 4.0
# the significant bits of evidence: those of a float16, but with the exponents of a float32
EVIDENCE_BITS = 11
# weights are rounded to steps; 2^WEIGHT_BITS to 2^(WEIGHT_BITS + 1) steps lie between 0 and the largest
# weight of a row
WEIGHT_BITS = 12


@dataclass(frozen=True)
class MicroLoRA:
    """A rank-2 change of the output head. sona/instant.py explains evidence, gain and trend.

    lora_a: [D, r], float32, contiguous (D: hidden size, r: rank)
    lora_b: [r, V], float32, contiguous (V: vocabulary size)
    evidence: [3, r, A + k], sums over the ratings so far, for A movable tokens and k features
    gain: the factor by which lora_b was scaled down to keep the KL and the perplexity within their caps
    trend: above 0 if the latest ratings confirm the older ratings, below 0 if the latest ratings contradict
        the older ratings
    taste: [A], the part of lora_b's first row that the taste model adds at a gain of 1 (sona/taste_push.py);
        empty if the taste model adds nothing

    The arrays never change after construction. An update makes a new MicroLoRA, so a reply in progress keeps
    the weights with which it started.
    """

    lora_a: np.ndarray
    lora_b: np.ndarray
    evidence: np.ndarray = field(default_factory=lambda: np.zeros((3, 0, 0), np.float32))
    gain: float = 1.0
    trend: float = 0.0
    alpha: float = ALPHA
    taste: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @classmethod
    def fresh(cls, directions: np.ndarray, vocab_size: int, alpha: float = ALPHA) -> "MicroLoRA":
        """Return a new MicroLoRA with lora_a = directions [D, r]. The MicroLoRA changes nothing yet, because
        lora_b is zero."""
        a = np.ascontiguousarray(directions, np.float32)
        b = np.zeros((a.shape[1], vocab_size), np.float32)
        return cls(a, b, alpha=alpha)

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def nbytes(self) -> int:
        return self.lora_a.nbytes + self.lora_b.nbytes + self.evidence.nbytes + self.taste.nbytes

    @property
    def norm(self) -> float:
        """The Frobenius norm of scale * lora_a lora_b, computed without the large product [D, V]."""
        a, b = self.lora_a.astype(np.float64), self.lora_b.astype(np.float64)
        return self.scale * float(np.sqrt(max(0.0, np.sum((a.T @ a) * (b @ b.T)))))

    def add_to_logits(self, logits: np.ndarray, hidden: np.ndarray) -> None:
        """Add scale * (hidden @ lora_a) @ lora_b to logits [V] or [T, V], in place."""
        kernels.head_add(logits, hidden, self.lora_a, self.lora_b, self.scale)

    def shrunk(self, factor: float) -> "MicroLoRA":
        """Return a copy of the adapter. In the copy, `factor` multiplies lora_b and gain."""
        return replace(self, lora_b=self.lora_b * np.float32(factor), gain=self.gain * factor)

    def rounded_copy(self) -> "MicroLoRA":
        """Return a copy in which lora_b, evidence and taste have fewer significant bits, so that a version
        takes less room in the store after compression.

        A number of lora_b or taste changes by at most half a step of `row_steps`, a number of evidence by at
        most one part in 2^11.
        """
        steps = row_steps(self.lora_b)
        taste = row_steps(self.taste[None])[0]
        return replace(
            self,
            lora_b=np.rint(self.lora_b / steps) * steps,
            evidence=round_bits(self.evidence, EVIDENCE_BITS),
            taste=np.rint(self.taste / taste) * taste,
        )

    def to_bytes(self, **more: np.ndarray) -> bytes:
        """Encode the MicroLoRA as the bytes of a file. more: other arrays for the same file; their names
        contain a dot."""
        out = io.BytesIO()
        np.savez(
            out,
            lora_a=self.lora_a,
            lora_b=self.lora_b,
            evidence=self.evidence,
            gain=np.float64(self.gain),
            trend=np.float64(self.trend),
            alpha=np.float32(self.alpha),
            taste=self.taste,
            **more,  # type: ignore[arg-type]
        )
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes, hidden_size: int, vocab_size: int) -> "MicroLoRA":
        """Decode a stored MicroLoRA. Raises CorruptFile if the data is damaged or has NaN or Inf, and
        AdapterMismatch if the model has another hidden size or vocabulary size."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                arrays = {k: f[k] for k in f.files if "." not in k}
            alpha, gain, trend = (float(arrays.pop(name)) for name in ("alpha", "gain", "trend"))
            arrays = {k: np.ascontiguousarray(x, np.float32) for k, x in arrays.items()}
            adapter = cls(**arrays, gain=gain, trend=trend, alpha=alpha)
        except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as e:
            raise CorruptFile(
                "the stored adapter is damaged; `ruvmlx learn undo` goes back one version."
            ) from e
        adapter._check(hidden_size, vocab_size)
        return adapter

    def _check(self, hidden_size: int, vocab_size: int) -> None:
        if (self.lora_a.ndim, self.lora_b.ndim) != (2, 2):
            raise CorruptFile(
                "the stored adapter has matrices of a wrong shape; `ruvmlx learn undo` goes back one version."
            )
        (d, r), (r2, v) = self.lora_a.shape, self.lora_b.shape
        if (d, v) != (hidden_size, vocab_size) or r != r2:
            raise AdapterMismatch(
                f"the adapter is for hidden size {d} and {v} tokens; the model has {hidden_size} and "
                f"{vocab_size}. Start with --adapter none, or load the adapter's own model."
            )
        if not all(np.isfinite(w).all() for w in (self.lora_a, self.lora_b, self.evidence, self.taste)):
            raise CorruptFile(
                "the stored adapter holds NaN or Inf; `ruvmlx learn undo` goes back one version."
            )


def row_steps(rows: np.ndarray) -> np.ndarray:
    """Return the step to which `rounded_copy` rounds each row: [r, n] -> [r, 1], powers of 2."""
    return round_steps(np.abs(rows).max(axis=1, keepdims=True, initial=0))


def round_steps(largest: np.ndarray) -> np.ndarray:
    """Return the steps to which groups of weights are rounded, powers of 2. largest: the magnitude of each
    group's largest weight."""
    _, exponent = np.frexp(np.maximum(largest, np.float32(2**-100)))
    return np.ldexp(np.float32(1), exponent - 1 - WEIGHT_BITS)


def round_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Round float32 numbers to `bits` significant bits. Half of the last kept bit is added, then the bits
    after the last kept bit are set to 0."""
    low = 24 - bits
    words = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((words + np.uint32(1 << (low - 1))) & np.uint32(0xFFFFFFFF << low & 0xFFFFFFFF)).view(np.float32)


def stored_rank(data: bytes) -> int:
    """Return the rank of a stored MicroLoRA."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as f:
            return int(f["lora_a"].shape[1])
    except (ValueError, KeyError, EOFError, IndexError, zipfile.BadZipFile) as e:
        raise CorruptFile("the stored adapter is damaged; `ruvmlx learn undo` goes back one version.") from e

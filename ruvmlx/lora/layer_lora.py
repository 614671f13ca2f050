"""This module defines the LayerLoRA: a change of any linear layers of rank 1 or 2, which is small enough that
each rating can update it. With the matrix W and the input x of a layer, the changed output at rank 1 is

    y = W x + lora_b (lora_a . x)

At rank 2, a second term of the same form is added, with a lora_a of its own. lora_a [in] is calibrated once
and then never changes. On average over reference texts, the first lora_a . x is 1 in answers and 0 in prose
(sona/optional/layer_gradients.py), so lora_b [out] is added to the layer's outputs mostly in replies. The
second lora_a . x is 1 in the second halves of answers and 0 in their first halves. With a random lora_a,
lora_a . x would mostly depend on the topic of a reply. The lora_b of all changed matrices together is one
vector of n numbers; n is the sum of the output widths of all parts. So an update takes only a few vector
operations.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from ..errors import AdapterMismatch, CorruptFile
from ..models.config.model import ModelShape
from .base_lora import BaseLoRA, Pair, Place, place_shape
from .merge import merge_changes
from .micro_lora import EVIDENCE_BITS, MicroLoRA, round_bits, round_steps

# The curvature (LayerLoRA.curvature) before the first measurement. This value is large, because the matrices
# act together: the KL is much larger than the sum of the KL of each matrix.
CURVATURE = 60.0
_ARRAYS = ("lora_a", "lora_b", "evidence", "fisher")
_OF_PLACES = ("starts", "counts", "frame")
_PREFIX = "body."


@dataclass(frozen=True)
class LayerLoRA:
    """A change of some matrices. The arrays never change after construction. A matrix with a change of rank 2
    has two parts, one after the other.

    places: (module, layer) of the matrix of each part
    widths: (in, out) of each part
    lora_a: [sum of in], the lora_a of all parts, float32
    lora_b: [n], the lora_b of all parts, float32
    evidence: [2, n], the sums G and S over the ratings so far (sona/optional/layer_update.py)
    fisher: [n], the Fisher information of the original model's answers with respect to lora_b, per token
    tokens: N, the weighted number of tokens of the rated replies
    gain: the factor by which lora_b was scaled down to keep the estimated KL within its limit
    curvature: the last measured KL (or the KL that a measured rise of perplexity counts as), divided by
        `energy`
    """

    places: tuple[Place, ...]
    widths: tuple[tuple[int, int], ...]
    lora_a: np.ndarray
    lora_b: np.ndarray
    evidence: np.ndarray
    fisher: np.ndarray
    tokens: float = 0.0
    gain: float = 1.0
    curvature: float = CURVATURE

    @classmethod
    def fresh(cls, reads: Mapping[Place, np.ndarray], fisher: Mapping[Place, np.ndarray]) -> "LayerLoRA":
        """Return a layer LoRA that changes nothing yet. reads: the lora_a [in] or [in, rank] of each matrix.
        fisher: the Fisher information [out] or [rank, out] of each matrix."""
        parts = [
            (place, a, f)
            for place, of_matrix in reads.items()
            for a, f in zip(np.atleast_2d(of_matrix.T), np.atleast_2d(fisher[place]), strict=True)
        ]
        widths = tuple((a.size, f.size) for _, a, f in parts)
        n = sum(out for _, out in widths)
        a, f = _concatenate([a for _, a, _ in parts]), _concatenate([f for *_, f in parts])
        places = tuple(place for place, *_ in parts)
        return cls(places, widths, a, np.zeros(n, np.float32), np.zeros((2, n), np.float32), f)

    @cached_property
    def starts(self) -> np.ndarray:
        """The index in lora_b at which each part begins."""
        return np.cumsum([0, *(out for _, out in self.widths)])[:-1]

    @cached_property
    def counts(self) -> np.ndarray:
        """The length of each part of lora_b."""
        return np.array([out for _, out in self.widths])

    @cached_property
    def frame(self) -> int:
        """A checksum of places and lora_a. A gradient with respect to lora_b is valid only for layer LoRAs
        with the same checksum."""
        return zlib.crc32(self.lora_a.tobytes(), zlib.crc32(repr(self.places).encode()))

    @cached_property
    def moves(self) -> bool:
        """True if this LoRA changes any weight."""
        return bool(self.lora_b.any())

    @cached_property
    def energy(self) -> float:
        """1/2 sum F lora_b^2 (nats), with F the Fisher information. This number would be the KL per token if
        the elements of lora_b acted independently."""
        return 0.5 * float(np.dot(self.lora_b * self.fisher, self.lora_b))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    @cached_property
    def pairs(self) -> dict[Place, Pair]:
        """{place of a matrix: its factors (lora_a [in, rank], lora_b [rank, out])}."""
        ins, outs = (np.cumsum([w[i] for w in self.widths])[:-1] for i in (0, 1))
        parts = zip(self.places, np.split(self.lora_a, ins), np.split(self.lora_b, outs), strict=True)
        found = dict[Place, tuple[list[np.ndarray], list[np.ndarray]]]()
        for place, a, b in parts:
            columns, rows = found.setdefault(place, ([], []))
            columns.append(a)
            rows.append(b)
        return {place: (np.stack(a, axis=1), np.stack(b)) for place, (a, b) in found.items()}

    def flat(self, grads: Mapping[Place, Pair], scale: float) -> np.ndarray:
        """Return the gradient with respect to lora_b [n]. grads: the gradients with respect to the pairs of
        the LoRA that `combine_loras` made from this layer LoRA; the last rows of a pair's second factor
        are lora_b / scale."""
        ranks = {place: a.shape[1] for place, (a, _) in self.pairs.items()}
        return _concatenate([grads[p][1][-rank:].ravel() for p, rank in ranks.items()]) / np.float32(scale)

    def replace_fields(self, **new) -> "LayerLoRA":
        """Return a copy with new values of some fields. `new` must not have places, widths or lora_a. The
        copy keeps cached values that depend only on these three fields."""
        found = replace(self, **new)
        vars(found).update({name: vars(self)[name] for name in _OF_PLACES if name in vars(self)})
        return found

    def with_zero_b(self) -> "LayerLoRA":
        """Return a copy with lora_b = 0 and the same evidence, for use after lora_b was folded into the base
        LoRA."""
        return self.replace_fields(lora_b=np.zeros_like(self.lora_b), gain=1.0)

    def shrunk(self, factor: float) -> "LayerLoRA":
        """Return a copy of the LoRA. In the copy, `factor` multiplies lora_b and gain."""
        return self.replace_fields(lora_b=self.lora_b * np.float32(factor), gain=self.gain * factor)

    @cached_property
    def steps(self) -> np.ndarray:
        """The step to which `rounded_copy` rounds each number of lora_b: [n], one power of 2 for each
        part."""
        if not self.places:
            return np.zeros(0, np.float32)
        largest = np.maximum.reduceat(np.abs(self.lora_b), self.starts)
        return np.repeat(round_steps(largest), self.counts)

    def rounded_copy(self) -> "LayerLoRA":
        """Return a copy in which lora_b and evidence have fewer significant bits, so that a version takes
        less room in the store after compression.

        A number of lora_b changes by at most half of its step in `steps`, a number of evidence by at most one
        part in 2^11.
        """
        return self.replace_fields(
            lora_b=np.rint(self.lora_b / self.steps) * self.steps,
            evidence=round_bits(self.evidence, EVIDENCE_BITS),
        )

    def with_places_of(self, other: "LayerLoRA") -> "LayerLoRA":
        """Return a copy that also has the matrices of `other`, a fresh layer LoRA without evidence of
        ratings."""
        new: dict[str, Any] = {
            name: np.concatenate([getattr(self, name), getattr(other, name)], axis=-1) for name in _ARRAYS
        }
        return replace(self, places=self.places + other.places, widths=self.widths + other.widths, **new)

    # -- storage ---------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the layer LoRA as named arrays, which a file stores beside the arrays of a MicroLoRA."""
        found = {name: getattr(self, name) for name in _ARRAYS}
        found["places"] = np.array([f"{layer}.{module}" for module, layer in self.places])
        found["widths"] = np.array(self.widths, np.int64).reshape(-1, 2)
        found["facts"] = np.array([self.tokens, self.gain, self.curvature])
        return {_PREFIX + name: array for name, array in found.items()}

    @classmethod
    def from_arrays(cls, stored: Mapping[str, np.ndarray], config: ModelShape) -> "LayerLoRA | None":
        """Decode a layer LoRA from the arrays of a file; None if the file has no layer LoRA. Raises
        CorruptFile if the data is damaged, and AdapterMismatch if its matrices do not have the model's
        shapes."""
        found = {k.removeprefix(_PREFIX): x for k, x in stored.items() if k.startswith(_PREFIX)}
        if not found:
            return None
        try:
            named = [str(name).split(".") for name in found["places"]]
            widths = tuple((int(i), int(o)) for i, o in found["widths"])
            arrays = {name: np.ascontiguousarray(found[name], np.float32) for name in _ARRAYS}
            tokens, gain, curvature = map(float, found["facts"])
            places = tuple((module, int(layer)) for layer, module in named)
            a, b, evidence, fisher = (arrays[name] for name in _ARRAYS)
            new = cls(places, widths, a, b, evidence, fisher, tokens, gain, curvature)
        except (ValueError, KeyError, TypeError, IndexError) as e:
            raise CorruptFile(_DAMAGED) from e
        new._check(config)
        return new

    def _check(self, config: ModelShape) -> None:
        sizes = (sum(i for i, _ in self.widths),), (sum(o for _, o in self.widths),)
        shapes = self.lora_a.shape, self.lora_b.shape
        if shapes != sizes or self.fisher.shape != sizes[1] or self.evidence.shape != (2, *sizes[1]):
            raise CorruptFile(_DAMAGED)
        if len([place for place, _ in groupby(self.places)]) != len(set(self.places)):
            raise CorruptFile(_DAMAGED)  # the parts of a matrix do not follow each other
        facts = np.array([self.tokens, self.gain, self.curvature])
        if not all(np.isfinite(x).all() for x in (*(getattr(self, name) for name in _ARRAYS), facts)):
            raise CorruptFile(_DAMAGED)
        for (module, layer), width in zip(self.places, self.widths, strict=True):
            if place_shape(config, module, layer) != width:
                raise AdapterMismatch(
                    f"the adapter changes {module} of layer {layer}, (inputs, outputs) {width}; the model's "
                    f"has {place_shape(config, module, layer)}. Load the adapter's own model."
                )


def pack_adapter(micro: MicroLoRA, layer_lora: LayerLoRA | None) -> bytes:
    """Encode an adapter's MicroLoRA and layer LoRA as the bytes of one file."""
    return micro.to_bytes(**(layer_lora.arrays() if layer_lora else {}))


def unpack_layers(data: bytes, config: ModelShape) -> LayerLoRA | None:
    """Decode the layer LoRA from the result of `pack_adapter`; None if the adapter has no layer LoRA. Raises
    the errors of `LayerLoRA.from_arrays`."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as f:
            stored = {name: f[name] for name in f.files if name.startswith(_PREFIX)}
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
        raise CorruptFile(_DAMAGED) from e
    return LayerLoRA.from_arrays(stored, config)


_DAMAGED = "the stored adapter is damaged; `ruvmlx learn undo` goes back one version."


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts).astype(np.float32) if parts else np.zeros(0, np.float32)


def combine_loras(
    base: BaseLoRA | None, layer_lora: LayerLoRA | None, empty: bool = False
) -> BaseLoRA | None:
    """Return one LoRA with the changes of the base LoRA and of the layer LoRA. The factors of both are
    concatenated, so only the division of lora_b by the scale rounds. If the layer LoRA changes nothing and
    `empty` is False, the base LoRA itself is returned.

    empty: True to concatenate the factors even if the layer LoRA changes nothing, because gradients need them
    """
    if layer_lora is None or not (layer_lora.moves or empty):
        return base
    pairs, scale = dict(base.pairs if base else {}), base.scale if base else 1.0
    for place, (a, b) in layer_lora.pairs.items():
        b = b * np.float32(1 / scale)
        if place in pairs:
            a, b = np.hstack([pairs[place][0], a]), np.vstack([pairs[place][1], b])
        pairs[place] = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return BaseLoRA(pairs, scale)


def base_part(grads: Mapping[Place, Pair], base: BaseLoRA) -> dict[Place, Pair]:
    """Return the gradients with respect to the base LoRA's factors. grads: the gradients with respect to the
    factors of the LoRA that `combine_loras` made from this base LoRA."""
    ranks = {place: a.shape[1] for place, (a, _) in base.pairs.items()}
    return {p: (a[:, : ranks[p]], b[: ranks[p]]) for p, (a, b) in grads.items() if p in ranks}


def fold_layers(
    base: BaseLoRA, layer_lora: LayerLoRA | None, most: int, pause: Callable[[], None] = lambda: None
) -> BaseLoRA:
    """Return the base LoRA with the layer LoRA's change folded in.

    most: the maximum rank of a pair. If a pair's rank is below `most`, the rank grows by at most the rank of
        the layer LoRA's change. If a pair's rank is `most` or more, the rank does not grow, and the smallest
        singular directions of the sum are dropped.
    pause: a function that is called after each pair that is folded; it can raise an exception to stop
    """
    if layer_lora is None or not layer_lora.moves:
        return base
    pairs = dict(base.pairs)
    for place, (a, b) in layer_lora.pairs.items():
        if not b.any():
            continue
        old = pairs.get(place, (np.zeros((a.shape[0], 0), np.float32), np.zeros((0, b.shape[1]), np.float32)))
        rank = old[0].shape[1]
        kept = merge_changes(old, base.scale, (a, b), 1.0, max(rank, min(most, rank + b.shape[0]))).kept
        pairs[place] = kept[0], np.ascontiguousarray(kept[1] / np.float32(base.scale))
        pause()
    return replace(base, pairs=pairs)

"""A LayerLoRA is a rank-1 change of any linear layers, small enough for one rating to update it.

    y = W x + lora_b (lora_a . x)

lora_a [in] is calibrated once and never changes. On average lora_a . x is 1 in replies and 0 in plain prose
(sona/optional/layer_gradients.py), so lora_b [out] is added to the states of replies. With a random lora_a,
lora_a . x would mostly depend on the topic of a reply. The lora_b of all changed matrices together is one
vector of n numbers, where n is the sum of the output widths. So an update takes only a few vector operations.
"""

import io
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..errors import AdapterMismatch, CorruptFile
from ..models.config.model import ModelShape
from .base_lora import BaseLoRA, Pair, Place, place_shape
from .merge import merge_changes
from .micro_lora import MicroLoRA

# the curvature before the first measurement; KL is much more than a sum over matrices, which act together
CURVATURE = 60.0
_ARRAYS = ("lora_a", "lora_b", "evidence", "fisher")
_OF_PLACES = ("starts", "counts", "frame")
_PREFIX = "body."


@dataclass(frozen=True)
class LayerLoRA:
    """A rank-1 change of some matrices. Arrays are never changed after construction.
    sona/optional/layer_update.py explains the terms.

    places: the changed matrices
    widths: (in, out) of each matrix
    lora_a: [sum of in], float32
    lora_b: [n], float32
    evidence: [2, n]: G and S of the ratings so far
    fisher: [n], the Fisher information of the original model's answers, per token
    tokens: N, the weighted sum over the rated replies
    gain: the factor from theta to lora_b
    curvature: the last measured KL divided by its estimate `energy`
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
        """Return a layer LoRA that changes nothing yet. reads: lora_a [in] of each place. fisher: the Fisher
        information [out] of each place."""
        widths = tuple((a.size, fisher[place].size) for place, a in reads.items())
        n = sum(out for _, out in widths)
        a, f = (_concatenate(list(x.values())) for x in (reads, {place: fisher[place] for place in reads}))
        return cls(tuple(reads), widths, a, np.zeros(n, np.float32), np.zeros((2, n), np.float32), f)

    @cached_property
    def starts(self) -> np.ndarray:
        """The index in lora_b at which each matrix's part begins."""
        return np.cumsum([0, *(out for _, out in self.widths)])[:-1]

    @cached_property
    def counts(self) -> np.ndarray:
        """The length of each matrix's part of lora_b."""
        return np.array([out for _, out in self.widths])

    @cached_property
    def frame(self) -> int:
        """A checksum of places and lora_a. A gradient is valid only for adapters with the same frame."""
        return zlib.crc32(self.lora_a.tobytes(), zlib.crc32(repr(self.places).encode()))

    @cached_property
    def moves(self) -> bool:
        """True if this LoRA changes any weight."""
        return bool(self.lora_b.any())

    @cached_property
    def energy(self) -> float:
        """1/2 sum F lora_b^2 (nats): the KL per token if all elements of lora_b acted independently."""
        return 0.5 * float(np.dot(self.lora_b * self.fisher, self.lora_b))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in _ARRAYS)

    @cached_property
    def pairs(self) -> dict[Place, Pair]:
        """The factors of each place: (lora_a [in, 1], lora_b [1, out])."""
        ins, outs = (np.cumsum([w[i] for w in self.widths])[:-1] for i in (0, 1))
        parts = zip(self.places, np.split(self.lora_a, ins), np.split(self.lora_b, outs), strict=True)
        return {place: (a[:, None], b[None]) for place, a, b in parts}

    def flat(self, grads: Mapping[Place, Pair], scale: float) -> np.ndarray:
        """Return the gradient by lora_b [n], from the gradients by the pairs of `combine_loras`. In such a
        pair, the last row is lora_b / scale."""
        return _concatenate([grads[place][1][-1] for place in self.places]) / np.float32(scale)

    def replace_fields(self, **new) -> "LayerLoRA":
        """Return a copy with other values of some fields, but not of places, widths or lora_a. Cached values
        that depend only on these three fields are kept."""
        found = replace(self, **new)
        vars(found).update({name: vars(self)[name] for name in _OF_PLACES if name in vars(self)})
        return found

    def with_zero_b(self) -> "LayerLoRA":
        """Return a copy with lora_b = 0, for use after the change was folded into the base. The evidence
        stays."""
        return self.replace_fields(lora_b=np.zeros_like(self.lora_b), gain=1.0)

    def shrunk(self, factor: float) -> "LayerLoRA":
        """Return a copy with lora_b and gain times `factor`."""
        return self.replace_fields(lora_b=self.lora_b * np.float32(factor), gain=self.gain * factor)

    def with_places_of(self, other: "LayerLoRA") -> "LayerLoRA":
        """Return a copy with the places of `other` appended. `other` has no ratings."""
        arrays = {
            name: np.concatenate([getattr(self, name), getattr(other, name)], axis=-1) for name in _ARRAYS
        }
        return replace(self, places=self.places + other.places, widths=self.widths + other.widths, **arrays)

    # -- storage ---------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to store. They are stored in the same file as the arrays of a MicroLoRA."""
        found = {name: getattr(self, name) for name in _ARRAYS}
        found["places"] = np.array([f"{layer}.{module}" for module, layer in self.places])
        found["widths"] = np.array(self.widths, np.int64).reshape(-1, 2)
        found["facts"] = np.array([self.tokens, self.gain, self.curvature])
        return {_PREFIX + name: array for name, array in found.items()}

    @classmethod
    def from_arrays(cls, stored: Mapping[str, np.ndarray], config: ModelShape) -> "LayerLoRA | None":
        """Deserialise a layer LoRA; None if the file has none. Raises CorruptFile if the data is damaged, and
        AdapterMismatch if the shapes differ."""
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
    """Serialise an adapter's MicroLoRA and layer LoRA into one file."""
    return micro.to_bytes(**(layer_lora.arrays() if layer_lora else {}))


def unpack_layers(data: bytes, config: ModelShape) -> LayerLoRA | None:
    """Return the layer LoRA of a serialised adapter; None if the adapter has none. Raises CorruptFile and
    AdapterMismatch as `from_arrays` does."""
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
    """Return the base and the layer LoRA as one LoRA. Their factors are concatenated, without rounding.

    If the layer LoRA changes nothing, the base itself is returned. If `empty` is True, the factors are
    concatenated even then, because gradients need them.
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
    """Return the base's part of the gradients by a `combine_loras` LoRA."""
    ranks = {place: a.shape[1] for place, (a, _) in base.pairs.items()}
    return {p: (a[:, : ranks[p]], b[: ranks[p]]) for p, (a, b) in grads.items() if p in ranks}


def fold_layers(
    base: BaseLoRA, layer_lora: LayerLoRA | None, most: int, pause: Callable[[], None] = lambda: None
) -> BaseLoRA:
    """Return the base with the layer LoRA's change folded in.

    Each rank grows by one, up to `most`. A pair that already has this rank loses its smallest singular
    direction.

    pause: a function that is called after each pair; it may raise an exception to stop
    """
    if layer_lora is None or not layer_lora.moves:
        return base
    pairs = dict(base.pairs)
    for place, (a, b) in layer_lora.pairs.items():
        if not b.any():
            continue
        old = pairs.get(place, (np.zeros((a.shape[0], 0), np.float32), np.zeros((0, b.shape[1]), np.float32)))
        rank = old[0].shape[1]
        kept = merge_changes(old, base.scale, (a, b), 1.0, max(rank, min(most, rank + 1))).kept
        pairs[place] = kept[0], np.ascontiguousarray(kept[1] / np.float32(base.scale))
        pause()
    return replace(base, pairs=pairs)

"""What precision of old keys and values costs, by simulation: numbers are quantised and read back at once.

    python -m tests.kv.tradeoff [--model MODEL] [--texts N] [--quick] [--sweep] [--peers] [--kept FOLDER]

Texts of 4,096 tokens run through a model in steps of 64 tokens, in float32 on MLX's CPU backend,
with keys (after RoPE) and values rounded to float16; before each step whole pages are replaced as the policy
says. The logits are compared to those of the all-f16 cache. Runs are kept in FOLDER and not repeated.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.backends.mlx import cpu_layers
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.mlx.kernels.demote import rotate
from ruvmlx.models.load import load_model
from ruvmlx.platform.cpu import OtherLoad
from ruvmlx.platform.mx import BLAS, mx

from .texts import contexts

PAGE, TOKENS = 64, 4096
MEAN = -1
FIRST_COLD = 2112  # from this token on the default policy has a cold page


@dataclass(frozen=True)
class Grid:
    """Affine: `bits` per number, a float16 scale and minimum per `group` neighbours along `along`."""

    bits: int
    along: str = "token"  # a token's numbers | "channel": one channel of a page's 64 tokens
    group: int = 0  # 0: all of them
    rotated: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., 64, D], as it is read back."""
        if self.rotated:
            return rotate(self._round(rotate(x)))  # the rotation is its own inverse
        return self._round(x)

    def _round(self, x: mx.array) -> mx.array:
        if self.along == "channel":
            return self._rows(x.swapaxes(-1, -2)).swapaxes(-1, -2)
        return self._rows(x)

    def _rows(self, x: mx.array) -> mx.array:
        groups = x.reshape(-1, self.group or x.shape[-1])
        low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
        s, b = half((high - low) / (2**self.bits - 1)), half(low)
        q = mx.clip(mx.round((groups - b) / mx.where(s == 0, 1, s)), 0, 2**self.bits - 1)
        return (s * q + b).reshape(x.shape)

    def bits_per_number(self, head_dim: int) -> float:
        return self.bits + 32 / (self.group or (PAGE if self.along == "channel" else head_dim))


@dataclass(frozen=True)
class Symmetric:
    """`bits` per number, a float16 scale per `group` neighbours of a token, no minimum: the codes of
    llama.cpp's q8_0 and q4_0 cache with groups of 32, and the warm tier's with all numbers in one group."""

    bits: int
    group: int = 0

    def __call__(self, x: mx.array) -> mx.array:
        return symmetric(x.reshape(-1, self.group or x.shape[-1]), self.bits).reshape(x.shape)

    def bits_per_number(self, head_dim: int) -> float:
        return self.bits + 16 / (self.group or head_dim)


@dataclass(frozen=True)
class Float8:
    """fp8 (e4m3, no infinities, at most 448), with a float16 scale per token if `scaled`."""

    scaled: bool = False

    def __call__(self, x: mx.array) -> mx.array:
        s = half(mx.abs(x).max(-1, keepdims=True) / 448) if self.scaled else mx.ones_like(x[..., :1])
        s = mx.where(s == 0, 1, s)
        return s * mx.from_fp8(mx.to_fp8(x / s), dtype=mx.float32)

    def bits_per_number(self, head_dim: int) -> float:
        return 8 + 16 / head_dim * self.scaled


@dataclass(frozen=True)
class Outliers:
    """The `channels` channels of each head with the largest numbers in float16; `rest` for all others."""

    rest: Grid
    channels: int = 4

    def __call__(self, x: mx.array) -> mx.array:
        large = mx.abs(x).max(-2, keepdims=True)
        least = mx.sort(large, axis=-1)[..., -self.channels : -self.channels + 1]
        out = large >= least
        return mx.where(out, x, self.rest(mx.where(out, 0, x)))

    def bits_per_number(self, head_dim: int) -> float:
        return self.rest.bits_per_number(head_dim) + 16 * self.channels / head_dim


@dataclass(frozen=True)
class WithoutBias:
    """The bias of the keys, turned by RoPE, is subtracted before `rest` and added again. If `mean`, the mean
    of the turned bias over the first 8,192 positions is subtracted, and need not be added again: softmax
    drops what a query's scores of all keys have in common."""

    rest: Grid
    mean: bool = False

    def bits_per_number(self, head_dim: int) -> float:
        return self.rest.bits_per_number(head_dim)


Format = Grid | Symmetric | Float8 | Outliers | WithoutBias


@dataclass(frozen=True)
class Scheme:
    """Hot pages reach back `hot` tokens, warm ones `warm`; None: no cold ones, or (hot) all f16. If `warm`
    equals `hot`, cold pages are made from hot ones."""

    name: str
    k: Format | None = None
    v: Format | None = None
    hot: int | None = 256
    warm: int | None = 2048

    def pages(self, offset: int) -> tuple[int, int]:
        """How many of the first pages are at most warm, and how many of them cold."""
        gone = lambda reach: 0 if reach is None else max(0, (offset + 1 - reach) // PAGE)  # noqa: E731
        return gone(self.hot), gone(self.warm)

    def bytes_share(self, head_dim: int) -> float:
        """Of the all-f16 cache, at the end of the text."""
        old, cold = self.pages(TOKENS)
        number = [0.0] * cold
        if self.k and self.v:
            number = [(self.k.bits_per_number(head_dim) + self.v.bits_per_number(head_dim)) / 2] * cold
        number += [8 + 16 / head_dim] * (old - cold) + [16.0] * (TOKENS // PAGE - old)
        return sum(number) / len(number) / 16


T, C = "token", "channel"
F16 = Scheme("all f16", hot=None, warm=None)
CHOSEN = Scheme("4-bit token, rotated / 4-bit token", Grid(4, T, rotated=True), Grid(4))
CLOSEST = [
    Scheme("4-bit channel / 4-bit token", Grid(4, C), Grid(4)),
    CHOSEN,
    Scheme("4-bit token, rotated / 4-bit token, rotated", Grid(4, T, rotated=True), Grid(4, rotated=True)),
    Scheme("4-bit token, rotated, groups of 32 / groups of 32", Grid(4, T, 32, True), Grid(4, group=32)),
]
MORE = [
    Scheme("none: all of it warm", warm=None),
    Scheme("4-bit token / 4-bit token", Grid(4), Grid(4)),
    Scheme("4-bit channel, rotated / 4-bit token", Grid(4, C, rotated=True), Grid(4)),
    Scheme("4-bit token, groups of 32 / the same", Grid(4, group=32), Grid(4, group=32)),
    Scheme("5-bit channel / 4-bit token", Grid(5, C), Grid(4)),
    Scheme("6-bit channel / 4-bit token", Grid(6, C), Grid(4)),
    Scheme("5-bit token, rotated / 4-bit token", Grid(5, rotated=True), Grid(4)),
    Scheme("6-bit token, rotated / 4-bit token", Grid(6, rotated=True), Grid(4)),
    Scheme("3-bit token, rotated / 3-bit token", Grid(3, rotated=True), Grid(3)),
]
SWEEP = [replace(CHOSEN, name=f"hot {hot}", hot=hot) for hot in (64, 128, 256, 512)]
SWEEP += [replace(CHOSEN, name=f"warm to {warm:,}", warm=warm) for warm in (512, 1024, 2048)]
# What others use, and what would mend a bias of the keys: one format for all tokens behind the newest 256.
_COLD_K, _ROTATED = Grid(4, T, rotated=True), Grid(4, rotated=True)
PEERS = [
    replace(scheme, warm=256)
    for scheme in (
        Scheme("the warm tier: 8 bits", Symmetric(8), Symmetric(8)),
        replace(CHOSEN, name="the cold tier: K 4-bit token, rotated / V 4-bit token"),
        Scheme("the cold tier, K without the mean of its bias", WithoutBias(_COLD_K, mean=True), Grid(4)),
        Scheme("the cold tier, K without its bias", WithoutBias(_COLD_K), Grid(4)),
        Scheme("the cold tier, 4 channels of K in f16", Outliers(_COLD_K), Grid(4)),
        Scheme("K 8 bits / V 4-bit token", Symmetric(8), Grid(4)),
        Scheme("K 4-bit channel / V 4-bit token", Grid(4, C), Grid(4)),
        Scheme("fp8 (e4m3)", Float8(), Float8()),
        Scheme("fp8 (e4m3), a scale per token", Float8(True), Float8(True)),
        Scheme("q8_0 of llama.cpp: 8 bits, groups of 32", Symmetric(8, 32), Symmetric(8, 32)),
        Scheme("mlx-lm: 4-bit token / the same", Grid(4), Grid(4)),
        Scheme("K and V 4-bit token, both rotated", _ROTATED, _ROTATED),
        Scheme("q4_0 of llama.cpp: 4 bits, groups of 32", Symmetric(4, 32), Symmetric(4, 32)),
    )
]


def half(x: mx.array) -> mx.array:
    return x.astype(mx.float16).astype(mx.float32)


def symmetric(x: mx.array, bits: int) -> mx.array:
    """x [..., n] in codes of `bits` bits with a float16 scale per row, as they are read back."""
    most = 2 ** (bits - 1) - 1
    s = half(mx.abs(x).max(-1, keepdims=True) / most)
    return s * mx.clip(mx.round(x / mx.where(s == 0, 1, s)), -most, most)


def eight_bits(x: mx.array) -> mx.array:
    """The warm tier."""
    return symmetric(x, 8)


class FakeCache:
    """One layer: pages [1, n_kv_heads, 64, head_dim] of what the tiers would hold, in float32."""

    def __init__(
        self,
        bias: Callable[[int], mx.array],
        k: Sequence[mx.array] = (),
        v: Sequence[mx.array] = (),
        tiers: tuple[int, int] = (0, 0),
    ):
        """bias: the bias of the keys of page i, turned by RoPE"""
        self.bias, self.k, self.v, self.tiers = bias, list(k), list(v), tiers

    def copy(self) -> "FakeCache":
        return FakeCache(self.bias, self.k, self.v, self.tiers)

    @property
    def offset(self) -> int:
        return PAGE * len(self.k)

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """k, v: one page."""
        self.k.append(half(k))
        self.v.append(half(v))
        return mx.concatenate(self.k, axis=2), mx.concatenate(self.v, axis=2)

    def demote(self, scheme: Scheme) -> None:
        """Bring pages to the tier that the scheme has for them; cold is made from warm if there is a warm
        tier."""
        tiers = scheme.pages(self.offset)
        if scheme.warm != scheme.hot:
            for i in range(self.tiers[0], tiers[0]):
                self.k[i], self.v[i] = eight_bits(self.k[i]), eight_bits(self.v[i])
        for i in range(self.tiers[1], tiers[1]):
            if isinstance(scheme.k, WithoutBias):
                bias = self.bias(MEAN if scheme.k.mean else i)
                self.k[i] = scheme.k.rest(self.k[i] - bias) + bias
            else:
                self.k[i] = scheme.k(self.k[i])
            self.v[i] = scheme.v(self.v[i])
        self.tiers = tiers


class Bench:
    """Runs schemes over texts. What schemes of one policy share before the first cold page runs once."""

    def __init__(self, kept: Path, model: str | None = None):
        self.model = load_model(model)
        self.backend = MLXBackend(self.model, "cpu")
        self.kept = kept
        kept.mkdir(parents=True, exist_ok=True)
        self._load = OtherLoad()
        self._prefix: dict = {}

    def hidden_states(self, ids: list[int], scheme: Scheme) -> np.ndarray:
        """[T, D]: what goes into the output head."""
        start = min(TOKENS, (scheme.warm or TOKENS) // PAGE * PAGE + PAGE)
        caches, before = self._before(ids, scheme, start)
        return np.concatenate([before, self._run(ids[start:], caches, scheme)])

    def _before(self, ids: list[int], scheme: Scheme, start: int) -> tuple[list[FakeCache], np.ndarray]:
        """Caches and hidden states of the first `start` tokens, of this text and hot length."""
        key = (digest(ids), scheme.hot, start)
        if key not in self._prefix:
            caches = [
                FakeCache(lru_cache(1)(partial(self._bias, layer)))
                for layer in self.backend._graph.model.layers
            ]
            self._prefix = {key: (caches, self._run(ids[:start], caches, replace(scheme, warm=None)))}
        caches, before = self._prefix[key]
        return [c.copy() for c in caches], before

    def _run(self, ids: list[int], caches: list[FakeCache], scheme: Scheme) -> np.ndarray:
        parts = [np.zeros((0, self.model.config.hidden_size), np.float32)]
        for i in range(0, len(ids), PAGE):
            BLAS.adapt(self._load.cores())
            with mx.stream(mx.cpu):
                for cache in caches:
                    cache.demote(scheme)
                tokens = mx.array([ids[i : i + PAGE]], mx.uint32)
                out = cpu_layers.forward(self.backend._graph, tokens, caches)[0]
                mx.eval(out, *(page for c in caches for page in (*c.k, *c.v)))
            parts.append(np.array(out))
        return np.concatenate(parts)

    def _bias(self, layer: Any, page: int) -> mx.array:
        """The keys [1, n_kv_heads, 64, head_dim] that a layer has for an input of zeros at this page; for
        MEAN the mean [1, n_kv_heads, 1, head_dim] over 128 pages."""
        with mx.stream(mx.cpu):
            if page == MEAN:
                pages = [self._bias(layer, i).mean(axis=2, keepdims=True) for i in range(128)]
                return mx.stack(pages).mean(axis=0)
            nothing = mx.zeros((1, PAGE, self.model.config.hidden_size), mx.float32)
            return layer.self_attn.plain._project(nothing, page * PAGE)[1]

    def judge(self, ids: list[int]) -> np.ndarray:
        """The hidden states of the all-f16 run, kept on disk."""
        path = self.kept / f"{self._name(ids)}.npy"
        if not path.exists():
            np.save(path, self.hidden_states(ids, F16))
        return np.load(path)

    def _name(self, ids: list[int]) -> str:
        return digest([self.model.fingerprint, ids])

    def compare(self, ids: list[int], scheme: Scheme) -> dict[str, dict[str, float]]:
        """{"cold": tokens that saw cold pages, "all"} -> kl, perplexity change, share of equal top tokens."""
        path = self.kept / f"{self._name(ids)}-{digest(repr(replace(scheme, name='')))}.json"
        if not path.exists():
            rows = self._rows(self.judge(ids), self.hidden_states(ids, scheme), ids)
            path.write_text(json.dumps({"cold": _means(rows[:, FIRST_COLD:]), "all": _means(rows)}))
        return json.loads(path.read_text())

    def _rows(self, judge: np.ndarray, ours: np.ndarray, ids: list[int]) -> np.ndarray:
        """[4, T - 1]: KL, the two -log p of the token that came, equal top."""
        rows = []
        for i in range(0, TOKENS - 1, 256):
            stop = min(i + 256, TOKENS - 1)
            p, q = (log_softmax(self.backend.head(h[i:stop])) for h in (judge, ours))
            came = np.arange(stop - i), ids[i + 1 : stop + 1]
            top = p.argmax(-1) == q.argmax(-1)
            rows.append([(np.exp(p) * (p - q)).sum(-1), -p[came], -q[came], top])
        return np.concatenate(rows, axis=1)


def _means(rows: np.ndarray) -> dict[str, float]:
    kl, judge, ours, top = rows.mean(axis=1, dtype=np.float64).tolist()
    return {"kl": kl, "perplexity": math.exp(judge), "change": math.expm1(ours - judge), "top": top}


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def digest(value) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


HEAD = (
    "| cold K / cold V | bytes | KL, cold | perplexity, cold | same top | KL, all | perplexity, all |",
    "|---|---|---|---|---|---|---|",
)


def line(scheme: Scheme, results: list[dict], head_dim: int) -> str:
    """A row of the table: the mean over texts and, in brackets, the worst text."""
    cells = [scheme.name, f"{100 * scheme.bytes_share(head_dim):.1f}%"]
    for part in ("cold", "all"):
        kl, change, top = ([r[part][key] for r in results] for key in ("kl", "change", "top"))
        cells += [
            f"{np.mean(kl):.4f} ({max(kl):.4f})",
            f"{100 * np.expm1(np.log1p(change).mean()):+.2f}% ({100 * max(change):+.2f}%)",
        ]
        cells += [f"{100 * np.mean(top):.1f}%"] if part == "cold" else []
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=99, help="so many of them only")
    parser.add_argument("--quick", action="store_true", help="the schemes that come closest")
    parser.add_argument("--sweep", action="store_true", help="other lengths of the tiers instead")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "ruvmlx-tradeoff")
    parser.add_argument("--peers", action="store_true", help="one format behind 256 tokens, also others'")
    parser.add_argument("--model", help="a name or a file; the starter model by default")
    args = parser.parse_args()
    bench = Bench(args.kept, args.model)
    schemes = SWEEP if args.sweep else PEERS if args.peers else CLOSEST if args.quick else CLOSEST + MORE
    texts = dict(list(contexts(bench.model.tokenizer, TOKENS).items())[: args.texts])
    results: dict[str, list[dict]] = {s.name: [] for s in schemes}
    for text, ids in texts.items():
        for scheme in schemes:
            results[scheme.name].append(bench.compare(ids, scheme))
            print(f"{text}: {scheme.name}: {results[scheme.name][-1]}", flush=True)
    head_dim = bench.model.config.head_dim
    print("\n" + "\n".join([*HEAD, *(line(s, results[s.name], head_dim) for s in schemes)]))


if __name__ == "__main__":
    main()

"""How near the starter model's float16 comes to its end, and what each way out costs.

    python -m tests.backends.precision            about six minutes on one core

Three measurements on mlx-lm's graph, on the CPU; precision.md says what came out:

* Room: over 20 texts of 1,024 tokens, in float32, the largest |residual| after each layer and the largest
  |output of down_proj|. float16 ends at 65,504.
* First: the same for every token of the vocabulary as the first, and only, token of a text.
* Loss: over some of the texts, 512 tokens each, KL(float32 || other) of the next token's distribution, in
  nats, for each way to compute in WAYS.

A GPU's packed product reads x and the scales in one type, adds up in float32 and rounds the result once.
`_Product` does the same here: float32 products of what was rounded to that type. Norms, RoPE, attention and
SwiGLU are MLX's own in that type.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ruvmlx.backends.mlx import graph
from ruvmlx.models.config.model import Message, Model, Tokenizer
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import BLAS, mx, nn
from tests.kv import texts

END = 65_504.0  # float16's largest number
ROOM_TOKENS, LOSS_TOKENS = 1024, 512
DEPTH = 12  # layers of the starter model up to the one whose down_proj writes the large numbers
LOSS_TEXTS = ("statements", "network", "a licence", "mlx-lm", "a chat")
_DOCSTRINGS = {
    "databases": "sqlite3 dbm shelve pickle copyreg",
    "dates": "datetime _pydatetime calendar _strptime",
    "parsing": "argparse optparse configparser csv json.decoder html.parser",
    "processes": "subprocess multiprocessing.managers signal asyncio.subprocess",
    "arrays": "numpy.lib._function_base_impl",
    "mlx-lm": "mlx.nn.losses mlx.nn.layers.convolution mlx.optimizers.optimizers",
}
_SOURCES = {"C-like code": "heapq", "tables": "encodings.cp1252"}


def long_texts(tokenizer: Tokenizer, n_tokens: int) -> dict[str, list[int]]:
    """Texts by name, n_tokens tokens each: prose, code, numbers, a chat, and three that nobody writes."""
    found = texts.contexts(tokenizer, n_tokens)
    for name, words in _words():
        ids = tokenizer.encode(words[: 12 * n_tokens])[:n_tokens]
        if len(ids) == n_tokens:
            found[name] = ids
    question = Message("user", texts.read("statements")[: 8 * n_tokens])
    found["a chat"] = tokenizer.encode_chat([question])[:n_tokens]
    drawn = random.Random(0)
    found["random tokens"] = [drawn.randrange(tokenizer.vocab_size) for _ in range(n_tokens)]
    found["one word again and again"] = (tokenizer.encode(" the") * n_tokens)[:n_tokens]
    return found


def _words() -> Iterator[tuple[str, str]]:
    for name, modules in _DOCSTRINGS.items():
        yield name, "\n\n".join(map(texts._docstrings, modules.split()))
    for name, module in _SOURCES.items():
        yield name, texts._source(module)
    yield "a licence", _text(Path(sys.prefix), "**/transformers-*/**/LICENSE*")
    yield "the README", (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    yield "spaces and line ends", " \n  \n\n    \t" * 9999


def _text(folder: Path, pattern: str) -> str:
    return next((p.read_text("utf-8") for p in sorted(folder.glob(pattern)) if p.is_file()), "")


# ---- room


class _Watched:
    """A layer that notes the largest |residual| after it, token by token."""

    def __init__(self, layer: nn.Module):
        self.layer, self.use_sliding = layer, layer.use_sliding
        self.texts: list[np.ndarray] = []  # [T] each
        self.down = 0.0
        layer.mlp.down_proj = _Outputs(layer.mlp.down_proj, self)

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        out = self.layer(x, mask, cache=cache)
        self.texts.append(np.array(mx.max(mx.abs(out), axis=-1)).ravel())
        return out

    def __str__(self) -> str:
        by_text = np.stack(self.texts)  # [texts, T]
        near = (by_text > by_text.max() / 4).sum(axis=1)
        return f"{by_text.max():>9.0f} {near.mean():>7.1f} {self.down:>9.0f}"


class _Outputs(nn.Module):
    def __init__(self, linear: nn.Module, watched: _Watched):
        super().__init__()
        self.linear, self._watched = linear, [watched]

    def __call__(self, x: mx.array) -> mx.array:
        y = self.linear(x)
        self._watched[0].down = max(self._watched[0].down, mx.max(mx.abs(y)).item())
        return y


def room(model: Model, tokens: Mapping[str, list[int]]) -> list[_Watched]:
    """The layers, with what they saw in all texts."""
    net = graph.build(model.config, model.load_weights(), mx.float32, True)
    net.model.layers = [_Watched(layer) for layer in net.model.layers]
    for name, ids in tokens.items():
        mx.eval(net.model(mx.array([ids])))
        most = max(float(layer.texts[-1].max()) for layer in net.model.layers)
        log(f"{name:<26} {most:>8.0f} {END / most:>6.2f} times left")
    return net.model.layers


def first_tokens(model: Model, depth: int) -> np.ndarray:
    """[V]: the largest |residual| in the first `depth` layers of every token as the first of a text.

    It is the first token that carries the large numbers, whatever follows: this covers all texts.
    """
    net = graph.build(model.config, model.load_weights(), mx.float32, True)
    net.model.layers = [_Watched(layer) for layer in net.model.layers[:depth]]
    ids = np.arange(model.config.vocab_size)
    for start in range(0, len(ids), 4096):
        mx.eval(net.model(mx.array(ids[start : start + 4096, None])))
    return np.max([np.concatenate(layer.texts) for layer in net.model.layers], axis=0)


# ---- loss


@dataclass(frozen=True)
class Way:
    """dtype: of activations; scales: of the packed weights' scales and biases; residual: of what is added up.

    down: what the residual is divided by. A power of two changes no float16 number but those that get too
    small; RMSNorm does not see it where eps is divided by its square.
    """

    dtype: mx.Dtype
    scales: mx.Dtype
    residual: mx.Dtype
    down: float = 1.0


FLOAT16 = Way(mx.float16, mx.float16, mx.float16)
BFLOAT16 = Way(mx.bfloat16, mx.bfloat16, mx.bfloat16)
WAYS = {
    "float16": FLOAT16,
    "float16, residual / 4": replace(FLOAT16, down=4.0),
    "float16, float32 residual": replace(FLOAT16, residual=mx.float32),
    "bfloat16": BFLOAT16,
    "bfloat16, float32 residual": replace(BFLOAT16, residual=mx.float32),
    "bfloat16, exact scales": replace(BFLOAT16, scales=mx.float32),
}


class _Product(nn.Module):
    """y = round(x W^T): x and y in one type, the sum in float32."""

    def __init__(self, weight: mx.array, dtype: mx.Dtype):
        super().__init__()
        self.weight, self._dtype = weight, dtype

    def __call__(self, x: mx.array) -> mx.array:
        return (x.astype(self._dtype).astype(mx.float32) @ self.weight.T).astype(self._dtype)


class _Layer(nn.Module):
    """A layer of mlx-lm's whose residual has a type of its own."""

    def __init__(self, layer: nn.Module, way: Way):
        super().__init__()
        self.layer, self.use_sliding, self._way = layer, layer.use_sliding, way

    def __call__(self, x: mx.array, mask=None, cache=None) -> mx.array:
        way, layer = self._way, self.layer
        x = x.astype(way.residual)
        h = x + layer.self_attn(layer.input_layernorm(x).astype(way.dtype), mask, cache).astype(way.residual)
        return h + layer.mlp(layer.post_attention_layernorm(h).astype(way.dtype)).astype(way.residual)


def network(model: Model, way: Way) -> Callable[[list[int]], mx.array]:
    """tokens [T] -> logits [T, V] in float32, computed that way."""
    net = graph.build(model.config, _rounded(model, way.scales), mx.float32, True)
    head = _Product(net.model.embed_tokens.weight, way.dtype)  # the starter's head is its embedding
    for layer in net.model.layers:
        for part, names in ((layer.self_attn, "qkvo"), (layer.mlp, ("gate", "up", "down"))):
            for name in names:
                linear = part[f"{name}_proj"]
                by = way.down if name in "odown" else 1.0
                part[f"{name}_proj"] = _Product(linear.weight / by, way.dtype)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight, norm.eps = norm.weight.astype(way.dtype), norm.eps / way.down**2
    norm = net.model.norm
    norm.weight, norm.eps = norm.weight.astype(way.dtype), norm.eps / way.down**2
    net.model.layers = [_Layer(layer, way) for layer in net.model.layers]

    def run(ids: list[int]) -> mx.array:
        x = (net.model.embed_tokens.weight[mx.array([ids])] / way.down).astype(way.residual)
        hidden = net.model(mx.array([ids]), input_embeddings=x)
        return head(hidden)[0].astype(mx.float32)

    return run


def _rounded(model: Model, scales: mx.Dtype) -> dict[str, np.ndarray]:
    """The weights; scales and biases of packed ones rounded to that type and back."""

    def rounded(name: str, value: np.ndarray) -> np.ndarray:
        if not name.endswith((".scales", ".biases")):
            return value
        return np.array(mx.array(value).astype(mx.float32).astype(scales).astype(mx.float32))

    return {name: rounded(name, value) for name, value in model.load_weights().items()}


def loss(model: Model, tokens: Mapping[str, list[int]]) -> dict[str, dict[str, float]]:
    """By way: mean and largest KL in nats, and the share of tokens whose likeliest next token is the same."""
    true = {name: _logprobs(network(model, REFERENCE)(ids)) for name, ids in tokens.items()}
    found = {}
    for name, way in WAYS.items():
        run = network(model, way)
        kl, same = [], []
        for text, ids in tokens.items():
            mine, p = _logprobs(run(ids)), true[text]
            kl.append((np.exp(p) * (p - mine)).sum(-1))
            same.append(p.argmax(-1) == mine.argmax(-1))
        each = np.concatenate(kl)
        found[name] = {"kl": each.mean(), "most": each.max(), "same": float(np.concatenate(same).mean())}
        log(f"{name:<28} " + "  ".join(f"{k} {v:.6f}" for k, v in found[name].items()))
    return found


REFERENCE = Way(mx.float32, mx.float32, mx.float32)


def _logprobs(logits: mx.array) -> np.ndarray:
    """[T, V] float32 -> float64, so that a KL of 1e-6 is not rounding."""
    x = np.array(logits).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def log(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("room", "first", "loss"))
    parser.add_argument("--tokens", type=int, help="of each text, instead of 1,024 and 512")
    asked = parser.parse_args()
    BLAS.set_threads(1)
    mx.set_default_device(mx.cpu)
    model, started = load_model(None), time.perf_counter()
    if asked.only in (None, "room"):
        tokens = long_texts(model.tokenizer, asked.tokens or ROOM_TOKENS)
        layers = room(model, tokens)
        log(f"{len(tokens)} texts; layer: largest residual, tokens a text over a quarter of it, down_proj")
        for i, layer in enumerate(layers):
            log(f"{i:>3} {layer}")
    if asked.only in (None, "first"):
        each = first_tokens(model, DEPTH)
        most = each.max()
        log(f"every first token: {most:.0f} at most ({each.argmax()}), {END / most:.2f} times left")
        log(f"tokens over 20,000 {(each > 20_000).mean():.4f}, over 30,000 {(each > 30_000).mean():.4f}")
    if asked.only in (None, "loss"):
        tokens = long_texts(model.tokenizer, asked.tokens or LOSS_TOKENS)
        loss(model, {name: tokens[name] for name in LOSS_TEXTS if name in tokens})
    log(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()

"""Gradients by the factors of a BaseLoRA, on Metal, CUDA or the CPU. The weights are frozen.

A text is a run of tokens of which those from `first` on were said by the model. Its value is one number:

    reply:    mean log p(said)                                    d / d logits = (onehot(said) - p) / n
    neutral:  mean KL(frozen || p)                                d / d logits = (p - frozen) / n

The head is linear and not trained here, so its part of the chain is these formulas and one product; MLX
differentiates the rest. Only positions that say something go through the head. On a CPU all is float32.

MLX computes nothing until it is asked. So a pass is described as a whole and then evaluated slice by slice,
on the way up and on the way back, and between slices the caller may leave; there are the same slices where
nobody asks. A slice is some of a layer's stages, or one of the head for some rows.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple, cast

import numpy as np

from ..lora.base import MODULES, BaseLoRA, Pair, Place, Squares
from ..lora.micro import MicroLoRA
from ..models.base import Model, Weights
from ..models.gguf_model import LazyWeights
from . import cpu, cpu_layers, graph
from .base import Backend
from .changes import Changed
from .mlx import MLXBackend, default_device, plan
from .mx import BLAS, mx, nn

MAX_TOKENS = 512  # of a text that are read: attention's scores of every layer are kept for the way back
SLICE = 150  # tokens x layers between which the caller is asked whether to go on: 20 ms of the starter model
LOGITS = 1 << 21  # that are in memory at a time: 30 ms of the starter model's head
KNOWN = 256 << 20  # bytes of states in front of the first trained layer that are kept
TARGETS = MODULES[:7]  # attention and MLP


@dataclass(frozen=True)
class Text:
    """tokens [T]; those from `first` on count, first >= 1."""

    tokens: tuple[int, ...]
    first: int

    @classmethod
    def cut(cls, prompt: Sequence[int], said: Sequence[int], limit: int = MAX_TOKENS) -> "Text":
        """At most `limit` tokens: a long reply's first half of it, behind the end of the prompt."""
        said = said[: max(limit // 2, limit - len(prompt))]
        prompt = prompt[-(limit - len(said)) :]
        return cls((*prompt, *said), len(prompt))

    @property
    def said(self) -> int:
        return len(self.tokens) - self.first


Value = tuple[mx.array, mx.array]  # a number, its gradient by the logits [n, V] or their inputs [n, D]
Pairs = dict[Place, Pair]
Weigh = Callable[[float], float]
Pause = Callable[[], None]  # called between slices; may raise to leave
Measure = Callable[[mx.array, slice, "Stops"], Value]  # of the logits of some rows


class Stops:
    """What is evaluated on the way, in order: stages of a pass and what each takes, in tokens x layers."""

    def __init__(self) -> None:
        self._stages: list[tuple[float, Sequence[mx.array]]] = []

    def add(self, *made: mx.array, work: float = SLICE) -> None:
        """What a stage makes, all that the next one reads."""
        self._stages.append((work, made))

    def slices(self) -> Iterator[Sequence[mx.array]]:
        """The last stage of as many as fit a slice. What was given is not held any longer."""
        held: Sequence[mx.array] = ()
        stages, self._stages, total = deque(self._stages), [], 0.0
        while stages:
            work, made = stages.popleft()
            if held and total + work > SLICE:
                yield held
                total = 0.0
            held, total = made, total + work
        if held:
            yield held


class _Asking(Mapping[str, np.ndarray]):
    """Weights that may have to be converted when they are looked at: the caller is asked after each."""

    def __init__(self, weights: Weights, pause: Pause):
        self._weights, self._pause = weights, pause
        if isinstance(weights, LazyWeights):
            weights.pause = pause

    def __getitem__(self, name: str) -> np.ndarray:
        found = self._weights[name]
        self._pause()
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _built(model: Model, kind: str, pause: Pause) -> nn.Module:
    weights = _Asking(model.load_weights(), pause)
    how = plan(weights, kind)
    return graph.build(model.config, weights, how.dtype, how.unpack, pause)


def _unwrapped(module: nn.Module) -> nn.Module:
    """mlx-lm's own module, whatever the backend has put around it."""
    module = module.plain if "plain" in module else module
    return module.linear if isinstance(module, Changed) else module


class Below(NamedTuple):
    """The states [T, D] that go into layer `first`."""

    first: int
    x: mx.array


class Trainer:
    """A graph of one model, and the change of its output head that is in force throughout.

    backend: one that has the weights in MLX already, as on a GPU, lends its graph; whatever base it has is
    looked past. Otherwise there is a graph of our own until `close`.
    """

    def __init__(
        self,
        model: Model,
        device: str | None = None,
        backend: Backend | None = None,
        pause: Pause = lambda: None,
    ):
        kind = device or default_device()
        self._device = mx.Device(mx.cpu if kind == "cpu" else mx.gpu)
        self._load = cpu.OtherLoad()
        lent = backend.lent_graph() if isinstance(backend, MLXBackend) else None
        with mx.stream(self._device):
            self._graph = lent or _built(model, kind, pause)
            mx.clear_cache()
        rope = _unwrapped(self._graph.model.layers[0].self_attn).rope
        self._vocab_size = model.config.vocab_size
        self._positions = cpu_layers.Positions(rope, model.config)
        self._dtype = self._graph.model.norm.weight.dtype
        self._own = self._dtype == mx.float32 and kind == "cpu"
        self._known: OrderedDict[tuple[Text, int], Below] = OrderedDict()
        self._head: list[tuple[mx.array, mx.array]] = []

    def close(self) -> None:
        """Give the memory back."""
        del self._graph, self._known
        mx.clear_cache()

    def set_head(self, base: BaseLoRA | None, micro: MicroLoRA | None) -> None:
        """What is added to the frozen head's logits from now on."""
        changes = [(micro.lora_a, micro.lora_b * np.float32(micro.scale))] if micro else []
        if base and ("lm_head", 0) in base.pairs:
            a, b = base.pairs["lm_head", 0]
            changes.append((a, b * np.float32(base.scale)))
        with mx.stream(self._device):
            self._head = [
                (mx.array(a).astype(self._dtype), mx.array(b).astype(self._dtype)) for a, b in changes
            ]

    def reply(
        self, base: BaseLoRA, text: Text, weigh: Weigh = lambda value: 1.0, pause: Pause | None = None
    ) -> tuple[float, Pairs]:
        """Mean log-probability of what was said, and its gradient by the base's factors times weigh(it).

        Where the weight is 0 there is no gradient, and no way back.
        """
        return self._run(base, text, _logprob(text), weigh, pause)

    def neutral(
        self,
        base: BaseLoRA,
        text: Text,
        frozen: np.ndarray,
        weigh: Weigh = lambda value: 1.0,
        pause: Pause | None = None,
    ) -> tuple[float, Pairs]:
        """Mean KL(frozen || p) and its gradient. frozen: hidden states of the untouched model [n, D]."""
        with mx.stream(self._device):
            known = mx.array(frozen).astype(self._dtype)
        head = partial(graph.head, self._graph)
        return self._run(base, text, partial(_divergence, head, known), weigh, pause)

    def squares(self, base: BaseLoRA, text: Text, pause: Pause | None = None) -> dict[Place, Squares]:
        """The squared gradient of a reply's mean log-probability by each matrix that the base changes.

        By the matrix itself, G = sum_t x_t g_t^T [in, out], g_t the gradient by the matrix's output; float32.
        """
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops = Stops()
            inputs: dict[str, mx.array] = {}
            below = self._below(text, _first(base, len(self._graph.model.layers)), pause)
            factors = self._factors(base)

            def loss(probes):
                linear = partial(_probed, probes, inputs)
                hidden = self._body(below, factors, text, stops, linear)
                _, slope = self._valued(mx.stop_gradient(hidden), _logprob(text), stops)
                return mx.sum(hidden.astype(mx.float32) * slope)

            grads = mx.grad(loss)(self._probes(base, len(text.tokens) - 1))
            _evaluate(stops.slices(), pause)
            found = {}
            for names in _from_the_last(grads, text):
                _evaluate([[grads[name] for name in names]], pause)
                for name in names:  # an output's gradient [T, out] is kept no longer than needed
                    found[name] = _sums(inputs.pop(name), grads.pop(name))
                    _evaluate([found[name]], pause)
            places = {f"{layer}.{module}": (module, layer) for module, layer in base.pairs}
            return {places[name]: (np.array(rows), np.array(cols)) for name, (rows, cols) in found.items()}

    def inputs(
        self, places: Sequence[Place], text: Text, pause: Pause | None = None
    ) -> dict[Place, np.ndarray]:
        """Mean input [in] of each matrix where something was said, in the untouched model; float32."""
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops, inputs = Stops(), dict[str, mx.array]()
            probes = {f"{layer}.{module}": mx.zeros((), self._dtype) for module, layer in places}
            self._body(self._below(text, 0, pause), {}, text, stops, partial(_probed, probes, inputs))
            means = {n: x[text.first - 1 :].astype(mx.float32).mean(axis=0) for n, x in inputs.items()}
            inputs.clear()
            stops.add(*means.values())
            _evaluate(stops.slices(), pause)
            return {(module, layer): np.array(means[f"{layer}.{module}"]) for module, layer in places}

    def _probes(self, base: BaseLoRA, tokens: int) -> dict[str, mx.array]:
        """Zeros [T, out] to add to each changed matrix's output: the gradient by them is the output's."""
        return {
            f"{layer}.{module}": mx.broadcast_to(mx.zeros((1, 1), self._dtype), (tokens, b.shape[1]))
            for (module, layer), (_, b) in base.pairs.items()
            if module != "lm_head"
        }

    def hidden(self, base: BaseLoRA | None, text: Text, pause: Pause | None = None) -> np.ndarray:
        """Inputs of the head where something was said [n, D]; None: the untouched model's."""
        with mx.stream(self._device):
            base, stops = base or BaseLoRA({}), Stops()
            below = self._below(text, _first(base, len(self._graph.model.layers)), pause)
            hidden = self._body(below, self._factors(base), text, stops).astype(mx.float32)
            _evaluate(stops.slices(), pause)
            return np.array(hidden)

    # -- one text ------------------------------------------------------------------------------------

    def _run(
        self,
        base: BaseLoRA,
        text: Text,
        value: "Measure",
        weigh: Weigh,
        pause: Pause | None,
    ) -> tuple[float, Pairs]:
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops, out = Stops(), list[mx.array]()
            below = self._below(text, _first(base, len(self._graph.model.layers)), pause)

            def loss(factors):
                hidden = self._body(below, factors, text, stops)
                number, slope = self._valued(mx.stop_gradient(hidden), value, stops)
                out.append(number)
                return mx.sum(hidden.astype(mx.float32) * slope)

            _, grads = mx.value_and_grad(loss)(self._factors(base))
            _evaluate(stops.slices(), pause)
            number = float(cast(float, out[0].item()))
            weight = weigh(number)
            if weight == 0:
                return number, {}
            _evaluate(([grads[name] for name in names] for names in _from_the_last(grads, text)), pause)
            return number, self._pairs(base, grads, weight)

    def _factors(self, base: BaseLoRA) -> dict[str, mx.array]:
        """The body's factors under flat names, the scale in lora_b."""
        out = {}
        for (module, layer), (a, b) in base.pairs.items():
            if module != "lm_head":
                out[f"{layer}.{module}.a"] = mx.array(a)
                out[f"{layer}.{module}.b"] = mx.array(b * np.float32(base.scale))
        return out

    def _pairs(self, base: BaseLoRA, grads: Mapping[str, mx.array], weight: float) -> Pairs:
        out = {}
        for module, layer in base.pairs:
            if module != "lm_head":
                a, b = (np.array(grads[f"{layer}.{module}.{f}"]) for f in "ab")
                out[module, layer] = (a * np.float32(weight), b * np.float32(base.scale * weight))
        return out

    def _valued(self, hidden: mx.array, measure: Measure, stops: Stops) -> Value:
        """hidden [n, D] -> the value of its logits, and its gradient by hidden; some rows at a time."""

        def head(h):
            logits = graph.head(self._graph, h)
            for a, b in self._head:
                logits = logits + (h @ a) @ b
            return logits

        numbers, slopes = [], []
        for rows in _evenly(len(hidden), max(1, LOGITS // self._vocab_size)):
            logits = head(hidden[rows])
            stops.add(logits)
            number, slope = measure(logits.astype(mx.float32), rows, stops)
            stops.add(slope)
            _, back = mx.vjp(head, [hidden[rows]], [slope.astype(logits.dtype)])
            numbers.append(number)
            slopes.append(back[0].astype(mx.float32))
            stops.add(slopes[-1])
        number = mx.sum(mx.stack(numbers)) * (1.0 / len(hidden))
        stops.add(number)
        return number, mx.concatenate(slopes)

    # -- the layers -------------------------------------------------------------------------------------

    def _body(
        self,
        below: "Below",
        factors: Mapping[str, mx.array],
        text: Text,
        stops: Stops,
        linear: Callable | None = None,
    ) -> mx.array:
        """-> hidden [n, D], what predicts the tokens that were said."""
        layers, x = self._graph.model.layers, below.x
        for i in range(below.first, len(layers)):
            x = self._layer(x, layers[i], partial(linear or _linear, factors, i), stops)
        return self._graph.model.norm(x[text.first - 1 :])

    def _below(self, text: Text, first: int, pause: Pause | None) -> "Below":
        """The text in front of layer `first`: no training changes it, so it is computed once."""
        below = self._known.pop((text, first), None)
        if below is None:
            x, stops = self._graph.model.embed_tokens(mx.array([text.tokens[:-1]]))[0], Stops()
            stops.add(x)
            for i, layer in enumerate(self._graph.model.layers[:first]):
                x = self._layer(x, layer, partial(_linear, {}, i), stops)
            _evaluate(stops.slices(), pause)
            below = Below(first, x)
        self._known[text, first] = below
        while sum(b.x.nbytes for b in self._known.values()) > KNOWN:
            self._known.popitem(last=False)
        return below

    def _layer(self, x: mx.array, layer: nn.Module, linear: Callable, stops: Stops) -> mx.array:
        """x [T, D] -> [T, D]."""
        own, mlp, work = _unwrapped(layer.self_attn), layer.mlp, _work(len(x))
        y = layer.input_layernorm(x)
        q, k, v = linear(y, own, ("q_proj", "k_proj", "v_proj"))
        stops.add(q, k, v, work=work["v_proj"])
        out = self._attend(q, k, v, own)
        stops.add(out, work=work["q_proj"])
        x = x + linear(out, own, ("o_proj",))[0]
        stops.add(x, work=work["o_proj"])
        gate, up = linear(layer.post_attention_layernorm(x), mlp, ("gate_proj", "up_proj"))
        inner = swiglu(gate, up) if self._own else nn.silu(gate) * up
        stops.add(inner, work=work["up_proj"])  # type: ignore[arg-type]
        x = x + linear(inner, mlp, ("down_proj",))[0]
        stops.add(x, work=work["down_proj"])
        return x

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, own: nn.Module) -> mx.array:
        """q [T, n_heads * d], k and v [T, n_kv_heads * d] -> [T, n_heads * d]."""
        n, g, d = len(q), own.n_kv_heads, own.head_dim
        q, k, v = (y.reshape(1, n, -1, d).swapaxes(1, 2) for y in (q, k, v))
        q, k = own.rope(q), own.rope(k)
        q = (q * own.scale).reshape(g, -1, d)  # the queries of one key and value head are one product
        scores = (q @ k[0].swapaxes(-1, -2)).reshape(g, -1, n, n)
        scores = scores + self._positions.mask(n, n).astype(q.dtype)
        p: mx.array = softmax(scores) if self._own else mx.softmax(scores, axis=-1, precise=True)  # type: ignore[assignment]
        out: mx.array = p.reshape(g, -1, n) @ v[0]
        return out.reshape(-1, n, d).swapaxes(0, 1).reshape(n, -1)


def _linear(factors: Mapping[str, mx.array], layer: int, x: mx.array, own: nn.Module, names: Sequence[str]):
    """Several linear layers of one input and their changes: x [T, in] -> one [T, out] each."""
    found = [name for name in names if f"{layer}.{name}.a" in factors]
    out = {name: _unwrapped(own[name])(x) for name in names}
    if found:
        a = [factors[f"{layer}.{name}.a"] for name in found]
        u = x.astype(mx.float32) @ mx.concatenate(a, axis=1)
        stops = np.cumsum([w.shape[1] for w in a])[:-1].tolist()
        for name, part in zip(found, mx.split(u, stops, axis=1), strict=True):
            out[name] = out[name] + (part @ factors[f"{layer}.{name}.b"]).astype(x.dtype)
    return [out[name] for name in names]


def _probed(
    probes: Mapping[str, mx.array], inputs: dict[str, mx.array], factors: Mapping[str, mx.array], layer: int,
    x: mx.array, own: nn.Module, names: Sequence[str],
):  # fmt: skip
    """_linear, with a probe on each output; `inputs` gets the x of each."""
    out = _linear(factors, layer, x, own, names)
    for i, name in enumerate(names):
        if (key := f"{layer}.{name}") in probes:
            inputs[key] = x
            out[i] = out[i] + probes[key]
    return out


def _sums(x: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:
    """Of (x^T g)^2, by row and by column: x [T, in], g [T, out] -> [in], [out].

    Of few tokens x^T g = G [in, out] is not formed: sum_j G[i, j]^2 = sum_tu x_ti (g_t . g_u) x_ui.
    """
    x, g = x.astype(mx.float32), g.astype(mx.float32)
    (n, n_in), n_out = x.shape, g.shape[1]
    if 2 * n * (n_in + n_out) > n_in * n_out:
        full = mx.square(x.T @ g)
        return mx.sum(full, axis=1), mx.sum(full, axis=0)
    return mx.sum(((g @ g.T) @ x) * x, axis=0), mx.sum(((x @ x.T) @ g) * g, axis=0)


@mx.custom_function
def softmax(scores: mx.array) -> mx.array:
    """Over the last axis, with an exp that is quick on a CPU."""
    e = cpu_layers.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@softmax.vjp
def _softmax_vjp(_, slope, p):
    return p * (slope - (slope * p).sum(axis=-1, keepdims=True))


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, silu(g) = g / (1 + exp(-g)), with an exp that is quick on a CPU."""
    return gate * up / (1.0 + cpu_layers.exp(-gate))


@swiglu.vjp
def _swiglu_vjp(primals, slope, _):
    """silu'(g) = s + g s (1 - s), s = 1 / (1 + exp(-g))."""
    gate, up = primals
    s = 1.0 / (1.0 + cpu_layers.exp(-gate))
    silu = gate * s
    return slope * up * (s + silu * (1.0 - s)), slope * silu


def _distribution(logits: mx.array) -> tuple[mx.array, mx.array]:
    """p [n, V] and log of the sum of exponentials [n, 1]."""
    top = logits.max(axis=-1, keepdims=True)
    e = cpu_layers.exp(logits - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / total, top + mx.log(total)


def _logprob(text: Text) -> Measure:
    """Mean log p of what was said: the sum over some rows, and its share of the mean's gradient."""
    tokens = mx.array(text.tokens[text.first :])

    def measure(logits: mx.array, rows: slice, _: Stops) -> Value:
        said = tokens[rows]
        p, log_total = _distribution(logits)
        value = (mx.take_along_axis(logits, said[:, None], axis=1) - log_total).sum()
        p[mx.arange(len(said)), said] -= 1.0
        return value, p * (-1.0 / len(tokens))

    return measure


def _divergence(
    head: Callable[[mx.array], mx.array], frozen: mx.array, logits: mx.array, rows: slice, stops: Stops
) -> Value:
    """As `_logprob`, of the mean KL. frozen [N, D]: hidden states; logits [n, V]: of some of these rows."""
    untouched = head(frozen[rows]).astype(mx.float32)
    stops.add(untouched)
    (p, log_total), (q, log_total_q) = _distribution(logits), _distribution(untouched)
    stops.add(q)
    kl = mx.sum(q * (untouched - logits), axis=-1, keepdims=True) - log_total_q + log_total
    return kl.sum(), (p - q) * (1.0 / len(frozen))


def _evenly(count: int, most: int) -> Iterator[slice]:
    """Equal parts of 0 ... count - 1, of at most `most`."""
    parts = -(-count // most)
    for i in range(parts):
        yield slice(count * i // parts, count * (i + 1) // parts)


def _evaluate(slices: Iterable[Sequence[mx.array]], pause: Pause | None) -> None:
    """One slice after another: what a later one needs of an earlier one is kept until then."""
    for arrays in slices:
        mx.eval(*arrays)
        if pause is not None:
            pause()


def _first(base: BaseLoRA, layers: int) -> int:
    """The lowest layer that the base changes."""
    return min((layer for module, layer in base.pairs if module != "lm_head"), default=layers)


def _work(tokens: int) -> dict[str, float]:
    """Tokens x layers of each stage, named by the last module whose input it makes; attention is q's."""
    return {
        "v_proj": 0.15 * tokens,
        "q_proj": (0.1 + tokens / 1000) * tokens,
        "o_proj": 0.1 * tokens,
        "up_proj": 0.4 * tokens,
        "down_proj": 0.25 * tokens,
    }


STAGES = (("down_proj",), ("gate_proj", "up_proj"), ("o_proj",), ("q_proj", "k_proj", "v_proj"))


def _from_the_last(grads: Mapping[str, mx.array], text: Text) -> Iterator[list[str]]:
    """The names of as many stages as fit a slice, from the last layer's last one down."""
    of: dict[tuple[int, str], list[str]] = {}
    for name in grads:
        at, module = name.split(".")[:2]
        of.setdefault((int(at), module), []).append(name)
    work, total, names = _work(len(text.tokens)), 0.0, list[str]()
    for layer, stage in product(sorted({layer for layer, _ in of}, reverse=True), STAGES):
        cost = sum(work.get(module, 0.0) for module in stage)
        if names and total + cost > SLICE:
            yield names
            names, total = [], 0.0
        names = names + [name for module in stage for name in of.get((layer, module), ())]
        total += cost
    if names:
        yield names

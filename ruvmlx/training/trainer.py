"""This module computes, on Metal, CUDA or CPU, gradients of a loss with respect to a BaseLoRA's factors.

The output head is linear and is not trained here. So a formula (losses.py) and one matrix product give the
head's part of the gradient; MLX differentiates the layers. The head is computed only at positions that
predict a token of the answer. On a CPU, the numbers are float32, unless the RAM is too small. MLX is lazy: it
first builds a graph of the forward and backward pass; this module evaluates the graph in slices (slices.py).
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import numpy as np

from ..backends.base import Backend
from ..backends.mlx import cpu_layers, graph
from ..backends.mlx.backend import MLXBackend, plan
from ..backends.mlx.runner import default_device
from ..lora.base_lora import BaseLoRA, Pair, Place, Squares, place_shape
from ..lora.micro_lora import MicroLoRA
from ..models.config.model import Model
from ..models.weights.load_progress import AskingWeights
from ..pausing import Pause
from ..platform import cpu, memory
from ..platform.gpu import gpu
from ..platform.mx import BLAS, mx, nn
from .changed_modules import EMBEDDING, changed_rows, linear, probed_linear, token_shares, token_sums, unwrap
from .losses import Measure, Value, divergence, logprob, mlp_inner, softmax, sums
from .slices import Stops, TrainingText, evaluate, evenly, from_the_last, stage_work

LOGITS = 1 << 21  # the number of logits that are computed at a time; 30 ms of the starter model's output head
KNOWN = 256 << 20  # bytes; the maximum size of the cache that holds the inputs of the first trained layer

Pairs = dict[Place, Pair]
Weigh = Callable[[float], float]


def _build_graph(model: Model, kind: str, pause: Pause) -> nn.Module:
    weights = AskingWeights(model.load_weights(), lambda _: pause(), pause)
    how = plan(weights, kind)
    return graph.build(model.config, weights, how.dtype, how.unpack, pause)


class LayerInput(NamedTuple):
    """The input x [T, D] of the layer with the index `first`, for the T tokens of a text."""

    first: int
    x: mx.array


class Trainer:
    """A trainer computes losses and gradients with one model. `set_head` sets the change of the output head.

    backend: a backend whose weights are in MLX (as on a GPU) lends its graph, without its base LoRA. With
        another backend or None, the trainer builds its own graph and keeps it until `close`.
    """

    def __init__(
        self,
        model: Model,
        device: str | None = None,
        backend: Backend | None = None,
        pause: Pause = lambda: None,
    ):
        kind = device or default_device()
        self._device = mx.Device(mx.cpu) if kind == "cpu" else gpu.device
        self._load = cpu.OtherLoad()
        lent = backend.lent_graph() if isinstance(backend, MLXBackend) else None
        with mx.stream(self._device):
            self._graph = lent or _build_graph(model, kind, pause)
            mx.clear_cache()
        self._vocab_size, self._config = model.config.vocab_size, model.config
        self._positions = cpu_layers.Positions(model.config)
        self._dtype = self._graph.model.norm.weight.dtype
        self._own = self._dtype == mx.float32 and kind == "cpu"
        self._known: OrderedDict[tuple[TrainingText, int], LayerInput] = OrderedDict()
        self._head: list[tuple[mx.array, mx.array]] = []

    def close(self) -> None:
        """Free the memory of the graph, unless a backend lent it, and of the cached layer inputs."""
        del self._graph, self._known
        mx.clear_cache()
        memory.give_back()

    def set_head(self, base: BaseLoRA | None, micro: MicroLoRA | None) -> None:
        """Set the change of the output head: the sum of the base LoRA's change and the MicroLoRA's change."""
        changes = [(micro.lora_a, micro.lora_b * np.float32(micro.scale))] if micro else []
        if base and ("lm_head", 0) in base.pairs:
            a, b = base.pairs["lm_head", 0]
            changes.append((a, b * np.float32(base.scale)))
        with mx.stream(self._device):
            self._head = [
                (mx.array(a).astype(self._dtype), mx.array(b).astype(self._dtype)) for a, b in changes
            ]

    def reply(
        self, base: BaseLoRA, text: TrainingText, weigh: Weigh = lambda value: 1.0, pause: Pause | None = None
    ) -> tuple[float, Pairs]:
        """Return the mean log-probability `value` of the answer's tokens, and weigh(value) times its gradient
        with respect to the base LoRA's factors; no gradient if weigh(value) is 0."""
        return self._run(base, text, logprob(text), weigh, pause)

    def kl(
        self,
        base: BaseLoRA,
        text: TrainingText,
        frozen: np.ndarray,
        weigh: Weigh = lambda value: 1.0,
        pause: Pause | None = None,
    ) -> tuple[float, Pairs]:
        """Return the mean KL(frozen || p) `value` over the answer's n positions, and weigh(value) times its
        gradient with respect to the base LoRA's factors. frozen: [n, D], the original model's hidden
        states."""
        with mx.stream(self._device):
            known = mx.array(frozen).astype(self._dtype)
        head = partial(graph.head, self._graph)
        return self._run(base, text, partial(divergence, head, known), weigh, pause)

    def squares(self, base: BaseLoRA, text: TrainingText, pause: Pause | None = None) -> dict[Place, Squares]:
        """Return the row sums and column sums (float32) of G^2 for each layer matrix that the base LoRA
        changes. G = sum_t x_t g_t^T [in, out] is the gradient of the answer's mean log-probability with
        respect to the matrix; x_t is the matrix's input at token t, and g_t is its output's gradient."""
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops = Stops()
            inputs: dict[str, mx.array] = {}
            layer_input = self._layer_input(text, _first(base, len(self._graph.model.layers)), pause)
            factors = self._factors(base)

            def loss(probes):
                run = partial(probed_linear, probes, inputs)
                hidden = self._forward(layer_input, factors, text, stops, run, probes.get(EMBEDDING))
                _, slope = self._loss_and_slope(mx.stop_gradient(hidden), logprob(text), stops)
                return mx.sum(hidden.astype(mx.float32) * slope)

            grads = mx.grad(loss)(self._probes(base, len(text.tokens) - 1))
            evaluate(stops.slices(), pause)
            found = {}
            for names in from_the_last(grads, text):
                evaluate([[grads[name] for name in names]], pause)
                for name in names:  # free each gradient [T, out] after its sums are computed
                    found[name] = self._sums(name, inputs.pop(name, None), grads.pop(name), text)
                    evaluate([found[name]], pause)
            places = {f"{layer}.{module}": (module, layer) for module, layer in base.pairs}
            return {places[name]: (np.array(rows), np.array(cols)) for name, (rows, cols) in found.items()}

    def _sums(self, name: str, x: mx.array | None, g: mx.array, text: TrainingText) -> tuple:
        """Return the sums of `squares` of one matrix. x [T, in]: its input; None for the embedding. g: the
        gradient [T, out] of its output."""
        if x is not None:
            return sums(x, g)
        found = token_sums(text.tokens[:-1], np.array(g.astype(mx.float32)), self._vocab_size)
        return tuple(map(mx.array, found))

    def inputs(
        self, places: Sequence[Place], text: TrainingText, pause: Pause | None = None
    ) -> dict[Place, np.ndarray]:
        """Return the mean input [in] float32 of each matrix over the answer's positions, in the original
        model. The input of the embedding is 1 for the token and 0 for all others."""
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops, inputs = Stops(), dict[str, mx.array]()
            probes = {f"{layer}.{module}": mx.zeros((), self._dtype) for module, layer in places}
            self._forward(
                self._layer_input(text, 0, pause), {}, text, stops, partial(probed_linear, probes, inputs)
            )
            means = {n: x[text.first - 1 :].astype(mx.float32).mean(axis=0) for n, x in inputs.items()}
            inputs.clear()
            if EMBEDDING in probes:
                means[EMBEDDING] = mx.array(token_shares(text.tokens[text.first - 1 : -1], self._vocab_size))
            stops.add(*means.values())
            evaluate(stops.slices(), pause)
            return {(module, layer): np.array(means[f"{layer}.{module}"]) for module, layer in places}

    def input_rows(
        self, places: Sequence[Place], text: TrainingText, rows: np.ndarray, pause: Pause | None = None
    ) -> dict[Place, np.ndarray]:
        """Return the inputs [n, in] float32 of each matrix at n positions of the answer, in the original
        model. rows: the indices of the positions in the answer."""
        with mx.stream(self._device):
            stops, inputs = Stops(), dict[str, mx.array]()
            probes = {f"{layer}.{module}": mx.zeros((), self._dtype) for module, layer in places}
            self._forward(
                self._layer_input(text, 0, pause), {}, text, stops, partial(probed_linear, probes, inputs)
            )
            at = mx.array(text.first - 1 + rows)
            found = {name: x[at].astype(mx.float32) for name, x in inputs.items()}
            inputs.clear()
            stops.add(*found.values())
            evaluate(stops.slices(), pause)
            return {(module, layer): np.array(found[f"{layer}.{module}"]) for module, layer in places}

    def scores(
        self,
        lora_a: Mapping[Place, np.ndarray],
        text: TrainingText,
        temperature: float,
        pause: Pause | None = None,
    ) -> dict[Place, np.ndarray]:
        """Return the gradient [rank, out] of the answer's log-probability with respect to lora_b of each
        matrix, at lora_b = 0. lora_a: [in, rank] for each matrix. temperature: the logits are divided by
        it."""
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops, zero = Stops(), {}
            layer_input = self._layer_input(text, min(layer for _, layer in lora_a), pause)
            fixed = {f"{layer}.{module}.a": mx.array(a) for (module, layer), a in lora_a.items()}
            for (module, layer), a in lora_a.items():
                shape = place_shape(self._config, module, layer)
                assert shape is not None
                zero[f"{layer}.{module}.b"] = mx.zeros((a.shape[1], shape[1]))

            def loss(factors):
                hidden = self._forward(layer_input, fixed | factors, text, stops)
                _, slope = self._loss_and_slope(mx.stop_gradient(hidden), logprob(text, temperature), stops)
                return mx.sum(hidden.astype(mx.float32) * slope)

            grads = mx.grad(loss)(zero)
            evaluate(stops.slices(), pause)
            evaluate(([grads[name]] for name in reversed(list(grads))), pause)
            return {
                (module, layer): np.array(grads[f"{layer}.{module}.b"]) * np.float32(text.answer_tokens)
                for module, layer in lora_a
            }

    def _probes(self, base: BaseLoRA, tokens: int) -> dict[str, mx.array]:
        """Return zeros [T, out] to add to the output of each matrix that the base LoRA changes. The gradient
        with respect to the zeros is the gradient with respect to the output."""
        return {
            f"{layer}.{module}": mx.broadcast_to(mx.zeros((1, 1), self._dtype), (tokens, b.shape[1]))
            for (module, layer), (_, b) in base.pairs.items()
            if module != "lm_head"
        }

    def states(self, base: BaseLoRA | None, text: TrainingText, pause: Pause | None = None) -> np.ndarray:
        """Return the output head's inputs [n, D] at the answer's n positions. base: None: no LoRA."""
        with mx.stream(self._device):
            base, stops = base or BaseLoRA({}), Stops()
            layer_input = self._layer_input(text, _first(base, len(self._graph.model.layers)), pause)
            hidden = self._forward(layer_input, self._factors(base), text, stops).astype(mx.float32)
            evaluate(stops.slices(), pause)
            return np.array(hidden)

    # -- one text ------------------------------------------------------------------------------------

    def _run(
        self,
        base: BaseLoRA,
        text: TrainingText,
        value: "Measure",
        weigh: Weigh,
        pause: Pause | None,
    ) -> tuple[float, Pairs]:
        BLAS.adapt(self._load.cores())
        with mx.stream(self._device):
            stops, out = Stops(), list[mx.array]()
            layer_input = self._layer_input(text, _first(base, len(self._graph.model.layers)), pause)

            def loss(factors):
                hidden = self._forward(layer_input, factors, text, stops)
                number, slope = self._loss_and_slope(mx.stop_gradient(hidden), value, stops)
                out.append(number)
                return mx.sum(hidden.astype(mx.float32) * slope)

            _, grads = mx.value_and_grad(loss)(self._factors(base))
            evaluate(stops.slices(), pause)
            number = float(cast(float, out[0].item()))
            weight = weigh(number)
            if weight == 0:
                return number, {}
            evaluate(([grads[name] for name in names] for names in from_the_last(grads, text)), pause)
            return number, self._pairs(base, grads, weight)

    def _factors(self, base: BaseLoRA) -> dict[str, mx.array]:
        """Return the layers' factors by name, such as "3.q_proj.a", with lora_b multiplied by the scale."""
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

    def _loss_and_slope(self, hidden: mx.array, measure: Measure, stops: Stops) -> Value:
        """Return the loss and its gradient with respect to `hidden` [n, D], some positions at a time."""

        def head(h):
            logits = graph.head(self._graph, h)
            for a, b in self._head:
                logits = logits + (h @ a) @ b
            return logits

        numbers, slopes = [], []
        for rows in evenly(len(hidden), max(1, LOGITS // self._vocab_size)):
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

    def _forward(
        self,
        layer_input: "LayerInput",
        factors: Mapping[str, mx.array],
        text: TrainingText,
        stops: Stops,
        run: Callable = linear,
        probe: mx.array | None = None,
    ) -> mx.array:
        """Run layer `layer_input.first` and all later layers. Return the answer's hidden states [n, D]. run:
        the function that runs linear layers. probe: zeros [T, D] to add to the embedding's output."""
        layers, x = self._graph.model.layers, changed_rows(layer_input.x, factors, text.tokens[:-1], probe)
        for i in range(layer_input.first, len(layers)):
            x = self._layer(x, layers[i], partial(run, factors, i), stops)
        return self._graph.model.norm(x[text.first - 1 :])

    def _layer_input(self, text: TrainingText, first: int, pause: Pause | None) -> "LayerInput":
        """Return the input of layer `first`. Training does not change this input, so it is cached."""
        layer_input = self._known.pop((text, first), None)
        if layer_input is None:
            x, stops = unwrap(self._graph.model.embed_tokens)(mx.array([text.tokens[:-1]]))[0], Stops()
            stops.add(x)
            for i, layer in enumerate(self._graph.model.layers[:first]):
                x = self._layer(x, layer, partial(linear, {}, i), stops)
            evaluate(stops.slices(), pause)
            layer_input = LayerInput(first, x)
        self._known[text, first] = layer_input
        while sum(b.x.nbytes for b in self._known.values()) > KNOWN:
            self._known.popitem(last=False)
        return layer_input

    def _layer(self, x: mx.array, layer: nn.Module, linear: Callable, stops: Stops) -> mx.array:
        """Return the output of one layer: x [T, D] -> [T, D]."""
        own, mlp, work = unwrap(layer.self_attn), layer.mlp, stage_work(len(x))
        y = layer.input_layernorm(x)
        q, k, v = linear(y, own, ("q_proj", "k_proj", "v_proj"))
        stops.add(q, k, v, work=work["v_proj"])
        out = self._attend(q, k, v, own)
        stops.add(out, work=work["q_proj"])
        x = x + linear(out, own, ("o_proj",))[0]
        stops.add(x, work=work["o_proj"])
        names = [name for name in ("gate_proj", "up_proj") if name in mlp]
        inner = mlp_inner(linear(layer.post_attention_layernorm(x), mlp, names), self._own)
        stops.add(inner, work=work["up_proj"])
        x = x + linear(inner, mlp, ("down_proj",))[0]
        stops.add(x, work=work["down_proj"])
        return x

    def _attend(self, q: mx.array, k: mx.array, v: mx.array, own: nn.Module) -> mx.array:
        """Return attention's output: q [T, n_heads * d], k, v [T, n_kv_heads * d] -> [T, n_heads * d]."""
        n, g, d = len(q), own.n_kv_heads, own.head_dim
        q, k, v = (y[None].swapaxes(1, 2) for y in own.split(q, k, v))
        q, k = own.turned_queries(q), own.turned_keys(k)
        q = (q * own.scale).reshape(g, -1, d)  # use one product for all queries that share a key/value head
        scores = (q @ k[0].swapaxes(-1, -2)).reshape(g, -1, n, n)
        scores = scores + self._positions.mask(n, n).astype(q.dtype)
        p: mx.array = softmax(scores) if self._own else mx.softmax(scores, axis=-1, precise=True)  # type: ignore[assignment]
        out: mx.array = p.reshape(g, -1, n) @ v[0]
        return out.reshape(-1, n, d).swapaxes(0, 1).reshape(n, -1)


def _first(base: BaseLoRA, layers: int) -> int:
    """Return the lowest layer that the base LoRA changes; `layers` if the base LoRA changes no layer. The
    embedding counts as layer 0, because its change comes after the cached input of that layer."""
    return min((layer for module, layer in base.pairs if module != "lm_head"), default=layers)

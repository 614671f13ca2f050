"""This module has two losses as functions of logits, with their gradients. The module also has activation
functions that are fast on a CPU. With p the softmax of the logits, both losses are means over n positions of
a text:

logprob:     mean log p(token)            d / d logits = (onehot(token) - p) / n
divergence:  mean KL(frozen || p)         d / d logits = (p - frozen) / n
"""

from collections.abc import Callable, Sequence

from ..backends.mlx import cpu_layers
from ..platform.mx import mx, nn
from .slices import Stops, TrainingText

Value = tuple[mx.array, mx.array]  # (loss [], gradient with respect to logits [n, V] or hidden states [n, D])
# A Measure computes a loss for some positions: (their logits, slice of the positions, stages of the pass) ->
# Value
Measure = Callable[[mx.array, slice, Stops], Value]


@mx.custom_function
def softmax(scores: mx.array) -> mx.array:
    """Return the softmax over the last axis, computed with an exp that is fast on a CPU."""
    e = cpu_layers.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@softmax.vjp
def _softmax_vjp(_, slope, p):
    return p * (slope - (slope * p).sum(axis=-1, keepdims=True))


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, where silu(g) = g / (1 + exp(-g)), computed with an exp that is fast on a
    CPU."""
    return gate * up / (1.0 + cpu_layers.exp(-gate))


@swiglu.vjp
def _swiglu_vjp(primals, slope, _):
    """Return the gradients of `swiglu` with respect to gate and up. silu'(g) = s + g s (1 - s), where s = 1 /
    (1 + exp(-g))."""
    gate, up = primals
    s = 1.0 / (1.0 + cpu_layers.exp(-gate))
    silu = gate * s
    return slope * up * (s + silu * (1.0 - s)), slope * silu


def mlp_inner(parts: Sequence[mx.array], own: bool) -> mx.array:
    """Return the input of an MLP's down_proj: silu(gate) * up, or gelu(up) if the MLP has no gate.

    parts: the outputs of gate_proj and up_proj, or of up_proj alone
    own: True to use this module's `swiglu`, which is fast on a CPU; False to use MLX's silu
    """
    if len(parts) == 1:
        return nn.gelu(parts[0])
    gate, up = parts
    return swiglu(gate, up) if own else nn.silu(gate) * up  # type: ignore[return-value]


def _distribution(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return softmax(logits) [n, V] and logsumexp(logits) [n, 1]."""
    top = logits.max(axis=-1, keepdims=True)
    e = cpu_layers.exp(logits - top)
    total = e.sum(axis=-1, keepdims=True)
    return e / total, top + mx.log(total)


def logprob(text: TrainingText, temperature: float = 1.0) -> Measure:
    """Return a Measure of the mean log-probability of the answer's tokens. The Measure gets the logits of
    some positions of the answer. The Measure returns the sum of the log-probabilities of these positions'
    tokens, and the gradient of the whole answer's mean log-probability with respect to these logits.

    temperature: the number by which the logits are divided
    """
    tokens = mx.array(text.tokens[text.first :])

    def measure(logits: mx.array, rows: slice, _: Stops) -> Value:
        said, scaled = tokens[rows], logits * (1 / temperature)
        p, log_total = _distribution(scaled)
        value = (mx.take_along_axis(scaled, said[:, None], axis=1) - log_total).sum()
        p[mx.arange(len(said)), said] -= 1.0
        return value, p * (-1.0 / (temperature * len(tokens)))

    return measure


def divergence(
    head: Callable[[mx.array], mx.array], frozen: mx.array, logits: mx.array, rows: slice, stops: Stops
) -> Value:
    """Return the sum of KL(frozen || p) over some positions, and the gradient of the mean over all N
    positions with respect to the logits of these positions. If `functools.partial` binds `head` and `frozen`,
    this function is a Measure.

    head: the original model's output head
    frozen: [N, D], the hidden states of the original model
    logits: [n, V], the logits of the n positions `rows`
    """
    untouched = head(frozen[rows]).astype(mx.float32)
    stops.add(untouched)
    (p, log_total), (q, log_total_q) = _distribution(logits), _distribution(untouched)
    stops.add(q)
    kl = mx.sum(q * (untouched - logits), axis=-1, keepdims=True) - log_total_q + log_total
    return kl.sum(), (p - q) * (1.0 / len(frozen))


def sums(x: mx.array, g: mx.array) -> tuple[mx.array, mx.array]:
    """Return the row sums [in] and the column sums [out] of the squared elements of G = x^T g, for x [T, in]
    and g [T, out].

    For few tokens T, the sums are computed without G [in, out]: sum_j G[i, j]^2 = sum_tu x_ti (g_t . g_u)
    x_ui.
    """
    x, g = x.astype(mx.float32), g.astype(mx.float32)
    (n, n_in), n_out = x.shape, g.shape[1]
    if 2 * n * (n_in + n_out) > n_in * n_out:
        full = mx.square(x.T @ g)
        return mx.sum(full, axis=1), mx.sum(full, axis=0)
    return mx.sum(((g @ g.T) @ x) * x, axis=0), mx.sum(((x @ x.T) @ g) * g, axis=0)

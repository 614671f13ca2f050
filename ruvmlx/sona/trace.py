"""This module records the trace of a reply while the model generates the reply. A trace is the gradient of
the reply's log-probability, and the reply's hidden states. A rating of this reply needs the trace.

With hidden state h, output head W, MicroLoRA factors a and b, scale s and token y, let u = a^T h, z = W h +
s b^T u and delta = onehot(y) - softmax(z). Then the gradient of the reply's log-probability (temperature 1)
is the sum over the reply's tokens of
    E_b = s u delta^T   [r, V]  (by b)        E_a = s h (b delta)^T   [D, r]  (by a)

A rating multiplies this gradient by one number, so a rating of a reply with a trace needs no second pass of
the model over the reply (instant.py).
"""

import io
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import adapted_logits
from ..kernels import micro as kernels
from ..kernels.replies import ReplyWork
from ..lora import MicroLoRA
from .reply_logits import ReplyLogits

Head = Callable[[np.ndarray], np.ndarray]  # hidden [T, D] -> logits [T, V]


@dataclass(frozen=True)
class ReplyStats:
    """The statistics of a reply under an adapter, with rank r, A movable tokens and k features
    (coordinates.py). The statistics are usually computed before the user rates the reply.

    gradient, information: [r, A + k], the gradient of the reply's log-probability and the Fisher information
        in the coordinates of coordinates.py, for a rating of weight 1
    praise: [r, A + k], the part of the gradient that a rating down leaves out: 1 - end_credit (instant.py)
        times the end token's gradient
    beside: [r, A + 1], the part of lora_b, at a gain of 1, that comes neither from ratings nor from the taste
        model
    covered: True if the adapter changes only movable tokens, whose logits ratings may change
    finite: True if the gradients and lora_a have no NaN, no Inf and no extremely large numbers
    """

    gradient: np.ndarray
    praise: np.ndarray
    information: np.ndarray
    beside: np.ndarray
    covered: bool
    finite: bool


@dataclass(frozen=True)
class LayerGradient:
    """The gradient of a reply's log-probability by the n numbers of a LayerLoRA's lora_b. A LayerLoRA changes
    layers below the output head.

    frame: the checksum of the LayerLoRA's lora_a
    values: [n], the gradient, summed over the reply's tokens (of a very long reply, over a part of them)
    tokens: the number of the reply's tokens in this sum. For two compared replies, the number is the sum of
        abs(weight) * tokens of both replies.
    """

    frame: int
    values: np.ndarray
    tokens: float


@dataclass
class Trace:
    """The gradient of one reply's log-probability under one adapter version. The function `add` is called
    once for each sampled token.

    The trace keeps the hidden states [T, D] of the T tokens. So the gradient can be computed again after the
    adapter has changed.
    """

    adapter: MicroLoRA
    version: int
    grad_a: np.ndarray = field(init=False)
    grad_b: np.ndarray = field(init=False)
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # the sum of log p(y) over the tokens y, with the adapter
    frozen_logprob: float = 0.0  # the sum of log p(y) over the tokens y, without the MicroLoRA
    # The value of `logprob` when the reply was generated; None if this trace was recorded at that time.
    drawn_logprob: float | None = None
    stats: ReplyStats | None = None
    logits: ReplyLogits | None = None  # None: the rating must run the output head, which takes longer
    layer_gradient: LayerGradient | None = None  # None if it was not computed; only changes of layers need it
    # The sum of log p(y) under the base LoRA alone; None without a layer LoRA, because it equals
    # frozen_logprob.
    base_logprob: float | None = None
    # First-order estimates of changes of the mean log p(y), nats per token:
    carried: float = 0.0  # the change of mean log p(y) by the layer LoRA with which the reply was generated
    moved: float = 0.0  # the change of mean log p(y) by later changes of the layer LoRA

    def __post_init__(self) -> None:
        self.grad_a = np.zeros_like(self.adapter.lora_a)
        self.grad_b = np.zeros_like(self.adapter.lora_b)
        self._hidden: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes of the gradient, the hidden states and the stored logits. The layer gradient is
        not included."""
        hidden = sum(hidden.nbytes for hidden in self._hidden)
        return self.grad_a.nbytes + self.grad_b.nbytes + hidden + (self.logits.nbytes if self.logits else 0)

    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Add one token of the reply to the trace.

        hidden: [D], the hidden state that is the input of the output head
        logits: [V], the logits with the adapter
        token: the token that was sampled from these logits
        """
        logprob, frozen = kernels.trace_accumulate(
            hidden,
            logits,
            token,
            self.adapter.lora_a,
            self.adapter.lora_b,
            self.adapter.scale,
            self.grad_a,
            self.grad_b,
        )
        self._append_token(hidden, token, logprob, frozen)

    def work(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> list[ReplyWork]:
        """Return the kernel call that adds one token, as `add` does. The caller runs the kernel calls of
        several traces together."""
        a = self.adapter
        return [
            kernels.trace_work(
                hidden, logits, token, a.lora_a, a.lora_b, a.scale, self.grad_a, self.grad_b,
                lambda logprob, frozen: self._append_token(hidden, token, logprob, frozen),
            )
        ]  # fmt: skip

    def _append_token(self, hidden: np.ndarray, token: int, logprob: float, frozen: float) -> None:
        self.logprob += logprob
        self.frozen_logprob += frozen
        self.tokens.append(token)
        self._hidden.append(hidden)

    @property
    def hidden_states(self) -> np.ndarray:
        """The hidden states of the T tokens: [T, D] float32."""
        return np.stack(self._hidden)

    @property
    def log_ratio(self) -> float:
        """The log-ratio rho of the reply: the mean over tokens y of log p(y) - log p_base(y), in nats. p
        includes the MicroLoRA and the layer LoRA; p_base is the model with only the base LoRA, if there is
        one."""
        frozen = self.frozen_logprob if self.base_logprob is None else self.base_logprob
        return (self.logprob - frozen) / len(self.tokens) + self.moved

    @property
    def importance(self) -> float:
        """The importance ratio (p_now(reply) / p_drawn(reply))^(1/T), at most 1. p_drawn is the probability
        when the reply was generated, and T is the number of tokens.

        This factor lowers the effect of a bad rating of a reply that has become unlikely (TOPR's taper, arXiv
        2503.14286). The ratio is per token as in GSPO (arXiv 2507.18071), because the ratio for a
        whole reply is nearly always about 0 or at least 1.
        """
        drawn = self.logprob if self.drawn_logprob is None else self.drawn_logprob
        return float(np.exp(min(0.0, (self.logprob - drawn) / len(self.tokens) + self.moved)))

    def replay(self, adapter: MicroLoRA, version: int, head) -> "Trace":
        """Compute the trace of the same reply under another adapter from the hidden states. head: the
        function from hidden states to logits."""
        new = Trace(adapter, version)
        at = 0
        for hidden, logits in adapted_logits(adapter, self.hidden_states, head):
            for h, z in zip(hidden, logits, strict=True):
                new.add(h, z, self.tokens[at])
                at += 1
        new.drawn_logprob = self.logprob if self.drawn_logprob is None else self.drawn_logprob
        new.layer_gradient, new.base_logprob = self.layer_gradient, self.base_logprob
        new.carried, new.logits = self.carried, self.logits
        return new

    @classmethod
    def from_hidden(cls, adapter, version, hidden, tokens, head, drawn_logprob: float | None) -> "Trace":
        """Compute the trace of a reply from its tokens and hidden states [T, D].

        drawn_logprob: the reply's log-probability when it was generated; None if the reply was generated
            without an adapter
        """
        seed = cls(adapter, version, tokens=list(tokens))
        seed._hidden = list(hidden)
        new = seed.replay(adapter, version, head)
        new.drawn_logprob = new.frozen_logprob if drawn_logprob is None else drawn_logprob
        return new

    def to_bytes(self) -> bytes:
        out = io.BytesIO()
        facts = [self.version, self.logprob, self.frozen_logprob, self.drawn_logprob]
        np.savez(
            out,
            grad_a=self.grad_a,
            grad_b=self.grad_b,
            hidden=self.hidden_states,
            tokens=np.asarray(self.tokens, np.int32),
            facts=np.array([np.nan if f is None else f for f in facts]),
            **self._layer_arrays(),  # type: ignore[arg-type]
        )
        return out.getvalue()

    def _layer_arrays(self) -> dict[str, np.ndarray]:
        found = {}
        if self.layer_gradient is not None:
            frame = [self.layer_gradient.frame, self.layer_gradient.tokens]
            found = {"body": self.layer_gradient.values, "frame": np.array(frame)}
        if self.layer_gradient is not None or self.base_logprob is not None:
            base = np.nan if self.base_logprob is None else self.base_logprob
            found["layers"] = np.array([base, self.carried])
        return found

    @classmethod
    def from_bytes(cls, data: bytes, adapter: MicroLoRA) -> "Trace | None":
        """Decode a stored trace. Return None if the data is damaged or has another shape; the caller then
        computes the trace again from the tokens.

        adapter: the adapter version under which the trace was stored. With another version, the caller must
            call `replay` before it uses the gradient.
        """
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as f:
                stored = {k: f[k] for k in f.files}
            facts = [None if np.isnan(x) else float(x) for x in stored["facts"]]
            new = cls(adapter, int(facts[0] or 0), tokens=stored["tokens"].tolist())
            if stored["grad_b"].shape != new.grad_b.shape or stored["grad_a"].shape != new.grad_a.shape:
                return None
            new.grad_a, new.grad_b = stored["grad_a"], stored["grad_b"]
            new._hidden = list(stored["hidden"])
            new.logprob, new.frozen_logprob = facts[1] or 0.0, facts[2] or 0.0
            new.drawn_logprob = facts[3]
            if "body" in stored:
                frame, tokens = (int(x) for x in stored["frame"])
                new.layer_gradient = LayerGradient(frame, stored["body"], tokens)
            if "layers" in stored:
                base, new.carried = (float(x) for x in stored["layers"])
                new.base_logprob = None if np.isnan(base) else base
            return new
        except (ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
            return None


Weighed = Sequence[tuple[Trace, float]]  # (trace of a reply, weight of the reply in the update)


def mean_logprobs(trace: Trace, adapters: Sequence[MicroLoRA], head: Head, base: int) -> list[float]:
    """Return the mean log-probability per token (nats) of the trace's reply under each of some MicroLoRAs.

    head: the function from hidden states to logits without a MicroLoRA
    base: the id of the base LoRA with which `head` computes
    """
    known = trace.logits
    if known and known.base == base and all(map(known.coordinates.covers, adapters)):
        hidden = trace.hidden_states
        return [known.mean_logprob(adapter, hidden) for adapter in adapters]
    tokens, sums, at = np.asarray(trace.tokens, np.int32), [0.0] * len(adapters), 0
    for hidden, frozen in adapted_logits(None, trace.hidden_states, head):
        for i, adapter in enumerate(adapters):
            logits = frozen.copy()
            adapter.add_to_logits(logits, hidden)
            sums[i] += float(kernels.logprobs(logits, tokens[at : at + len(hidden)]).sum())
        at += len(hidden)
    return [total / len(tokens) for total in sums]

"""This module records the trace of a reply while the reply is generated: its gradient and hidden states, for
a later rating.

With hidden state h, head W, MicroLoRA factors a and b, scale s and token y, let u = a^T h, z = W h + s b^T u
and delta = onehot(y) - softmax(z). Then the gradient of the reply's log-probability (temperature 1) is the
sum over its tokens of

    E_b = s u delta^T   [r, V]            E_a = s h (b delta)^T   [D, r]

A rating is a scalar factor of this gradient, so it needs no second pass over the reply (instant.py).
"""

import io
import zipfile
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import adapted_logits
from ..kernels import micro as kernels
from ..kernels.replies import ReplyWork
from ..lora import MicroLoRA


@dataclass(frozen=True)
class ReplyStats:
    """The statistics of a reply under an adapter. They are computed before the user rates the reply.

    gradient, information: [r, A + k], the gradient and the Fisher information in the coordinates of
        instant.py, for a rating of weight 1
    praise: [r, A + k], the part of the gradient from the end token that is beyond end_credit (instant.py)
    beside: [r, A + 1], the part of lora_b that does not follow from earlier ratings, at a gain of 1
    covered: True if the adapter moves only tokens that ratings may move
    finite: True if the gradients and lora_a have no NaN, Inf or far too large numbers
    """

    gradient: np.ndarray
    praise: np.ndarray
    information: np.ndarray
    beside: np.ndarray
    covered: bool
    finite: bool


@dataclass(frozen=True)
class LayerGradient:
    """The gradient of a reply's log-probability by the lora_b [n] of a LayerLoRA.

    values: [n], summed over `tokens` tokens of the reply
    frame: the checksum of the LayerLoRA's lora_a
    """

    frame: int
    values: np.ndarray
    tokens: int


@dataclass
class Trace:
    """The gradient of one reply under one adapter version. `add` is called once per drawn token.

    hidden [T, D] is kept, so that the gradient can be computed again after the adapter has changed.
    """

    adapter: MicroLoRA
    version: int
    grad_a: np.ndarray = field(init=False)
    grad_b: np.ndarray = field(init=False)
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0  # the sum of log p(y) over the tokens, with the adapter
    frozen_logprob: float = 0.0  # the same sum without the adapter
    # `logprob` when the reply was generated; None if this trace was recorded at that time.
    drawn_logprob: float | None = None
    stats: ReplyStats | None = None
    layer_gradient: LayerGradient | None = None  # None unless ratings change layers below the head
    # `logprob` under the base alone; None if there is no layer LoRA, because then it equals frozen_logprob.
    base_logprob: float | None = None
    # First-order estimates of parts of the mean log p(y), nats per token:
    carried: float = 0.0  # the part of the layer LoRA with which the reply was generated
    moved: float = 0.0  # the part of later changes of the layer LoRA

    def __post_init__(self) -> None:
        self.grad_a = np.zeros_like(self.adapter.lora_a)
        self.grad_b = np.zeros_like(self.adapter.lora_b)
        self._hidden: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes of the gradient and hidden states, without gradients of layers below the
        head."""
        return self.grad_a.nbytes + self.grad_b.nbytes + sum(hidden.nbytes for hidden in self._hidden)

    def add(self, hidden: np.ndarray, logits: np.ndarray, token: int) -> None:
        """Add one token. hidden: [D], the state before the head. logits: [V], with the adapter. token: the
        token that was drawn from these logits."""
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
        """Return the kernel call of `add`. The caller runs the calls of several traces together."""
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
    def hidden(self) -> np.ndarray:
        """The hidden states of the T tokens: [T, D] float32."""
        return np.stack(self._hidden)

    @property
    def log_ratio(self) -> float:
        """The log-ratio rho: the mean over tokens of log p(y) - log p_frozen(y), in nats. p includes the
        layer LoRA."""
        frozen = self.frozen_logprob if self.base_logprob is None else self.base_logprob
        return (self.logprob - frozen) / len(self.tokens) + self.moved

    @property
    def importance(self) -> float:
        """The importance ratio (p_now(reply) / p_drawn(reply))^(1/T), at most 1.

        With this factor, a bad rating has less effect on a reply that has become unlikely; this is TOPR's
        taper (arXiv 2503.14286). The ratio is per token as in GSPO (arXiv 2507.18071), because the ratio of
        whole replies is nearly always 0 or 1.
        """
        drawn = self.logprob if self.drawn_logprob is None else self.drawn_logprob
        return float(np.exp(min(0.0, (self.logprob - drawn) / len(self.tokens) + self.moved)))

    def replay(self, adapter: MicroLoRA, version: int, head) -> "Trace":
        """Return the trace of the same reply under another adapter."""
        new = Trace(adapter, version)
        at = 0
        for hidden, logits in adapted_logits(adapter, self.hidden, head):
            for h, z in zip(hidden, logits, strict=True):
                new.add(h, z, self.tokens[at])
                at += 1
        new.drawn_logprob = self.logprob if self.drawn_logprob is None else self.drawn_logprob
        new.layer_gradient, new.base_logprob = self.layer_gradient, self.base_logprob
        new.carried = self.carried
        return new

    @classmethod
    def from_hidden(cls, adapter, version, hidden, tokens, head, drawn_logprob: float | None) -> "Trace":
        """Return the trace of a reply from its tokens and hidden states [T, D].

        drawn_logprob: the reply's log-probability when it was generated; None if it was generated without an
            adapter
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
            hidden=self.hidden,
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
        """Return a stored trace; None if the data is damaged or has another shape; the caller then computes
        the trace again from the tokens.

        adapter: the adapter of the stored version; with another adapter, the caller must call `replay` before
            use
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

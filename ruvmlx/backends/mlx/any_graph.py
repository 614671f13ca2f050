"""This module splits an mlx-lm model into two functions, because MicroLoRA needs both: one returns the hidden
states of tokens, the other returns the logits of hidden states.

In most of mlx-lm's models, `Model.__call__` calls a submodule that returns the hidden states after the final
norm. After the submodule, `Model.__call__` computes logits from the hidden states, with an output head or the
tied embedding, and often scales or caps the logits. This module runs a few tokens to find the submodule that
returns the hidden states, and wraps the submodule. The wrapper records the output of the submodule. To
compute logits of given hidden states, the wrapper returns the given states in place of running the submodule.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ...errors import CorruptFile, UnsupportedModel
from ...models.config.model import ModelShape
from ...platform.mx import mx, nn

PROBE = (0, 1, 2)  # the token ids of the test run in `_split`


class _HiddenStates:
    """A wrapper of the submodule that computes the hidden states after the final norm. given: an array that
    the wrapper returns in place of the submodule's output; None: the wrapper runs the submodule."""

    def __init__(self, module: nn.Module):
        self._module = module
        self.given: mx.array | None = None
        self.last: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.given is not None:
            return self.given
        self.last = self._module(*args, **kwargs)
        return self.last

    # the model also reads the wrapped submodule's attributes, for example its layers and its embedding
    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class SplitGraph:
    """An mlx-lm model with two methods: `hidden_states` of tokens, and `logits` of hidden states. The
    constructor raises UnsupportedModel if the model cannot be split, and CorruptFile if the model's sizes
    differ from the sizes in `shape`.

    dtype: the dtype of the hidden states
    """

    def __init__(self, model: nn.Module, shape: ModelShape):
        self.model = model
        self._body, found = _split(model, shape.model_type)
        self.dtype = found.dtype
        if found.sizes != (shape.hidden_size, shape.vocab_size):
            raise CorruptFile(
                f"the {shape.model_type} model has hidden states of {found.sizes[0]} numbers and "
                f"{found.sizes[1]} tokens; its config.json says {shape.hidden_size} and {shape.vocab_size}."
            )

    def hidden_states(self, tokens: mx.array, caches: Sequence[Any] | None) -> mx.array:
        """Return hidden states [B, L, D] of tokens [B, L]. The model also builds the graph of the logits, but
        MLX evaluates lazily and never computes these logits."""
        self.model(tokens, cache=caches)
        found, self._body.last = self._body.last, None
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [B, L, V] of hidden states [B, L, D], with the scale or cap that the model itself
        applies to logits."""
        self._body.given = hidden
        try:
            return _array(self.model(mx.zeros(hidden.shape[:2], mx.uint32)))
        finally:
            self._body.given = None


class _Found(NamedTuple):
    sizes: tuple[int, int]  # D, V
    dtype: mx.Dtype


def _split(model: nn.Module, kind: str) -> tuple[_HiddenStates, _Found]:
    """Find and wrap the first submodule on whose output alone the model's logits depend."""
    whole = _array(model(mx.array([PROBE], mx.uint32)))
    for owner, name, module in _submodules(model):
        body = _HiddenStates(module)
        setattr(owner, name, body)
        if (hidden := _body_states(model, body, whole)) is not None:
            return body, _Found((hidden.shape[-1], whole.shape[-1]), hidden.dtype)
        setattr(owner, name, module)
    raise UnsupportedModel(
        f"model_type {kind!r}: its mlx-lm model does not separate hidden states from the output head, "
        "so ratings could not change it; choose another model."
    )


def _submodules(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the model's direct submodules, then the submodules of its language model if there is one."""
    inner = getattr(model, "language_model", None)
    for owner in (model, inner) if isinstance(inner, nn.Module) else (model,):
        for name, child in list(owner.children().items()):
            if isinstance(child, nn.Module):
                yield owner, name, child


def _body_states(model: nn.Module, body: _HiddenStates, whole: mx.array) -> mx.array | None:
    """Return the output [1, L, D] of the submodule `body` for the PROBE tokens if the logits depend on this
    output alone; else None. whole: the model's logits [1, L, V] of the PROBE tokens."""
    again = _array(model(mx.array([PROBE], mx.uint32)))
    hidden = body.last
    if not isinstance(hidden, mx.array) or hidden.ndim != 3 or hidden.shape[:2] != whole.shape[:2]:
        return None
    if hidden.shape[-1] == whole.shape[-1] and bool(mx.array_equal(hidden, whole)):
        # This submodule returns logits: it is a language model with its own output head, so the search
        # continues with the submodules of `language_model`.
        return None
    body.given = hidden
    try:
        other_tokens = mx.zeros(whole.shape[:2], mx.uint32)
        same = mx.array_equal(_array(model(other_tokens)), again, equal_nan=True)
    finally:
        body.given = body.last = None
    return hidden if bool(same) else None


def _array(output: Any) -> mx.array:
    """Return the logits from the return value of a model's call. Some models return other values together
    with the logits."""
    return output if isinstance(output, mx.array) else getattr(output, "logits", output[0])

"""Runs the GPU's code path without a GPU, to count or time how a step's graph is built."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from ruvmlx.platform import mlxlm
from ruvmlx.platform.gpu import GPU
from ruvmlx.platform.mx import mx

Make = Callable[[str, list[mx.array], tuple[int, ...], mx.Dtype], mx.array]

# Each is one kernel on a GPU and several small operations elsewhere, and returns an array like its first
# input. mlx-lm compiles swiglu into one kernel.
FUSED = (
    (mx.fast, "rms_norm"),
    (mx.fast, "rope"),
    (mx.fast, "scaled_dot_product_attention"),
    (mlxlm.load("models.llama"), "swiglu"),
)


@contextmanager
def as_on_gpu(run: Callable[..., list[mx.array]], fused: Make) -> Iterator[None]:
    """`run` replaces the launch of our kernels (see Kernel.launch); `fused` replaces each fused operation."""
    with ExitStack() as stack:
        for name, value in (("kind", "metal"), ("device", mx.Device(mx.cpu))):
            stack.enter_context(mock.patch.object(GPU, name, value))
        stack.enter_context(mock.patch.object(GPU, "run", lambda _, *arguments: run(*arguments)))
        for owner, name in FUSED:
            stack.enter_context(mock.patch.object(owner, name, _single(name, fused)))
        stack.enter_context(mock.patch.object(mx, "dequantize", _single("dequantize", fused, packed=True)))
        yield


def _single(name: str, fused: Make, packed: bool = False) -> Callable[..., mx.array]:
    """Calls `fused` in place of the operation. packed: the input holds 4-bit numbers, eight to a word."""

    def make_array(*arrays: Any, **options: Any) -> mx.array:
        inputs = [array for array in (*arrays, *options.values()) if isinstance(array, mx.array)]
        shape, dtype = inputs[0].shape, inputs[0].dtype
        if packed:
            shape, dtype = (*shape[:-1], 8 * shape[-1]), inputs[1].dtype
        return fused(name, inputs, shape, dtype)

    return make_array


class Placeholders:
    """Operations that wait for their inputs and compute nothing: only the host's work is left of a step.

    Each is one graph node, whatever the number of outputs, like a kernel.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}
        self._outputs: dict[Any, list[mx.Dtype]] = {}

    def run(
        self,
        kernel: Any,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: Sequence[Any],
    ) -> list[mx.array]:
        key = kernel, templates
        if key not in self._outputs:
            dtypes = kernel.dtypes(templates)
            self._outputs[key] = [dtypes[c_type] for _, c_type in kernel.outputs]
        pairs = zip(shapes, self._outputs[key], strict=True)
        return mx.depends([self._array(*pair) for pair in pairs], list(inputs))

    def fused_result(
        self, name: str, inputs: list[mx.array], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        return mx.depends([self._array(shape, dtype)], inputs)[0]

    def _array(self, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        if (shape, dtype) not in self._made:
            self._made[shape, dtype] = mx.zeros(shape, dtype)
            mx.eval(self._made[shape, dtype])
        return self._made[shape, dtype]

"""Kernel bodies -> what mx.fast.metal_kernel and mx.fast.cuda_kernel want.

A `Kernel` names a file of metal_kernels/ and its arguments once; Metal, CUDA and the tests' simulator
are all built from that. metal_kernels/README.md describes the dialect that the bodies are written in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruvmlx.backends.mx import mx

START = """const uint3 group_at = threadgroup_position_in_grid;
const uint thread_at = thread_index_in_threadgroup;
const uint lane = thread_at % 32, simd_at = thread_at / 32;
(void)lane, (void)simd_at;"""

_PACKAGE = Path(__file__).resolve().parents[2]


@cache
def folder() -> Path:
    """Where the bodies are: inside the installed package, or at the top of a checkout."""
    inside = _PACKAGE / "metal_kernels"
    return inside if inside.is_dir() else _PACKAGE.parent / "metal_kernels"


@cache
def text(name: str) -> str:
    return (folder() / name).read_text()


@dataclass(frozen=True)
class Kernel:
    """One .metal body and its arguments.

    Arrays have at least 8 elements: MLX passes smaller ones in another address space.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]  # (name, C type)
    outputs: tuple[tuple[str, str], ...]
    templates: tuple[str, ...]  # int parameters
    threads: int  # of a threadgroup
    headers: tuple[str, ...] = ("pages.h",)

    def header(self, dialect: str) -> str:
        return "\n".join(text(name) for name in (f"dialect_{dialect}.h", *self.headers))

    def body(self) -> str:
        return text(f"{self.name}.metal")

    def __call__(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: Sequence[int],
        verbose: bool = False,
    ) -> list[mx.array]:
        """Run on the GPU: `groups` threadgroups in x, y, z; fresh outputs of `shapes`."""
        for (name, _), array in zip(self.inputs, inputs, strict=True):
            if array.size < 8:
                raise ValueError(f"[{self.name}] {name} has {array.size} elements, must have at least 8")
        x, y, z = groups
        return _compiled(self)(
            inputs=list(inputs),
            template=list(zip(self.templates, templates, strict=True)),
            grid=(x * self.threads, y, z),
            threadgroup=(self.threads, 1, 1),
            output_shapes=list(shapes),
            output_dtypes=[DTYPES[c_type] for _, c_type in self.outputs],
            stream=mx.gpu,
            verbose=verbose,
        )


DTYPES = {"float": mx.float32, "int": mx.int32, "uchar": mx.uint8, "ushort": mx.uint16, "uint": mx.uint32}


@cache
def _compiled(kernel: Kernel) -> Any:
    names = [name for name, _ in kernel.inputs], [name for name, _ in kernel.outputs]
    name = f"ruvmlx_{kernel.name}"
    if mx.cuda.is_available():
        return mx.fast.cuda_kernel(name, *names, kernel.body(), kernel.header("cuda"))
    source = kernel.body().replace("KERNEL_START", START)
    return mx.fast.metal_kernel(
        name, *names, source, kernel.header("metal"), compile_options={"math_mode": "safe"}
    )


HEAD_DIMS = 64, 80, 128  # that the attention and demotion kernels are made for


def on_gpu(head_dim: int = 64) -> bool:
    """Do operations of this thread run on a device that runs the kernels, and do the heads fit them?"""
    if head_dim not in HEAD_DIMS or mx.default_device() != mx.Device(mx.gpu):
        return False
    return mx.metal.is_available() or mx.cuda.is_available()

"""This module turns kernel bodies into the arguments of mx.fast.metal_kernel and mx.fast.cuda_kernel.

A `Kernel` object describes a kernel once: its file in metal_kernels/ and its arguments. From a `Kernel`, the
module builds the kernels for Metal, for CUDA and for the tests' simulator. metal_kernels/README.md describes
the dialect of the bodies.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruvmlx.platform.gpu import Template, gpu
from ruvmlx.platform.mx import mx

from .prune import Definition, definitions, join_definitions, prune

# START has no line break, so that compilers report the right line numbers.
START = (
    "const uint3 group_at = threadgroup_position_in_grid; "
    "const uint thread_at = thread_index_in_threadgroup; "
    "const uint lane = thread_at % 32, simd_at = thread_at / 32; (void)lane, (void)simd_at;"
)

_PACKAGE = Path(__file__).resolve().parents[3]


@cache
def folder() -> Path:
    """Return the folder of the kernel bodies: inside the installed package, or at the top of a checkout."""
    inside = _PACKAGE / "metal_kernels"
    return inside if inside.is_dir() else _PACKAGE.parent / "metal_kernels"


# The expression matches literals first, so that `//` in a literal is not a comment. Numbers are matched first
# too, because the quote in 1'000 does not open a character.
_TOKEN = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\\n])*" | \b\d(?:'?\w)* | '(?:\\.|[^'\\\n])+')
    | //(?:\\\n|[^\n])* | /\*.*?\*/""",
    re.S | re.X,
)


def without_comments(code: str) -> str:
    """Return C or Metal code without comments and without spaces at the ends of lines. The number of each
    line stays the same."""

    def short(match: re.Match[str]) -> str:
        return match["kept"] or "\n" * match[0].count("\n") or " "

    return re.sub(r"^[ \t]+|[ \t]+$", "", _TOKEN.sub(short, code), flags=re.M)


@cache
def text(name: str) -> str:
    """Return the text of a file without comments, because MLX hashes the whole text at every call. Line
    breaks are kept, so that compilers report the right lines."""
    code = without_comments((folder() / name).read_text())
    first = len(code) - len(code.lstrip("\n"))
    return f'#line {first + 1} "{name}"\n{code.strip()}\n'


_CONDITION = re.compile(r"^#ifdef (\w+)\n(.*?)^#endif\n", re.S | re.M)


def with_option(code: str, option: str) -> str:
    """Return a body's text in which each `#ifdef WORD .. #endif` is replaced: by its lines if WORD is
    `option`, and otherwise by empty lines. The number of each line stays the same."""

    def lines(match: re.Match[str]) -> str:
        return f"\n{match[2]}\n" if match[1] == option else "\n" * match[0].count("\n")

    return _CONDITION.sub(lines, code)


@cache
def pieces(name: str) -> tuple[Definition, ...]:
    """Return the definitions of a header."""
    return tuple(definitions(name, without_comments((folder() / name).read_text())))


# kernels are compared by identity, because a comparison of all their fields would make each launch slower
@dataclass(frozen=True, eq=False)
class Kernel:
    """A GPU kernel: its name, its body and its arguments.

    Arrays must have at least 8 elements, because MLX passes smaller arrays in another address space.
    """

    name: str
    inputs: tuple[tuple[str, str], ...]  # (name, C type)
    outputs: tuple[tuple[str, str], ...]
    templates: tuple[str, ...]  # names of int parameters; "T" is the type of the arrays whose C type is "T"
    threads: int  # the number of threads of a threadgroup
    headers: tuple[str, ...] = ("pages.h",)
    values: tuple[tuple[Template, ...], ...] = ((),)  # all values of the templates that the backends can use
    # the word whose `#ifdef` lines the kernel takes from its body; "": it takes no such lines
    option: str = ""

    def header(self, dialect: str) -> str:
        """Return the definitions in the kernel's header files that its body needs, in this dialect."""
        every = [piece for name in (f"dialect_{dialect}.h", *self.headers) for piece in pieces(name)]
        # The text starts with a line break, because MLX writes text before it that can end without a line
        # break.
        return "\n" + join_definitions(prune(every, self.body()))

    @property
    def file(self) -> str:
        """Return the name of the file with the body. The name of a kernel with an option is the name of the
        kernel without the option, then "_" and the option in lower case."""
        return self.name.removesuffix(f"_{self.option.lower()}") + ".metal"

    def body(self) -> str:
        return with_option(text(self.file), self.option)

    def metal_body(self) -> str:
        return self.body().replace("KERNEL_START", START)

    def dtypes(self, templates: Sequence[Template]) -> dict[str, mx.Dtype]:
        """Return {C type of an argument: MLX's dtype} for these template values."""
        chosen = zip(self.templates, templates, strict=True)
        return DTYPES | {name: value for name, value in chosen if isinstance(value, mx.Dtype)}

    def __call__(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> list[mx.array]:
        """Run the kernel on the GPU. Return new output arrays.

        shapes: the shapes of the output arrays
        groups: the number of threadgroups in x, y and z
        """
        return gpu.run(self, inputs, shapes, groups, templates)

    def launch(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> list[mx.array]:
        """Launch the kernel. On a real device, `gpu.run` calls this method."""
        return _compiled_kernel(self)(**self.arguments(inputs, shapes, groups, templates))

    def arguments(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> dict[str, Any]:
        """Return the arguments of `launch` in the form that MLX's kernel functions take."""
        x, y, z = groups
        if (self, templates) not in _CHECKED:
            self._check(inputs)
            _CHECKED.add((self, templates))
        return {
            **_fixed_arguments(self, templates),
            "inputs": inputs,
            "grid": (x * self.threads, y, z),
            "output_shapes": shapes,
        }

    def _check(self, inputs: Sequence[mx.array]) -> None:
        """Raise ValueError if an input is too small. For each set of template values, the check runs only at
        the first launch, to save time. The callers make all inputs large enough."""
        for (name, _), array in zip(self.inputs, inputs, strict=True):
            if array.size < 8:
                raise ValueError(f"[{self.name}] {name} has {array.size} elements, must have at least 8")

    def names(self) -> tuple[str, list[str], list[str]]:
        """Return the names of the kernel, its inputs and its outputs, in the form that MLX's kernel functions
        need."""
        return f"ruvmlx_{self.name}", [name for name, _ in self.inputs], [name for name, _ in self.outputs]


_CHECKED: set[tuple[Kernel, tuple[Template, ...]]] = set()
DTYPES = {"float": mx.float32, "int": mx.int32, "uchar": mx.uint8, "ushort": mx.uint16, "uint": mx.uint32}


@cache
def _fixed_arguments(kernel: Kernel, templates: tuple[Template, ...]) -> dict[str, Any]:
    """Return the arguments that are the same in all calls of a kernel with these template values."""
    kinds = kernel.dtypes(templates)
    return {
        "template": list(zip(kernel.templates, templates, strict=True)),
        "threadgroup": (kernel.threads, 1, 1),
        "output_dtypes": [kinds[c_type] for _, c_type in kernel.outputs],
        "stream": mx.gpu,
    }


@cache
def _compiled_kernel(kernel: Kernel) -> Any:
    return for_cuda(kernel) if mx.cuda.is_available() else for_metal(kernel)


@cache
def for_cuda(kernel: Kernel) -> Any:
    return mx.fast.cuda_kernel(*kernel.names(), kernel.body(), kernel.header("cuda"))


@cache
def for_metal(kernel: Kernel) -> Any:
    options = {"math_mode": "safe"}
    return mx.fast.metal_kernel(
        *kernel.names(), kernel.metal_body(), kernel.header("metal"), compile_options=options
    )


HEAD_DIMS = 64, 80, 128, 256  # the head sizes for which the attention and demotion kernels are made
FLOATS = mx.float32, mx.float16, mx.bfloat16  # the types in which a graph can compute


def on_gpu(head_dim: int = 64) -> bool:
    """Return True if this thread's device can run the kernels, and if there are kernels for this head
    size."""
    return head_dim in HEAD_DIMS and gpu.kind != "" and mx.default_device() == gpu.device

"""This module writes the Metal source of the kernels to files, one file for each set of a kernel's template
values. The module needs no GPU.

MLX makes the text of a kernel when MLX traces a call of the kernel: header, signature, body and the
template's instantiation. Before the text of a kernel, MLX puts its own preamble, metal::utils(), which Python
code cannot read. PREAMBLE replaces that preamble, so that a file can be compiled alone:
xcrun -sdk macosx metal -c attend_decode-D64-G3.metal
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruvmlx.errors import RuvmlxError
from ruvmlx.platform.mx import mx

from . import append, decode, demote, gather, rope_append
from .source import Kernel, Template, for_metal

# The kernels that run on Metal. The field Kernel.values has the template values of each kernel.
KERNELS = (
    *(rope_append.ROPE_APPEND, decode.ATTEND, decode.WITH_SLOPES[decode.ATTEND], decode.MERGE),
    *(append.APPEND, gather.GATHER),
    demote.DEMOTE,
)
PREAMBLE = """\
// {title}: the source as MLX compiles it, but for MLX's own preamble. These lines stand in for that:
#include <metal_stdlib>
using namespace metal;
typedef half float16_t;
#if __METAL_VERSION__ >= 310
typedef bfloat bfloat16_t;
#endif

"""


def export(folder: Path) -> list[Path]:
    """Write all sources into `folder`; make the folder if it does not exist. Return the paths of the
    files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write_kernel(folder, kernel, chosen) for kernel, chosen in sources()]
    except OSError as e:
        raise RuvmlxError(
            f"Metal sources cannot be written to {folder}: {e.strerror}. Name a folder that you may write to."
        ) from e


def sources() -> Iterator[tuple[Kernel, tuple[Template, ...]]]:
    """Yield each kernel with each set of its template values (sizes and types)."""
    return ((kernel, chosen) for kernel in KERNELS for chosen in kernel.values)


def _write_kernel(folder: Path, kernel: Kernel, chosen: tuple[Template, ...]) -> Path:
    name = title(kernel, chosen)
    path = folder / f"{name}.metal"
    path.write_text(PREAMBLE.format(title=name) + source(kernel, chosen))
    return path


def title(kernel: Kernel, chosen: tuple[Template, ...]) -> str:
    """Return the name of a kernel's file, without the ending, for example attend_decode-D64-G3 or
    append-D64-TRADITIONAL0-Tfloat16."""
    values = (str(value).removeprefix("mlx.core.") for value in chosen)
    return "-".join([kernel.name, *map("".join, zip(kernel.templates, values, strict=True))])


def source(kernel: Kernel, chosen: tuple[Template, ...]) -> str:
    """Return the text that MLX passes to Metal's compiler after its preamble. The sizes of the arrays do not
    change the text if each size is 8 or more."""
    inputs = [mx.zeros(64, kernel.dtypes(chosen)[c_type]) for _, c_type in kernel.inputs]
    shapes = [(64,)] * len(kernel.outputs)
    found: list[str] = []

    def call(*arrays: mx.array) -> Any:
        return for_metal(kernel)(**kernel.arguments(arrays, shapes, (2, 1, 1), chosen))

    def take(part: dict[str, Any]) -> None:
        if part["type"] == "primitive" and part["name"] == "CustomKernel":
            # the arguments are (name, source, ..), so index 1 is the source
            found.append(part["arguments"][1])

    mx.export_function(take, call, *inputs)
    return found[0]

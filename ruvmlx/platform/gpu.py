"""The GPU of this machine.

All queries about the GPU and all kernel launches go through the object `gpu`, so that tests can replace it by
a simulated device and run the whole GPU path on a machine without a GPU.
"""

import platform
import plistlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from xml.parsers.expat import ExpatError

from .mx import GPU_ALLOWED, mx

_MACOS = Path("/System/Library/CoreServices/SystemVersion.plist")
_DRIVER = Path("/proc/driver/nvidia/version")


Template = int | mx.Dtype  # value of a kernel's template parameter


class LaunchableKernel(Protocol):
    """A kernel that `GPU.run` can launch (backends/mlx/kernels/source.py)."""

    def launch(
        self,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> list[mx.array]: ...


class GPU:
    """MLX's GPU: its kind, name and versions, and kernel launches.

    given_up: the GPU failed; this process uses the CPU from then on, for training too.
    """

    def __init__(self) -> None:
        self.given_up = False

    @property
    def kind(self) -> str:
        """ "metal" or "cuda"; "" without a usable GPU."""
        if self.given_up or not GPU_ALLOWED:
            return ""
        if mx.metal.is_available():
            return "metal"
        return "cuda" if mx.cuda.is_available() else ""

    @property
    def device(self) -> mx.Device:
        """MLX's device; valid only if `kind` is not empty."""
        return mx.Device(mx.gpu)

    @property
    def name(self) -> str:
        """ "Apple M3 Pro"."""
        return str(mx.device_info(self.device).get("device_name", "an unnamed GPU"))

    @property
    def system(self) -> str:
        """The version of the GPU's compiler: the macOS build with Metal, the NVIDIA driver with CUDA."""
        return _macos_build() if self.kind == "metal" else _driver_version()

    def run(
        self,
        kernel: LaunchableKernel,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> list[mx.array]:
        """Launch one kernel, lazily; see `Kernel.__call__` in backends/mlx/kernels/source.py."""
        return kernel.launch(inputs, shapes, groups, templates)

    def seconds(self, make: Callable[[], Sequence[mx.array]]) -> float:
        """Seconds that the device takes to evaluate the arrays of `make`. The time to build their graph in
        Python is not counted: in a reply it overlaps with the device's work on the previous token."""
        arrays = make()
        started = time.perf_counter()
        mx.eval(*arrays)
        return time.perf_counter() - started


gpu = GPU()


def _macos_build() -> str:
    """ "macOS 15.5 24F74"; without the build if that cannot be read."""
    try:
        build = plistlib.loads(_MACOS.read_bytes()).get("ProductBuildVersion", "")
    except (OSError, ValueError, ExpatError):
        build = ""
    return f"macOS {platform.mac_ver()[0]} {build}".strip()


def _driver_version() -> str:
    """The Linux kernel's version and the first line of the driver's version file."""
    try:
        driver = _DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = "unknown driver"
    return f"{platform.release()}, {driver}"

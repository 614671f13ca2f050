"""This module describes the GPU of this machine and launches kernels on the GPU.

The queries about the GPU and the kernel launches of replies and training use the object `gpu`, except some
questions whether CUDA is available. Tests replace `gpu` by a simulated device, so that a machine without a
GPU can run the GPU code.
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


Template = int | mx.Dtype  # the value of a template parameter of a kernel


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
    """The GPU that MLX uses: its kind, its name, the versions of its software, and kernel launches.

    given_up: True if the GPU has failed; from then on this process uses the CPU for replies and for training.
    """

    def __init__(self) -> None:
        self.given_up = False

    @property
    def kind(self) -> str:
        """Return "metal" or "cuda", or "" if this process has no usable GPU."""
        if self.given_up or not GPU_ALLOWED:
            return ""
        if mx.metal.is_available():
            return "metal"
        return "cuda" if mx.cuda.is_available() else ""

    @property
    def device(self) -> mx.Device:
        """Return MLX's GPU device. Use the device only if `kind` is not empty."""
        return mx.Device(mx.gpu)

    @property
    def name(self) -> str:
        """Return the name of the GPU, such as "Apple M3 Pro"."""
        return str(mx.device_info(self.device).get("device_name", "an unnamed GPU"))

    @property
    def system(self) -> str:
        """Return the version of the system's kernel compiler: the macOS build for Metal, the NVIDIA driver
        for CUDA."""
        return _macos_build() if self.kind == "metal" else _driver_version()

    def run(
        self,
        kernel: LaunchableKernel,
        inputs: Sequence[mx.array],
        shapes: Sequence[tuple[int, ...]],
        groups: tuple[int, int, int],
        templates: tuple[Template, ...],
    ) -> list[mx.array]:
        """Add one kernel launch to MLX's lazy graph; see `Kernel.__call__` in
        backends/mlx/kernels/source.py."""
        return kernel.launch(inputs, shapes, groups, templates)

    def seconds(self, make: Callable[[], Sequence[mx.array]]) -> float:
        """Return the seconds that the device takes to evaluate the arrays of `make`. The result does not
        include the time in which Python builds MLX's graph, because in a reply Python builds the graph while
        the device works on the previous token."""
        arrays = make()
        started = time.perf_counter()
        mx.eval(*arrays)
        return time.perf_counter() - started


gpu = GPU()


def _macos_build() -> str:
    """Return the macOS version and build, such as "macOS 15.5 24F74"; or only the version if the build cannot
    be read."""
    try:
        build = plistlib.loads(_MACOS.read_bytes()).get("ProductBuildVersion", "")
    except (OSError, ValueError, ExpatError):
        build = ""
    return f"macOS {platform.mac_ver()[0]} {build}".strip()


def _driver_version() -> str:
    """Return the Linux kernel's version and the first line of the NVIDIA driver's version file."""
    try:
        driver = _DRIVER.read_text().splitlines()[0]
    except (OSError, IndexError):
        driver = "unknown driver"
    return f"{platform.release()}, {driver}"

"""While a model is open on Metal, this module sets two limits: how much GPU memory macOS keeps in RAM and
does not page out (wired memory), and how much unused memory MLX keeps for later arrays.

Without a wired limit, macOS pages a large model out of RAM while no token is computed, and reads the model
back at the next token. Like mlx-lm, this module sets the wired limit to the working set that Metal
recommends. With a higher limit macOS can crash (kernel panic). The limits belong to the process, so the
module restores the old limits when Python frees the last backend.
"""

import weakref
from typing import Any

from ...platform.mx import mx
from ...text import size

# MLX keeps at most this part of the working set, or LEAST_SPARE bytes if that is more, as unused buffers for
# later arrays
SPARE = 0.05
LEAST_SPARE = 512 << 20


class GPULimits:
    """The limits of MLX for all open models. metal: MLX, or its replacement in tests."""

    def __init__(self, metal: Any = mx):
        self.metal = metal
        self._old: dict[str, int] = {}
        self._models = 0

    def add_model(self) -> None:
        """Count one more open model."""
        self._models += 1

    def set(self, name: str, value: int) -> None:
        """Set a limit. Only the limit from before the first model opened is restored later."""
        old = getattr(self.metal, name)(value)
        self._old.setdefault(name, old)

    def remove_model(self) -> None:
        """Count one open model less. After the last model, restore the old limits."""
        self._models -= 1
        if self._models or not self._old:
            return
        self.metal.synchronize()
        while self._old:
            name, old = self._old.popitem()
            getattr(self.metal, name)(old)


_LIMITS = GPULimits()


class GPUMemory:
    """This class sets MLX's limits for GPU memory while Python has the object `holder`.

    why_not: one line for people if macOS refuses to wire the model's memory, or if the model takes more than
        90% of the working set; else ""
    """

    def __init__(self, holder: Any, nbytes: int, limits: GPULimits = _LIMITS):
        """Set the limits.

        holder: the backend of the model
        nbytes: the number of bytes of the model's weights
        limits: the limits of this process
        """
        self._limits = limits
        limits.add_model()
        self.restore = weakref.finalize(holder, limits.remove_model)  # a second call does nothing
        most = int(limits.metal.device_info().get("max_recommended_working_set_size", 0))
        if most:
            limits.set("set_cache_limit", max(LEAST_SPARE, int(SPARE * most)))
        self.why_not = self._wire(most, nbytes)

    def _wire(self, most: int, nbytes: int) -> str:
        if not most:
            return ""  # the GPU reports no recommended working set, so no wired limit is set
        try:
            self._limits.set("set_wired_limit", most)
        except (RuntimeError, ValueError) as e:  # MLX raises an error on macOS before version 15
            return f"the model's memory may be paged out in pauses: {' '.join(str(e).split())}"
        if nbytes > 0.9 * most:
            return (
                f"the model takes {size(nbytes)} of the {size(most)} that macOS lends the GPU: slow. "
                "Use a smaller one, or raise it: sudo sysctl iogpu.wired_limit_mb=N"
            )
        return ""

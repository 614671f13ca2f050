"""While a model is open on Metal, this module sets two limits: how much GPU memory macOS keeps in RAM and
does not page out (wired memory), and how much unused memory MLX keeps for later arrays.

Without a wired limit, macOS pages a large model out of RAM while no token is computed, and reads the model
back at the next token. Like mlx-lm, this module sets the wired limit to the working set that Metal
recommends. With a higher limit macOS can crash (kernel panic). The module restores the old limits when Python
frees the backend.
"""

import weakref
from typing import Any

from ...platform.mx import mx
from ...text import size

# MLX keeps at most this part of the working set, or LEAST_SPARE bytes if that is more, as unused buffers for
# later arrays
SPARE = 0.05
LEAST_SPARE = 512 << 20


class GPUMemory:
    """This class sets MLX's limits for GPU memory, and restores the old limits when Python frees the object
    `holder`.

    why_not: one line for people if macOS refuses to wire the model's memory, or if the model takes more than
        90% of the working set; else ""
    """

    def __init__(self, holder: Any, nbytes: int, metal: Any = mx):
        """nbytes: the bytes of the model's weights. metal: MLX, or its replacement in tests."""
        self.why_not = ""
        self._metal = metal
        self._old: dict[str, int] = {}
        info = metal.device_info()
        most = int(info.get("max_recommended_working_set_size", 0))
        if most:
            self._set("set_cache_limit", max(LEAST_SPARE, int(SPARE * most)))
        self.why_not = self._wire(most, nbytes)
        weakref.finalize(holder, self.restore)

    def restore(self) -> None:
        """Restore the old limits. A second call does nothing."""
        if self._old:
            self._metal.synchronize()
        while self._old:
            name, old = self._old.popitem()
            getattr(self._metal, name)(old)

    def _wire(self, most: int, nbytes: int) -> str:
        if not most:
            return ""  # the GPU reports no recommended working set, so no wired limit is set
        try:
            self._set("set_wired_limit", most)
        except (RuntimeError, ValueError) as e:  # MLX raises an error on macOS before version 15
            return f"the model's memory may be paged out in pauses: {' '.join(str(e).split())}"
        if nbytes > 0.9 * most:
            return (
                f"the model takes {size(nbytes)} of the {size(most)} that macOS lends the GPU: slow. "
                "Use a smaller one, or raise it: sudo sysctl iogpu.wired_limit_mb=N"
            )
        return ""

    def _set(self, name: str, value: int) -> None:
        self._old[name] = getattr(self._metal, name)(value)

"""The program sets limits for the GPU's memory while a model is open. Then it restores the old limits."""

import gc
from types import SimpleNamespace

import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.mlx.gpu_memory import LEAST_SPARE, GPULimits, GPUMemory


class Metal:
    """MLX on a Mac that lends its GPU so many bytes."""

    def __init__(self, most: int, old_macos: bool = False):
        self.most, self.old_macos = most, old_macos
        self.limits = {"wired": 0, "cache": 1 << 40}
        self.idle = True

    def device_info(self):
        return {"max_recommended_working_set_size": self.most} if self.most else {}

    def set_wired_limit(self, value):
        if self.old_macos:
            raise RuntimeError("[metal] wired limits need macOS 15")
        return self._set("wired", value)

    def set_cache_limit(self, value):
        return self._set("cache", value)

    def _set(self, name, value):
        assert self.idle and value <= max(self.most, 1 << 40)
        old, self.limits[name] = self.limits[name], value
        return old

    def synchronize(self):
        self.idle = True


class Holder:
    pass


def test_set_for_a_life_and_restored():
    metal, holder = Metal(12 << 30), Holder()
    memory = GPUMemory(holder, 4 << 30, GPULimits(metal))
    assert memory.why_not == ""
    assert metal.limits == {"wired": 12 << 30, "cache": int(0.05 * (12 << 30))}
    metal.idle = False
    del holder
    gc.collect()
    assert metal.limits == {"wired": 0, "cache": 1 << 40}
    memory.restore()
    assert metal.limits == {"wired": 0, "cache": 1 << 40}


def test_two_models_one_after_the_other():
    """The second one sets what the first one had restored."""
    metal, first = Metal(4 << 30), Holder()
    limits = GPULimits(metal)
    GPUMemory(first, 1 << 30, limits)
    assert metal.limits["cache"] == LEAST_SPARE
    del first
    gc.collect()
    second = Holder()
    GPUMemory(second, 1 << 30, limits)
    assert metal.limits["wired"] == 4 << 30
    del second
    gc.collect()
    assert metal.limits == {"wired": 0, "cache": 1 << 40}


def test_two_models_at_once():
    """The limits hold until the last one closes, in whichever order."""
    metal, holders = Metal(4 << 30), [Holder(), Holder()]
    limits = GPULimits(metal)
    for holder in holders:
        GPUMemory(holder, 1 << 30, limits)
    del holder, holders[0]
    gc.collect()
    assert metal.limits == {"wired": 4 << 30, "cache": LEAST_SPARE}
    holders.clear()
    gc.collect()
    assert metal.limits == {"wired": 0, "cache": 1 << 40}


@pytest.mark.parametrize(
    "metal,nbytes,why",
    [
        (Metal(0), 1, ""),
        (Metal(8 << 30, old_macos=True), 1, "need macOS 15"),
        (Metal(8 << 30), 8 << 30, "iogpu.wired_limit_mb"),
    ],
    ids=["unknown", "old macOS", "too large a model"],
)
def test_a_limit_that_cannot_be_set_is_one_line(metal, nbytes, why):
    """One line; what could be set is restored all the same."""
    holder = Holder()
    memory = GPUMemory(holder, nbytes, GPULimits(metal))
    assert why in memory.why_not and "\n" not in memory.why_not
    del holder
    gc.collect()
    assert metal.limits == {"wired": 0, "cache": 1 << 40}


def test_a_backend_without_kernels_still_says_what_it_said_of_its_memory():
    backend = SimpleNamespace(caveat="The memory is not wired.", kernels="metal", pool=object())
    MLXBackend._do_without_kernels(backend, "A kernel differs.")
    assert backend.caveat == "The memory is not wired. A kernel differs." and backend.pool is None

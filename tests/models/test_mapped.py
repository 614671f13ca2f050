"""Weights come one at a time, and the file's pages go when they have been read."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.models.files.mapped import release
from ruvmlx.models.load import load_gguf

from .make_gguf import make_gguf_model

SMAPS = Path("/proc/self/smaps")


def resident(path):
    """Resident kilobytes of the mapping of a file."""
    lines = iter(SMAPS.read_text().splitlines())
    for line in lines:
        if line.rstrip().endswith(str(path)):
            return next(int(text.split()[1]) for text in lines if text.startswith("Rss:"))
    raise AssertionError("not mapped")


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no madvise here")
def test_released_pages_come_back_with_the_same_contents(tmp_path):
    """Pages of a view leave memory and come back with the same contents; other arrays are left alone."""
    path = tmp_path / "file"
    want = np.arange(1 << 18, dtype=np.uint32)
    want.tofile(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint32)[100:-100]
    np.testing.assert_array_equal(view, want[100:-100])
    before = resident(path) if SMAPS.exists() else None  # Linux alone tells
    release(view)
    assert before is None or resident(path) <= before - 1000
    np.testing.assert_array_equal(view, want[100:-100])
    own = np.ones(10000)
    release(own)
    assert own.sum() == 10000


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "F16"])
def test_lazy_weights_are_the_same_arrays_in_any_order(tmp_path, quant):
    """A mapping like any other; in order or not, twice or once: the same arrays."""
    weights = load_gguf(make_gguf_model(tmp_path / "m.gguf", quant=quant)).load_weights()
    eager = dict(weights)
    assert len(eager) == len(weights) == len(set(weights))
    for name in reversed(list(weights)):
        assert name in weights
        np.testing.assert_array_equal(weights[name], eager[name])
    assert "model.layers.9.mlp.up_proj.weight" not in weights
    assert ("lm_head.scales" in weights) == (quant != "F16")
    with pytest.raises(KeyError):
        weights["rope_freqs.weight"]

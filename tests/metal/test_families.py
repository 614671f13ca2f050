"""Families on the simulated GPU: tiers over normed heads, layers without rope, queries scaled by position,
and ALiBi, against the graph's own attention over the same quantised pages."""

import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.kv.pool import PagePool
from ruvmlx.models.load import load_model
from ruvmlx.platform.gpu import gpu
from tests.backends.test_family_caches import SHAPES
from tests.backends.test_tiered_mlx import SHAPES as TIERED_SHAPES
from tests.backends.test_tiered_mlx import SMALL, TO_THE_JUDGE, TOKENS, worst
from tests.backends.tiers import Judge
from tests.models.make_models import make_safetensors_model

from .simulated_gpu import SimulatedGPU

FAMILIES = SHAPES | {"mpt": TIERED_SHAPES["d64-alibi"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_tiers_through_the_kernels(family, tmp_path, monkeypatch):
    """A prompt in chunks, then single tokens, through all tiers."""
    monkeypatch.setattr(gpu, "given_up", False)
    simulated = SimulatedGPU(tmp_path)
    simulated.install(monkeypatch)
    folder = make_safetensors_model(tmp_path / "m", **FAMILIES[family] | {"span": 100})
    backend = MLXBackend(load_model(str(folder)), "metal", chunk=100)
    backend.pool = PagePool(backend.pool.storage, pressure=lambda: 0.0)
    cache, judge, at = backend.new_cache(SMALL), Judge(backend, SMALL), 0
    for n in (170, 90, 1, 1, 1):
        part = TOKENS[at : at + n]
        ours = backend.decode(part[0], cache).logits[None] if n == 1 else backend.verify(part, cache)
        want = [judge.logits(part[i : i + 100]) for i in range(0, n, 100)]
        assert worst(ours, [row for rows in want for row in rows]) < TO_THE_JUDGE["gpu"]
        at += n
    assert {page.tier for page in cache.pages if page is not None} == {0, 1, 2}
    assert {"append", "rope_append", "gather"} <= set(simulated.ran)
    attending = {name for name in simulated.ran if name.startswith("attend_decode")}
    assert attending == {"attend_decode_alibi" if family == "mpt" else "attend_decode"}
    assert backend.caveat == "" and backend.kernels == "metal"

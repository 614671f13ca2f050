"""A backend that has only f16 caches offers no measurement of tiers."""

import pytest
from ruvmlx.apps.cli.kv_words import kv_facts, show_kv

from ruvmlx.backends.mlx import tiered_cpu
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.kv_tuning.tier_measurement import NO_TIERS, KVLoop, TierHistory
from ruvmlx.kv_tuning.tier_review import TierReview
from ruvmlx.models.load import load_model
from ruvmlx.settings import Settings
from ruvmlx.store import Store
from tests.models.other_models import ARCHITECTURES, make_other_model


@pytest.mark.parametrize("asked", [TIERED, F16, None])
def test_the_reference_backend_offers_no_measurement(tiny, home, capsys, asked):
    """Its caches have only f16 numbers, whatever the user asks for; the reason says so."""
    history = TierHistory(Store(home / "ruvmlx.db"), tiny, "reference", asked)
    status = history.status()
    assert history.policy == status.policy == F16 and not status.asked
    loop = KVLoop(history, tiny, ReferenceBackend(tiny))
    assert status.reason == loop.review()["reason"] == NO_TIERS and not loop.is_due()
    show_kv(kv_facts(status))
    assert "measure" not in capsys.readouterr().out


@pytest.mark.parametrize("kv", ["auto", "tiered"])
def test_an_mlx_backend_without_pages_offers_no_measurement(tiny, home, capsys, monkeypatch, kv):
    """The C library is missing, or a kernel of the GPU differs."""
    monkeypatch.setattr(tiered_cpu, "pool", lambda *_: None)
    engine = LLMInferenceEngine(tiny, MLXBackend(tiny, device="cpu"))
    tiers = TierReview(Store(home / "ruvmlx.db"), engine, Settings(kv=kv))
    status = tiers.status()
    assert status.policy == F16 and status.reason == tiers.review()["reason"] == NO_TIERS
    assert not tiers.can_choose() and engine.sessions.policy is None
    show_kv(kv_facts(status))
    assert "measure" not in capsys.readouterr().out


def test_a_model_of_mlx_lms_own_code_is_offered_no_measurement(home, tmp_path):
    """`learn kv` knows it without the weights."""
    other = load_model(str(make_other_model(tmp_path / "model", sorted(ARCHITECTURES)[0])))
    assert TierHistory(Store(home / "ruvmlx.db"), other, "mlx").status().reason == NO_TIERS

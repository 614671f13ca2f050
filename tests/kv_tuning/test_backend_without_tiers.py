"""A backend that has only f16 caches offers no measurement of tiers."""

import pytest
from ruvmlx.apps.cli.kv_words import kv_facts, show_kv

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.kv_tuning.tier_measurement import NO_TIERS, KVLoop, TierHistory
from ruvmlx.store import Store


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

"""A model that adds a bias to its keys has no page in 4 bits, unless the user asks for it."""

from dataclasses import replace

import pytest
from ruvmlx.apps.cli.kv_words import kv_facts, show_kv

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.select import cache_policy
from ruvmlx.kv.policy import EIGHT_BITS, F16, MAX_LEVEL, TIERED, tighten
from ruvmlx.kv_tuning.tier_choice import choose
from ruvmlx.kv_tuning.tier_measurement import TierHistory
from ruvmlx.models.load import load_model
from ruvmlx.store import KVChoiceRow, Store
from ruvmlx.tiers import EVERYTHING, WARM
from tests.models.encoder_models import EncoderShape, make_encoder
from tests.models.make_models import make_safetensors_model


@pytest.fixture(scope="module")
def model_with_bias(tmp_path_factory):
    """A tiny Qwen2: its q, k and v have biases."""
    folder = tmp_path_factory.mktemp("model_with_bias") / "tiny"
    return load_model(str(make_safetensors_model(folder, family="qwen2", head_dim=16, n_heads=4)))


def test_the_default_has_no_four_bits(model_with_bias, tiny):
    backend = NativeBackend(model_with_bias, threads=1)
    for kv in (None, "auto", "tiered"):
        assert cache_policy(kv, backend, model_with_bias.shape) == EIGHT_BITS
    assert cache_policy("tiered", backend, model_with_bias.shape, "256,512").lengths == (256, 512)
    assert cache_policy("tiered", backend, model_with_bias.shape, "256").lengths == (256, 256)
    assert cache_policy("f16", backend, model_with_bias.shape) == F16
    assert cache_policy(None, backend, tiny.shape) == TIERED


@pytest.mark.parametrize("level", range(MAX_LEVEL + 1))
def test_memory_pressure_keeps_eight_bits(level):
    hot, warm = tighten(EIGHT_BITS, level).lengths
    assert (hot, warm) == (min(256, tighten(TIERED, level).lengths[0]), EVERYTHING)


@pytest.mark.parametrize("tiers", [None, "256,all"])
def test_a_squeezed_chat_has_no_page_in_four_bits(model_with_bias, tiers):
    """Also if the user asked for tiers without 4 bits."""
    backend = NativeBackend(model_with_bias, threads=1)
    cache = backend.new_cache(cache_policy(None, backend, model_with_bias.shape, tiers))
    backend.pool.pressure = lambda: 0.99
    for start in range(0, 640, 64):
        backend.prefill(list(range(start % 60, start % 60 + 64)), cache)
    assert backend.pool.level == MAX_LEVEL
    cold, warm, hot = cache.stats().tokens
    assert cold == 0 and warm >= 448 and hot > 0


def test_a_choice_of_an_earlier_version_keeps_eight_bits(model_with_bias, home, capsys):
    """Earlier versions measured 4 bits for these models, too; the figures are not those of 8 bits."""
    store = Store(home / "ruvmlx.db")
    history = TierHistory(store, model_with_bias, "native")
    assert history.policy == history.status().policy == EIGHT_BITS
    assert "adds a bias to its keys" in history.status().reason
    show_kv(kv_facts(history.status()))
    assert "16 bits for the newest 256 tokens, 8 for all others" in capsys.readouterr().out
    store.kv.put_choice(*history.mine, KVChoiceRow((64, 512), {"reason": "the fastest"}, 0.0))
    status = history.status()
    assert status.policy == EIGHT_BITS and status.report is None and "the fastest" not in status.reason
    store.kv.put_choice(*history.mine, KVChoiceRow((64, EVERYTHING), {"reason": "the fastest"}, 0.0))
    assert history.policy == replace(EIGHT_BITS, lengths=(64, EVERYTHING))
    assert history.status().reason == "the fastest"


def test_only_eight_bits_are_measured(model_with_bias, home):
    history = TierHistory(Store(home / "ruvmlx.db"), model_with_bias, "native")
    assert [c.lengths for c in history.candidates] == [(64, EVERYTHING), (256, EVERYTHING)]
    assert {c.lowest for c in history.candidates} == {WARM}
    assert choose([], default=history.default).policy == EIGHT_BITS


def test_an_encoder_has_a_status(home):
    """`ruvmlx learn kv` names the backend of the settings, not the encoder's."""
    encoder = load_model(str(make_encoder(home / "encoder", EncoderShape(context=60), "cls")))
    assert TierHistory(Store(home / "ruvmlx.db"), encoder, "native").status().policy == TIERED

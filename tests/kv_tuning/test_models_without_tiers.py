"""A model that adds a bias to its keys has f16 caches, unless the user asks for tiers."""

import pytest
from ruvmlx.apps.cli.kv_words import kv_facts, show_kv

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.select import cache_policy
from ruvmlx.kv.policy import F16, TIERED
from ruvmlx.kv_tuning.tier_measurement import KVLoop, TierHistory
from ruvmlx.models.load import load_model
from ruvmlx.store import KVChoiceRow, Store
from tests.models.encoder_models import EncoderShape, make_encoder
from tests.models.make_models import make_safetensors_model


@pytest.fixture(scope="module")
def model_with_bias(tmp_path_factory):
    """A tiny Qwen2: its q, k and v have biases."""
    folder = tmp_path_factory.mktemp("model_with_bias") / "tiny"
    return load_model(str(make_safetensors_model(folder, family="qwen2", head_dim=16, n_heads=4)))


def test_the_default_is_f16(model_with_bias, tiny):
    backend = NativeBackend(model_with_bias, threads=1)
    assert (
        cache_policy(None, backend, model_with_bias.shape)
        == cache_policy("auto", backend, model_with_bias.shape)
        == F16
    )
    assert cache_policy("tiered", backend, model_with_bias.shape) == TIERED
    assert cache_policy(None, backend, tiny.shape) == TIERED


def test_nothing_is_measured(model_with_bias, home, capsys):
    """A choice that an earlier version stored has no effect."""
    store = Store(home / "ruvmlx.db")
    history = TierHistory(store, model_with_bias, "native")
    store.kv.put_choice(*history.mine, KVChoiceRow(TIERED.lengths, {"reason": "the fastest"}, 0.0))
    loop = KVLoop(history, model_with_bias, NativeBackend(model_with_bias, threads=1))
    assert history.policy == history.status().policy == F16 and not loop.is_due()
    assert "adds a bias to its keys" in history.status().reason == loop.review()["reason"]
    assert TierHistory(store, model_with_bias, "native", TIERED).policy == TIERED
    show_kv(kv_facts(history.status()))
    assert "16 bits for all tokens" in (said := capsys.readouterr().out) and "measure" not in said


def test_tiers_that_the_user_asked_for_are_measured(model_with_bias, home, monkeypatch):
    history = TierHistory(Store(home / "ruvmlx.db"), model_with_bias, "native", TIERED)
    loop = KVLoop(history, model_with_bias, NativeBackend(model_with_bias, threads=1))
    assert "bias" not in loop.review()["reason"]
    monkeypatch.setattr(history, "unmeasured_candidates", lambda: iter([("a long reply", [TIERED])]))
    assert loop.is_due()


def test_an_encoder_has_a_status(home):
    """`ruvmlx learn kv` names the backend of the settings, not the encoder's."""
    encoder = load_model(str(make_encoder(home / "encoder", EncoderShape(context=60), "cls")))
    assert TierHistory(Store(home / "ruvmlx.db"), encoder, "native").status().policy == TIERED

"""Encoders in folders and GGUF files: how they are known, and what is refused."""

import numpy as np
import pytest

from ruvmlx.backends.select import describe, for_model, open_backend
from ruvmlx.errors import CorruptFile, UnsupportedModel
from ruvmlx.memory.load_plan import PROGRAM, Need
from ruvmlx.models.find.local import survey
from ruvmlx.models.load import load_model

from .encoder_models import (
    EncoderShape,
    encoder_weights,
    hf_name,
    make_encoder,
    make_gguf_encoder,
    write_pooling,
)
from .gguf_writer import u32
from .make_models import safetensors_bytes

SHAPE = EncoderShape()


def parameters(shape):
    return sum(w.size for w in encoder_weights(shape).values())


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "nomic_bert"])
def test_facts(tmp_path, family):
    """Of both formats: the parameters, the bytes, the longest text."""
    shape = EncoderShape(family)
    size = parameters(shape)
    folder, file = (
        make_encoder(tmp_path / "m", shape, "cls"),
        make_gguf_encoder(tmp_path / "m.gguf", shape, "cls"),
    )
    for path in (folder, file):
        facts, model = survey("m", path), load_model(str(path))
        assert facts.embeds and model.embeds and not model.shape.writes and not model.is_own
        assert model.context == facts.shape.max_context == shape.context
        assert model.shape.pooling == "cls" and model.shape.hidden_size == shape.hidden
        rows = shape.offset * shape.hidden if path == file else 0  # GGUF has none before position 0
        assert facts.parameters == model.parameters == size - rows and facts.bytes == 4 * facts.parameters


def test_the_memory_is_in_the_plan(tmp_path):
    """The weights as float32, the words' vectors as stored; no KV cache, and nothing for learning."""
    folder = make_encoder(tmp_path / "m", SHAPE, dtype=np.float16)
    facts = survey("m", folder)
    need = Need.of(facts, for_model(describe("reference"), "reference", facts.shape))
    words = SHAPE.vocab * SHAPE.hidden
    assert (
        need.weights
        == 4 * parameters(SHAPE) - 2 * words
        == open_backend("auto", load_model(str(folder))).nbytes
    )
    assert need.cache == 0 and 0 < need.work - PROGRAM < 1 << 20


def test_the_longest_text_is_that_of_sentence_transformers(tmp_path):
    assert load_model(str(make_encoder(tmp_path / "a", SHAPE, most=20))).context == 20
    assert load_model(str(make_encoder(tmp_path / "b", SHAPE, most=512))).context == SHAPE.context


@pytest.mark.parametrize("prefix", ["bert.", "roberta."])
def test_tensors_with_a_prefix(tmp_path, prefix):
    """As a model with a head of another task has them; older norms are called gamma and beta."""
    folder = make_encoder(tmp_path / "m", SHAPE, prefix=prefix)
    weights = {}
    for name, w in encoder_weights(SHAPE).items():
        called = prefix + hf_name(name, SHAPE)
        if "LayerNorm" in called:
            called = called.replace(".weight", ".gamma").replace(".bias", ".beta")
        weights[called] = w
    weights["cls.predictions.bias"] = np.ones(3, np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    plain = make_encoder(tmp_path / "plain", SHAPE)
    found = [open_backend("auto", load_model(str(path))).embed([3, 7, 4]) for path in (folder, plain)]
    np.testing.assert_array_equal(*found)


def test_position_ids_are_left_out(tmp_path, monkeypatch):
    """Older folders store whole numbers of 64 bits, which no vector needs."""
    from . import make_models

    monkeypatch.setitem(make_models._SAFETENSORS_NAMES, "int64", "I64")
    folder = make_encoder(tmp_path / "m", SHAPE)
    weights = {hf_name(name, SHAPE): w for name, w in encoder_weights(SHAPE).items()}
    weights = {"embeddings.position_ids": np.arange(SHAPE.context)[None]} | weights
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    assert load_model(str(folder)).parameters == parameters(SHAPE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; only 'gelu' is run"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForSequenceClassification"]}, "ranks or classifies texts"),
    ],
)
def test_other_encoders_are_refused(tmp_path, config, words):
    with pytest.raises(UnsupportedModel, match=words):
        load_model(str(make_encoder(tmp_path / "m", SHAPE, **config)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"activation_function": "geglu"}, "activation_function"),
        ({"prenorm": True}, "prenorm"),
        ({"rotary_scaling_factor": 2.0}, "rotary_scaling_factor"),
        ({"num_experts": 8}, "num_experts"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction"),
    ],
)
def test_other_kinds_of_nomic_are_refused(tmp_path, config, words):
    with pytest.raises(UnsupportedModel, match=words):
        load_model(str(make_encoder(tmp_path / "m", EncoderShape("nomic_bert"), **config)))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_attention_heads": 7}, "40 numbers do not fit 7 heads"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"layer_norm_eps": 2.0}, "does not make sense"),
        ({"num_hidden_layers": 4}, "blk.3.attn_q.weight"),
        ({"intermediate_size": 51}, "has shape"),
    ],
)
def test_damaged_configurations(tmp_path, config, words):
    with pytest.raises(CorruptFile, match=words):
        load_model(str(make_encoder(tmp_path / "m", SHAPE, **config)))


def test_pooling_that_is_not_run(tmp_path):
    folder = make_encoder(tmp_path / "m", SHAPE, "max")
    with pytest.raises(UnsupportedModel, match="pooling max"):
        load_model(str(folder))
    write_pooling(folder, "mean", ("Dense", "Normalize"))
    with pytest.raises(UnsupportedModel, match="module 'Dense'"):
        load_model(str(folder))
    (folder / "modules.json").write_text("[")
    with pytest.raises(CorruptFile, match=r"modules\.json"):
        load_model(str(folder))


def test_gguf_pooling(tmp_path):
    """1 is the mean, 2 the first token, 3 the last one; without the key, the mean. 4 ranks texts."""
    for pooling in ("mean", "cls", "lasttoken", None):
        path = make_gguf_encoder(tmp_path / "m.gguf", SHAPE, pooling)
        assert load_model(str(path)).shape.pooling == (pooling or "mean")
    for pooling in ("rank", "none"):
        with pytest.raises(UnsupportedModel, match="pooling_type"):
            load_model(str(make_gguf_encoder(tmp_path / "m.gguf", SHAPE, pooling)))
    with pytest.raises(UnsupportedModel, match="causal"):
        load_model(str(make_gguf_encoder(tmp_path / "m.gguf", SHAPE, **{"attention.causal": True})))
    with pytest.raises(CorruptFile, match=r"blk\.3\.attn_q"):
        load_model(str(make_gguf_encoder(tmp_path / "m.gguf", SHAPE, block_count=u32(5))))


def test_a_tensor_of_another_architecture_is_refused(tmp_path):
    folder = make_encoder(tmp_path / "m", SHAPE)
    weights = {hf_name(name, SHAPE): w for name, w in encoder_weights(SHAPE).items()}
    weights["encoder.layer.0.attention.self.distance_embedding.weight"] = np.ones((3, 8), np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with pytest.raises(UnsupportedModel, match=r"distance_embedding\.weight' is no part of a bert encoder"):
        load_model(str(folder))


def test_nan_is_refused(tmp_path):
    folder = make_encoder(tmp_path / "m", SHAPE)
    weights = {hf_name(name, SHAPE): w for name, w in encoder_weights(SHAPE).items()}
    weights["encoder.layer.1.output.dense.weight"][3, 4] = np.nan
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with pytest.raises(CorruptFile, match=r"blk\.1\.ffn_down\.weight' holds NaN"):
        open_backend("auto", load_model(str(folder)))


def test_another_training_has_another_fingerprint(tmp_path):
    paths = [make_encoder(tmp_path / str(seed), EncoderShape(seed=seed)) for seed in (0, 1)]
    first, second = (load_model(str(path)).fingerprint for path in paths)
    assert first != second and first == load_model(str(paths[0])).fingerprint

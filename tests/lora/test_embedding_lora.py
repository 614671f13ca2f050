"""A LoRA of the embedding: stored by rows, exchanged with PEFT and mlx-lm, fused. A tied head stays."""

import json

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import AdapterMismatch, CorruptFile, UnsupportedModel, UsageError
from ruvmlx.lora.base_lora import EMBEDDING, BaseLoRA
from ruvmlx.lora.fuse import fuse
from ruvmlx.lora.interchange import CONFIG, FILES, export
from ruvmlx.lora.interchange_reader import load
from ruvmlx.lora.merge import HEAD
from ruvmlx.models.files.safetensors_file import read_safetensors
from ruvmlx.models.files.safetensors_writer import write_json, write_safetensors
from ruvmlx.models.load import load_model

from ..models.make_models import make_safetensors_model
from .exchange import TOKENS, deltas, logits, mlx_lm_model
from .test_fuse import close, reference_logits


def embedding_change(config, rows=None, rank=3) -> BaseLoRA:
    """A change of the embedding's rows `rows` (None: of all rows)."""
    rng = np.random.default_rng(4)
    a = np.zeros((config.vocab_size, rank), np.float32)
    at = slice(None) if rows is None else rows
    a[at] = rng.standard_normal(a[at].shape)
    b = 0.3 * rng.standard_normal((rank, config.hidden_size)).astype(np.float32)
    return BaseLoRA({EMBEDDING: (a, b)}, 0.5)


@pytest.fixture(params=[False, True], ids=["own head", "tied"])
def model(request, tmp_path):
    return load_model(str(make_safetensors_model(tmp_path / "m", dtype="float32", tie=request.param)))


def test_only_the_rows_that_changed_are_stored(config):
    """Some rows, no row and all rows come back with their bits."""
    sizes = {}
    for name, rows in (("some", [1, 7, 300]), ("none", []), ("all", None)):
        change = embedding_change(config, rows)
        data = change.to_bytes()
        back = BaseLoRA.from_bytes(data)
        sizes[name] = len(data)
        assert back.scale == change.scale and back.of_keys == change.of_keys
        for got, want in zip(back.pairs[EMBEDDING], change.pairs[EMBEDDING], strict=True):
            np.testing.assert_array_equal(got, want)
    per_row = 3 * 4 + 4  # three numbers and an index
    assert sizes["some"] - sizes["none"] == 3 * per_row
    assert sizes["all"] - sizes["none"] == config.vocab_size * per_row
    packed = embedding_change(config).to_4_bits()
    back = BaseLoRA.from_bytes(packed.to_bytes())
    for got, want in zip(back.pairs[EMBEDDING], packed.pairs[EMBEDDING], strict=True):
        np.testing.assert_array_equal(got, want)


def test_damaged_rows_are_one_line(config):
    change = embedding_change(config, [5, 9])
    a, b = change.pairs[EMBEDDING]
    with pytest.raises(AdapterMismatch, match="embed_tokens"):
        BaseLoRA({EMBEDDING: (a[1:], b)}).check(config)
    data = change.to_bytes().replace(b"0.embed_tokens.rows", b"0.embed_tokens.rowz")
    with pytest.raises(CorruptFile):
        BaseLoRA.from_bytes(data)


def test_peft_has_its_own_names_for_it(model, tmp_path):
    change = embedding_change(model.config)
    export(change, model.config, tmp_path / "out", "peft")
    tensors = read_safetensors(tmp_path / "out" / FILES["peft"])
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    assert {n: t.shape for n, t in tensors.items()} == {
        f"{name}A": (3, model.config.vocab_size),
        f"{name}B": (model.config.hidden_size, 3),
    }
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"] == ["embed_tokens"]
    back = load(tmp_path / "out", model.config)
    assert back.pairs.keys() == {EMBEDDING}
    want = deltas(change)["model.embed_tokens"]
    np.testing.assert_allclose(deltas(back)["model.embed_tokens"], want, atol=1e-6)


def test_the_frozen_matrices_that_peft_writes_beside_are_left_out(config, tmp_path):
    """Those of the embedding and the head; any other is refused."""
    export(embedding_change(config), config, tmp_path / "out", "peft")
    file = tmp_path / "out" / FILES["peft"]
    tensors = {name: t.array() for name, t in read_safetensors(file).items()}
    frozen = np.ones((config.vocab_size, config.hidden_size), np.float32)
    beside = {f"base_model.model.{n}.base_layer.weight": frozen for n in ("model.embed_tokens", "lm_head")}
    write_safetensors(file, tensors | beside, {})
    assert load(tmp_path / "out", config).pairs.keys() == {EMBEDDING}
    odd = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": frozen}
    write_safetensors(file, tensors | odd, {})
    with pytest.raises(UnsupportedModel, match="is no part of a LoRA pair"):
        load(tmp_path / "out", config)


def test_mlx_lm_runs_it_beside_an_own_head_and_a_tied_one_is_refused(model, tmp_path):
    from mlx_lm.tuner.utils import load_adapters

    change, out = embedding_change(model.config), tmp_path / "out"
    if model.config.tie_word_embeddings:
        with pytest.raises(UsageError, match="tied embeddings without its head"):
            export(change, model.config, out, "mlx-lm")
        assert not out.exists()
        export(change, model.config, out, "mlx-lm", bits=4)  # for ourselves
        assert load(out, model.config).pairs.keys() == {EMBEDDING}
        return
    export(change, model.config, out, "mlx-lm")
    theirs = load_adapters(mlx_lm_model(model.path), str(out))
    theirs.eval()
    close(logits(theirs), reference_logits(model, change), 1e-4)
    assert load(out, model.config).pairs.keys() == {EMBEDDING}


def test_an_embedding_that_mlx_lm_trained_is_read(model, tmp_path):
    """With a tied embedding, mlx-lm's change reaches the head, too."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    parameters = {"rank": 3, "scale": 7.0, "dropout": 0.0, "keys": ["model.embed_tokens"]}
    theirs = mlx_lm_model(model.path)
    theirs.freeze()
    linear_to_lora_layers(theirs, 0, parameters)
    trained = tree_flatten(theirs.trainable_parameters())
    mx.random.seed(1)
    theirs.load_weights([(n, 0.1 * mx.random.normal(p.shape)) for n, p in trained], strict=False)
    theirs.eval()
    out = tmp_path / "theirs"
    out.mkdir()
    mx.save_safetensors(str(out / FILES["mlx-lm"]), dict(tree_flatten(theirs.trainable_parameters())))
    write_json(out / CONFIG, {"fine_tune_type": "lora", "num_layers": 0, "lora_parameters": parameters})
    read = load(out, model.config)
    assert read.pairs.keys() == ({EMBEDDING, HEAD} if model.config.tie_word_embeddings else {EMBEDDING})
    ours = ReferenceBackend(model)
    untouched = ours.head(ours.hidden_states(TOKENS))
    ours.set_lora(read)
    got = ours.head(ours.hidden_states(TOKENS))
    assert np.abs(got - untouched).max() > 0.05 * np.abs(got).max()
    close(got, logits(theirs), 1e-4)


@pytest.mark.parametrize("stored", [{"dtype": "float32"}, {"bits": 4}], ids=str)
@pytest.mark.parametrize("tie", [False, True])
def test_a_fused_embedding_leaves_the_head_as_it_is(tmp_path, stored, tie):
    """A tied head becomes a copy of the old embedding, with its 4 bits."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", tie=tie, **stored)))
    change = embedding_change(model.config)
    fuse(model, change, tmp_path / "fused")
    fused = load_model(str(tmp_path / "fused"))
    assert not fused.config.tie_word_embeddings
    before, after = model.load_weights(), fused.load_weights()
    origin = "model.embed_tokens" if tie else "lm_head"
    for part in ("weight", "scales", "biases") if "bits" in stored else ("weight",):
        np.testing.assert_array_equal(after[f"lm_head.{part}"], before[f"{origin}.{part}"])
    wanted, share = reference_logits(model, change), 3e-3 if "bits" in stored else 1e-4
    assert np.abs(wanted - reference_logits(model)).max() > 0.1
    close(reference_logits(fused), wanted, share)
    close(logits(mlx_lm_model(tmp_path / "fused")), wanted, 2 * share)

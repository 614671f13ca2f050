"""Adapter folders of mlx-lm and PEFT: ours read by mlx-lm itself, theirs read by us, and bad ones refused."""

import json

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import UsageError
from ruvmlx.lora import MicroLoRA
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.interchange import (
    CONFIG,
    FILES,
    PACKED,
    combine_adapter,
    divide_adapter,
    export,
)
from ruvmlx.lora.interchange_reader import load
from ruvmlx.lora.merge import HEAD
from ruvmlx.models.config.families import FAMILIES
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.files.safetensors_file import read_safetensors
from ruvmlx.models.files.safetensors_writer import write_json
from ruvmlx.models.load import load_model

from ..models.make_gguf import make_gguf_model
from ..models.make_models import make_safetensors_model
from ..models.shapes import Shape
from .exchange import TOKENS, a_change, a_micro, deltas, logits, mlx_lm_model, peft


def dense_twin(folder, change: BaseLoRA) -> np.ndarray:
    """Logits of mlx-lm's model with scale * A B added to its weights."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    model = mlx_lm_model(folder)
    weights = {f"{name}.weight": mx.array(delta) for name, delta in deltas(change).items()}
    own = dict(tree_flatten(model.parameters()))
    model.load_weights([(name, own[name] + delta) for name, delta in weights.items()], strict=False)
    return logits(model)


@pytest.mark.parametrize("with_micro", [False, True])
def test_mlx_lm_itself_loads_what_we_export(folder, config, tmp_path, with_micro):
    """The same logits as the dense change; the head is part of it."""
    from mlx_lm.tuner.utils import load_adapters

    rng = np.random.default_rng(0)
    change = a_change(config, rng)
    if with_micro:
        change = combine_adapter(change, a_micro(config, rng))
    export(change, config, tmp_path / "out", "mlx-lm")
    theirs = load_adapters(mlx_lm_model(folder), str(tmp_path / "out"))
    theirs.eval()
    untouched, wanted = logits(mlx_lm_model(folder)), dense_twin(folder, change)
    assert np.abs(wanted - untouched).max() > 0.1
    np.testing.assert_allclose(logits(theirs), wanted, atol=1e-4 * np.abs(wanted).max())
    ours = ReferenceBackend(load_model(str(folder)))
    ours.set_lora(load(tmp_path / "out", config))
    got = ours.head(ours.hidden_states(TOKENS))
    np.testing.assert_allclose(got, logits(theirs), atol=1e-4 * np.abs(wanted).max())


FAMILY_SHAPES = {  # mlx-lm has no MPT
    family.model_type: {"family": family.model_type} for family in FAMILIES if family.model_type != "mpt"
} | {
    # The heads of mlx-lm's models of these families have hidden_size / n_heads numbers.
    "qwen2": {"family": "qwen2", "n_heads": 4, "head_dim": 16},
    "stablelm": {"family": "stablelm", "n_heads": 4, "head_dim": 16, "rope_dims": 4},
    "mistral3 of mistral": {"family": "mistral", "wrapped": True},
    "mistral3 of ministral3": {"family": "ministral3", "wrapped": True},
}


@pytest.mark.parametrize("shape", FAMILY_SHAPES)
def test_mlx_lm_loads_the_adapter_of_every_family(tmp_path, shape):
    """Into its own model; the logits change as ours do, and the file is read back as it was."""
    from mlx_lm.tuner.utils import load_adapters

    folder = make_safetensors_model(tmp_path / "m", dtype="float32", **FAMILY_SHAPES[shape])
    model = load_model(str(folder))
    change = a_change(model.config, np.random.default_rng(2))
    export(change, model.config, tmp_path / "out", "mlx-lm", wrapped=model.wrapped)
    theirs = load_adapters(mlx_lm_model(folder), str(tmp_path / "out"))
    theirs.eval()
    ours = ReferenceBackend(model)
    untouched = ours.head(ours.hidden_states(TOKENS))
    ours.set_lora(load(tmp_path / "out", model.config))
    got = ours.head(ours.hidden_states(TOKENS))
    scale = np.abs(got).max()
    assert np.abs(got - untouched).max() > 0.05 * scale
    np.testing.assert_allclose(got, logits(theirs), atol=1e-4 * scale)


def test_peft_finds_a_wrapped_language_model(tmp_path):
    """By the names of transformers' model for images, whose vision tower has modules of the same short
    names."""
    folder = make_safetensors_model(tmp_path / "m", dtype="float32", **FAMILY_SHAPES["mistral3 of mistral"])
    model = load_model(str(folder))
    change = a_change(model.config, np.random.default_rng(2))
    export(change, model.config, tmp_path / "out", "peft", wrapped=model.wrapped)
    names = set(read_safetensors(tmp_path / "out" / FILES["peft"]))
    targets = json.loads((tmp_path / "out" / CONFIG).read_text())["target_modules"]
    assert "base_model.model.lm_head.lora_A.weight" in names and "lm_head" in targets
    embedding = "model.language_model.embed_tokens"
    assert f"base_model.model.{embedding}.lora_embedding_A" in names
    inside = {target for target in targets if target not in ("lm_head", embedding)}
    assert inside and all(target.startswith("model.language_model.layers.") for target in inside)
    assert {f"base_model.model.{target}.lora_B.weight" for target in inside} <= names
    again = load(tmp_path / "out", model.config)
    assert deltas(again).keys() == deltas(change).keys()
    for name, delta in deltas(change).items():
        np.testing.assert_allclose(deltas(again)[name], delta, atol=1e-6)


def test_an_adapter_that_mlx_lm_trained_is_read(folder, config, tmp_path):
    """Made and saved by mlx-lm's own layers."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers

    parameters = {"rank": 3, "scale": 7.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.down_proj"]}
    model = mlx_lm_model(folder)
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)  # the last layer only
    names = [name for name, _ in tree_flatten(model.trainable_parameters())]
    mx.random.seed(1)
    model.load_weights(
        [(n, 0.1 * mx.random.normal(p.shape)) for n, p in tree_flatten(model.trainable_parameters())],
        strict=False,
    )
    model.eval()
    out = tmp_path / "theirs"
    out.mkdir()
    mx.save_safetensors(str(out / FILES["mlx-lm"]), dict(tree_flatten(model.trainable_parameters())))
    write_json(out / CONFIG, {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters})
    read = load(out, config)
    assert len(names) == 4 and set(read.pairs) == {("q_proj", 1), ("down_proj", 1)}
    np.testing.assert_allclose(dense_twin(folder, read), logits(model), atol=1e-4)


@pytest.mark.parametrize("kind", FILES)
def test_an_export_is_read_back_as_it_was(config, tmp_path, kind):
    change = a_change(config, np.random.default_rng(1))
    export(change, config, tmp_path / "out", kind)
    back = load(tmp_path / "out", config)
    wanted, got = deltas(change), deltas(back)
    assert wanted.keys() == got.keys() and back.rank == change.rank
    for name in wanted:
        np.testing.assert_allclose(got[name], wanted[name], atol=1e-6)


@pytest.mark.parametrize("kind", FILES)
def test_micro_comes_back_bit_for_bit_and_at_rest(config, tmp_path, kind):
    micro = a_micro(config, np.random.default_rng(2))
    export(combine_adapter(None, micro), config, tmp_path / "out", kind)
    fresh = MicroLoRA.fresh(np.ones((config.hidden_size, 2)), config.vocab_size)
    base, back = divide_adapter(load(tmp_path / "out", config), fresh)
    assert base is None and back.alpha == micro.alpha and not back.evidence.size
    np.testing.assert_array_equal(back.lora_a, micro.lora_a)
    np.testing.assert_array_equal(back.lora_b, micro.lora_b)


def test_a_change_of_one_direction_leaves_micro_a_second_to_learn_with(config):
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((config.hidden_size, 1)), rng.standard_normal((1, config.vocab_size))
    fresh = MicroLoRA.fresh(rng.standard_normal((config.hidden_size, 2)), config.vocab_size)
    base, micro = divide_adapter(BaseLoRA({HEAD: (a.astype("f4"), b.astype("f4"))}, 3.0), fresh)
    assert base is None
    np.testing.assert_allclose(micro.scale * micro.lora_a @ micro.lora_b, 3 * a @ b, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(micro.lora_a[:, 1], fresh.lora_a[:, 1])


def test_more_than_micro_can_hold_becomes_a_base(config):
    change = a_change(config, np.random.default_rng(4))
    fresh = MicroLoRA.fresh(np.ones((config.hidden_size, 2)), config.vocab_size)
    assert divide_adapter(change, fresh) == (change, fresh)


def test_base_and_micro_together_are_their_sum(config):
    rng = np.random.default_rng(5)
    change, micro = a_change(config, rng), a_micro(config, rng)
    added = {"lm_head": micro.scale * (micro.lora_a @ micro.lora_b).T}
    for base in (
        None,
        change,
        BaseLoRA({}),
        BaseLoRA({p: x for p, x in change.pairs.items() if p != HEAD}, 0.5),
    ):
        both = deltas(combine_adapter(base, micro))
        own = deltas(base) if base else {}
        for name in own | added:
            wanted = own.get(name, 0) + added.get(name, 0)
            np.testing.assert_allclose(both[name], wanted, atol=1e-4)


def test_4_bits_are_a_fifth_of_the_file_and_close(config, tmp_path):
    change = a_change(config, np.random.default_rng(6))
    export(change, config, tmp_path / "whole", "mlx-lm")
    export(change, config, tmp_path / "packed", "mlx-lm", bits=4)
    files = tmp_path / "whole" / FILES["mlx-lm"], tmp_path / "packed" / PACKED
    whole, packed = (sum(t.nbytes for t in read_safetensors(f).values()) for f in files)
    assert packed < 0.25 * whole
    wanted, got = deltas(change), deltas(load(tmp_path / "packed", config))
    for name in wanted:
        assert np.linalg.norm(got[name] - wanted[name]) < 0.25 * np.linalg.norm(wanted[name])


def test_a_tied_head_goes_to_peft_but_not_to_mlx_lm(tmp_path):
    config = load_model(str(make_safetensors_model(tmp_path / "tied", tie=True))).config
    change = combine_adapter(None, a_micro(config, np.random.default_rng(7)))
    with pytest.raises(UsageError, match=r"tied embeddings.*fuse"):
        export(change, config, tmp_path / "out", "mlx-lm")
    assert not (tmp_path / "out").exists()
    export(change, config, tmp_path / "out", "peft")
    settings = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert settings["target_modules"] == ["lm_head"] and settings["lora_alpha"] / settings["r"] == 2
    assert deltas(load(tmp_path / "out", config)).keys() == {"lm_head"}
    export(change, config, tmp_path / "out", "mlx-lm", bits=4)  # for ourselves
    assert {p.name for p in (tmp_path / "out").iterdir()} == {PACKED, CONFIG}


def test_gguf_and_safetensors_name_the_same_rows(tmp_path):
    """A GGUF file interleaves q and k rows; after loading both formats are laid out alike, so that one
    adapter serves both."""
    shape = dict(n_heads=4, n_kv_heads=2, head_dim=32)
    ours = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="F32", **shape))).load_weights()
    theirs = load_model(str(make_safetensors_model(tmp_path / "m", dtype="float32", **shape))).load_weights()
    for name, _ in matrices(Shape(**shape).config()):
        np.testing.assert_array_equal(ours[f"{name}.weight"], theirs[f"{name}.weight"])


@pytest.mark.parametrize(
    "settings, scale",
    [
        ({}, 4.0),
        ({"use_rslora": True}, 12 / 3**0.5),
        ({"alpha_pattern": {"q_proj": 6}}, 2.0),
        ({"alpha_pattern": {"v_proj": 6}, "bias": "none", "use_dora": False}, 4.0),
    ],
)
def test_peft_scales_are_understood(config, tmp_path, settings, scale):
    product = peft(tmp_path / "p", **settings)
    got = deltas(load(tmp_path / "p", config))["model.layers.1.self_attn.q_proj"]
    np.testing.assert_allclose(got, scale * product, rtol=1e-4, atol=1e-4)


def test_half_precision_factors_are_read(config, tmp_path):
    product = peft(tmp_path / "p", dtype="float16")
    got = deltas(load(tmp_path / "p", config))["model.layers.1.self_attn.q_proj"]
    np.testing.assert_allclose(got, 4 * product, atol=0.1)

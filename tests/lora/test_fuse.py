"""A fused folder against the adapter applied on the fly, in mlx-lm and in our own loader."""

import json

import numpy as np
import pytest

from ruvmlx.backends.reference import ReferenceBackend, unpack_weights
from ruvmlx.errors import UnsupportedModel, UsageError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.fuse import fuse
from ruvmlx.lora.interchange import combine_adapter
from ruvmlx.lora.merge import HEAD
from ruvmlx.models.config.model import Message
from ruvmlx.models.config.rope_scaling import YarnRope
from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.files.safetensors_file import read_safetensors
from ruvmlx.models.load import load_model
from ruvmlx.models.text.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.text.tokenizer_json import folder_tokenizer
from ruvmlx.models.weights.hf_write import _write_tokenizer

from ..models.gguf_writer import write_gguf
from ..models.make_gguf import make_gguf_model
from ..models.make_models import make_safetensors_model
from ..models.strings import STRINGS
from ..models.vocabularies import gguf_spm_keys, gguf_vocab_keys
from .exchange import TOKENS, a_change, a_micro, deltas, logits, mlx_lm_model

TEXTS = ["Hello, world! 123", "  two  spaces\n\n\tand the naïve 日本 🙂", "<|im_end|> is text"]


def reference_logits(model, change: BaseLoRA | None = None) -> np.ndarray:
    """Our oracle in float32, the adapter's dense change added to its weights."""
    weights = unpack_weights(model.load_weights(), model.config)
    if model.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, delta in (deltas(change) if change else {}).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + delta
    backend = ReferenceBackend(model)
    backend._weights = weights
    hidden = backend.hidden_states(TOKENS)
    return hidden @ weights["lm_head.weight"].T


def close(got, wanted, share):
    np.testing.assert_allclose(got, wanted, atol=share * np.abs(wanted).max())


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("stored", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"bits": 4}, {"bits": 8}])
def test_a_folder_fused_is_what_mlx_lm_computes_with_the_adapter(tmp_path, stored, tie):
    model = load_model(str(make_safetensors_model(tmp_path / "m", tie=tie, **stored)))
    rng = np.random.default_rng(0)
    change = combine_adapter(a_change(model.config, rng), a_micro(model.config, rng))
    fuse(model, change, tmp_path / "fused")
    wanted = reference_logits(model, change)
    assert np.abs(wanted - reference_logits(model)).max() > 0.1
    fused = load_model(str(tmp_path / "fused"))
    assert not fused.config.tie_word_embeddings and fused.tokenizer.encode("hi") == model.tokenizer.encode(
        "hi"
    )
    share = {"float32": 1e-4, "bfloat16": 3e-2}.get(stored.get("dtype", ""), 3e-3)
    close(reference_logits(fused), wanted, share)
    close(logits(mlx_lm_model(tmp_path / "fused")), wanted, 2 * share)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0", "F16", "F32"])
def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path, quant):
    """As mlx-lm itself loads it, tokenizer included."""
    from mlx_lm import load

    model = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant=quant, tie=True)))
    change = combine_adapter(
        a_change(model.config, np.random.default_rng(1), head=False),
        a_micro(model.config, np.random.default_rng(2)),
    )
    fuse(model, change, tmp_path / "fused", dtype="float32")
    theirs, tokenizer = load(str(tmp_path / "fused"))
    close(logits(theirs), reference_logits(model, change), 1e-3 if quant == "F32" else 3e-3)
    fused = load_model(str(tmp_path / "fused")).tokenizer
    for text in TEXTS:
        ids = model.tokenizer.encode(text)
        assert fused.encode(text) == ids
        assert tokenizer.encode(text.replace("<|im_end|>", "")) == model.tokenizer.encode(
            text.replace("<|im_end|>", "")
        )
    assert fused.special_tokens == model.tokenizer.special_tokens and fused.eos_ids == model.tokenizer.eos_ids
    assert tokenizer.encode("<|im_end|>") == model.tokenizer.encode("<|im_end|>", special=True)


YARN = YarnRope(4.0, 50, 1.0, beta_fast=8.0)
SPECIAL = [
    {"sliding_window": 8},
    {"llama3": True},
    {"attention_bias": True, "mlp_bias": True},
    {"family": "qwen2", "head_dim": 16},
    {"family": "qwen3", "rope": YarnRope(4.0, 50, 0.1 * float(np.log(4)) + 1)},
    {"family": "smollm3", "n_layers": 4, "rope": YARN},
    {"family": "ministral3", "rope": YARN, "wrapped": True},
    {"family": "stablelm", "head_dim": 16, "rope_dims": 4, "attention_bias": True},
]


@pytest.mark.parametrize("shape", SPECIAL)
def test_what_makes_a_model_special_is_kept(tmp_path, shape):
    for model in (
        load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="F16", **shape))),
        load_model(str(make_safetensors_model(tmp_path / "m", **shape))),
    ):
        out = tmp_path / f"fused-{model.format}"
        change = a_change(model.config, np.random.default_rng(3))
        fuse(model, change, out, dtype="float32")
        assert load_model(str(out)).config == model.config
        if model.format == "gguf" or not model.config.sliding_window:  # mlx-lm wants one layer without it
            close(logits(mlx_lm_model(out)), reference_logits(model, change), 3e-3)


def test_an_mpt_is_refused_in_one_line(tmp_path):
    """Other tools want its q, k and v as one matrix. Nothing is written."""
    shape = {"family": "mpt", "n_heads": 2, "n_kv_heads": 2}
    for model in (
        load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="F16", **shape))),
        load_model(str(make_safetensors_model(tmp_path / "m", **shape))),
    ):
        with pytest.raises(UnsupportedModel, match="MPT cannot be written") as error:
            fuse(model, BaseLoRA({}), tmp_path / "out")
        assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_unchanged_matrices_stay_packed_and_a_tied_model_tied(tmp_path):
    model = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="Q4_1", tie=True)))
    change = a_change(model.config, np.random.default_rng(4), head=False)
    fuse(model, change, tmp_path / "fused")
    tensors = read_safetensors(tmp_path / "fused" / "model.safetensors")
    changed = {f"{name}.weight" for name in deltas(change)}
    assert {n for n, t in tensors.items() if t.dtype == "U32"}.isdisjoint(changed)
    assert tensors["model.embed_tokens.weight"].dtype == "U32" and "lm_head.weight" not in tensors
    assert {tensors[n].dtype for n in changed} == {"F16"}
    assert load_model(str(tmp_path / "fused")).config.tie_word_embeddings
    close(logits(mlx_lm_model(tmp_path / "fused")), reference_logits(model, change), 5e-3)


def test_dequantised_holds_no_packed_matrix(tmp_path):
    model = load_model(str(make_safetensors_model(tmp_path / "m", bits=4)))
    change = a_change(model.config, np.random.default_rng(5))
    fuse(model, change, tmp_path / "fused", dequantise=True)
    tensors = read_safetensors(tmp_path / "fused" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {"F16"}
    assert "quantization" not in json.loads((tmp_path / "fused" / "config.json").read_text())
    close(logits(mlx_lm_model(tmp_path / "fused")), reference_logits(model, change), 5e-3)


def test_what_float16_cannot_hold_is_said(tmp_path):
    model = load_model(str(make_safetensors_model(tmp_path / "m")))
    a, b = np.full((64, 1), 1e3, np.float32), np.full((1, 320), 1e3, np.float32)
    with pytest.raises(UsageError, match=r"lm_head does not fit into float16.*--dtype"):
        fuse(model, BaseLoRA({HEAD: (a, b)}), tmp_path / "fused")
    assert not (tmp_path / "fused").exists()


@pytest.mark.parametrize("system", ["", "Be brief, {{ 'or' }} \"not\"."])
def test_the_default_system_prompt_goes_along(tmp_path, system):
    """ruvmlx and other tools then read the same prompt as with the adapter."""
    from transformers import AutoTokenizer

    model = load_model(str(make_gguf_model(tmp_path / "m.gguf", quant="F32", tie=True)))
    model.tokenizer.default_system = system
    fuse(model, a_change(model.config, np.random.default_rng(1), head=False), tmp_path / "fused")
    fused, theirs = (
        load_model(str(tmp_path / "fused")).tokenizer,
        AutoTokenizer.from_pretrained(tmp_path / "fused"),
    )
    for roles in (["user"], ["system", "user"], ["user", "assistant", "user"]):
        said = [Message(role, f"text {at}") for at, role in enumerate(roles)]
        wanted = model.tokenizer.encode_chat(said)
        assert fused.encode_chat(said) == wanted
        found = theirs.apply_chat_template([vars(m) for m in said], add_generation_prompt=True, tokenize=True)
        assert list(found["input_ids"] if hasattr(found, "keys") else found) == wanted


def test_a_folder_with_files_is_left_alone(tmp_path):
    model = load_model(str(make_safetensors_model(tmp_path / "m")))
    with pytest.raises(UsageError, match="exists"):
        fuse(model, BaseLoRA({}), tmp_path / "m")


@pytest.mark.parametrize(
    "keys",
    [gguf_spm_keys(), gguf_spm_keys(False), gguf_vocab_keys() | {"tokenizer.ggml.add_bos_token": True}],
)
def test_tokenizers_of_gguf_files_survive_as_files(tmp_path, keys):
    from transformers import AutoTokenizer

    path = write_gguf(tmp_path / "v.gguf", keys, {})
    ours = gguf_tokenizer(read_gguf(path))
    _write_tokenizer(ours, tmp_path)
    back = folder_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in STRINGS:
        assert back.encode(text) == ours.encode(text)
    assert back.adds_bos == ours.adds_bos and back.bos_id == ours.bos_id
    for text in ("the hand in the inn", "a then b"):
        assert theirs.encode(text) == ours.encode(text)

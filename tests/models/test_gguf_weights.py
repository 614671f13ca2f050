"""GGUF tensors against slow decoders, MLX's own loader and the weights they were made from."""

import struct

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, UnsupportedModel
from ruvmlx.models.config.gguf_config import gguf_name
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.config.rope import llama3_divisors, llama3_from_divisors
from ruvmlx.models.config.rope_scaling import Llama3Rope, LongRope
from ruvmlx.models.files import gguf_blocks
from ruvmlx.models.files.gguf import GGUFTensor
from ruvmlx.models.files.gguf_blocks import check_finite, unpack
from ruvmlx.models.files.gguf_types import TENSOR_TYPES
from ruvmlx.models.load import load_gguf

from .gguf_writer import decode_blocks, encode_blocks, f32, u32, write_gguf
from .make_gguf import gguf_metadata, gguf_tensors, make_gguf_model
from .shapes import LLAMA3, Shape, random_weights

QUANTS = ["Q4_0", "Q4_1", "Q8_0"]


def tensor(kind: str, shape: tuple) -> GGUFTensor:
    return GGUFTensor("w", shape, next(t for t in TENSOR_TYPES.values() if t.name == kind), 0)


def dequantize(parts: dict, cols: int) -> np.ndarray:
    """w = scale * q + bias in float32, one shift per weight: the twin of mx.dequantize."""
    bits = 32 * parts["weight"].shape[-1] // cols
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    q = (parts["weight"][..., None] >> shifts & (2**bits - 1)).reshape(*parts["weight"].shape[:-1], cols)
    wide = [np.repeat(parts[k].astype(np.float32), 32, -1) for k in ("scales", "biases")]
    return q * wide[0] + wide[1]


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (5, 160)])
def test_blocks_equal_the_plain_decoder(kind, shape):
    """Random bytes with sane scales, odd row counts: every weight equal to the one-at-a-time decoder's."""
    rng = np.random.default_rng(shape[1])
    raw = encode_blocks(rng.standard_normal(shape) * 3, kind)
    got = dequantize(unpack(np.frombuffer(raw, np.uint8), tensor(kind, shape)), shape[1])
    np.testing.assert_array_equal(got, decode_blocks(raw, kind, shape))
    assert np.abs(got).max() > 1


@pytest.mark.parametrize("kind", QUANTS)
def test_mlx_reads_the_same_numbers(kind, tmp_path):
    """mx.load of the same file gives our packed words, scales and biases, bit for bit; values agree."""
    mx = pytest.importorskip("mlx.core")
    path = make_gguf_model(tmp_path / "m.gguf", quant=kind, n_layers=1)
    model, theirs = load_gguf(path), mx.load(str(path))
    ours = model.load_weights()
    for module, (_, cols) in matrices(model.config):
        if module.endswith(("q_proj", "k_proj")):
            continue  # rows are moved on purpose; compared below
        parts = {k: ours[f"{module}.{k}"] for k in ("weight", "scales", "biases")}
        name = gguf_name(f"{module}.weight").removesuffix(".weight")
        for k, array in parts.items():
            np.testing.assert_array_equal(np.array(theirs[f"{name}.{k}"]), array)
        mlx_values = mx.dequantize(
            *map(mx.array, parts.values()), group_size=32, bits=4 if "4" in kind else 8
        )
        close = np.array(mlx_values.astype(mx.float32))
        np.testing.assert_allclose(dequantize(parts, cols), close, rtol=2e-3, atol=2e-3)


def test_mlx_reads_the_same_starter(starter_file):
    """The real file: words, scales and biases of every matrix as mx.load has them; q and k rows moved."""
    mx = pytest.importorskip("mlx.core")
    model = load_gguf(starter_file)
    ours, theirs = model.load_weights(), mx.load(str(starter_file))
    for module, _ in matrices(model.config):
        name = gguf_name(f"{module}.weight").removesuffix(".weight")
        for part in ("weight", "scales", "biases"):
            want = np.array(theirs[f"{name}.{part}"])
            if module.endswith(("q_proj", "k_proj")):
                head = np.arange(64).reshape(32, 2).T.reshape(-1)  # 0, 2, 4, ... 62, 1, 3, ... 63
                want = want.reshape(-1, 64, want.shape[1])[:, head].reshape(want.shape)
            assert np.array_equal(ours[f"{module}.{part}"], want), (module, part)


@pytest.mark.parametrize(
    ("kind", "atol"), [("F32", 0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2), ("Q4_1", 0.3)]
)
def test_rows_return_to_half_split_order(kind, atol, tmp_path):
    """Interleaved q and k rows, weights and biases, come back where the float32 original has them."""
    shape = {"attention_bias": True, "n_heads": 3, "n_kv_heads": 1, "head_dim": 32}
    model = load_gguf(make_gguf_model(tmp_path / "m.gguf", quant=kind, **shape))
    got = model.load_weights()
    for name, want in random_weights(model.config).items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in got:
            parts = {k: got[f"{module}.{k}"] for k in ("weight", "scales", "biases")}
            values = dequantize(parts, want.shape[1])
        else:
            values = got[name].astype(np.float32)
        np.testing.assert_allclose(values, want, atol=atol, err_msg=name)


def test_plain_tensors_are_views_of_the_file(tmp_path):
    """Nothing is copied that need not be: a norm and an embedding in F32 do not own their memory."""
    weights = load_gguf(make_gguf_model(tmp_path / "m.gguf", quant="F32")).load_weights()
    for name in ("model.norm.weight", "model.embed_tokens.weight"):
        assert weights[name].base is not None and not weights[name].flags.writeable


@pytest.mark.parametrize("kind", QUANTS)
def test_some_blocks_at_a_time(kind, monkeypatch):
    """The same arrays, also where only a later part has wide scales; the caller may leave in between."""
    values = np.random.default_rng(3).standard_normal((5, 96))
    if kind != "Q4_1":
        values[3, 70] = 70000.0
    raw, calls = np.frombuffer(encode_blocks(values, kind), np.uint8), []
    want = unpack(raw, tensor(kind, values.shape))
    assert (want["scales"].dtype == np.float32) == (kind != "Q4_1")
    monkeypatch.setattr(gguf_blocks, "BLOCKS", 4)
    got = unpack(raw, tensor(kind, values.shape), lambda: calls.append(1))
    for part, array in want.items():
        assert got[part].dtype == array.dtype
        np.testing.assert_array_equal(got[part], array)
    assert len(calls) == 4


@pytest.mark.parametrize(("kind", "scale"), [("Q4_0", 20000.0), ("Q8_0", 1000.0)])
def test_wide_scales_become_float32(kind, scale):
    """-8 d or -128 d beyond float16's 65504 stays exact instead of turning into infinity."""
    raw = struct.pack("<e", scale) + bytes(range(16 if kind == "Q4_0" else 32))
    parts = unpack(np.frombuffer(raw, np.uint8), tensor(kind, (1, 32)))
    assert parts["biases"].dtype == np.float32
    np.testing.assert_array_equal(dequantize(parts, 32), decode_blocks(raw, kind, (1, 32)))


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_in_scales_is_refused(kind, bad):
    """One bad scale among many, also where it is the second half (Q4_1's minimum)."""
    raw = bytearray(encode_blocks(np.ones((4, 64)), kind))
    size = tensor(kind, (32,)).type.nbytes
    struct.pack_into("<e", raw, 5 * size + (2 if kind == "Q4_1" else 0), bad)
    with pytest.raises(CorruptFile, match="NaN or infinity"):
        unpack(np.frombuffer(bytes(raw), np.uint8), tensor(kind, (4, 64)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_check_finite_sees_the_last_element(dtype):
    """Pieces are joined without a gap, and the largest finite number passes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    array = np.full(300_001, float(ml_dtypes.finfo(kind).max), kind)
    check_finite(array, "w")
    for at in (0, 262_143, 262_144, 300_000):
        spoiled = array.copy()
        spoiled[at] = np.nan
        with pytest.raises(CorruptFile):
            check_finite(spoiled, "w")


# Configuration ------------------------------------------------------------------------------------


def write(tmp_path, tensors=None, **keys):
    made = Shape(n_layers=1, hidden_size=32, intermediate_size=96)
    metadata = gguf_metadata(made) | keys
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return write_gguf(tmp_path / "m.gguf", metadata, tensors or gguf_tensors(made, "F16"))


LONG = LongRope(64, 1.25, (1.0,) * 8 + (1.5,) * 8, tuple(1 + 0.5 * i for i in range(16)))


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 64}, {"tie": True}, {"llama3": True}, {"mlp_bias": True}, {"rope": LONG}],
)
def test_config_round_trip(options, tmp_path):
    """Keys and tensors say the same shape that the file was made from."""
    path = make_gguf_model(tmp_path / "m.gguf", quant="Q8_0", **options)
    assert load_gguf(path).config == Shape(**options).config()


YARN = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": f32(4.0)}
NUMBERS = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize(
    ("keys", "words", "error"),
    [
        ({"split.count": u32(3)}, "one of 3 parts", CorruptFile),
        ({"general.architecture": "phi3"}, "architecture 'phi3'", UnsupportedModel),
        ({"llama.block_count": u32(2)}, "'blk.1.attn_q.weight' .* is missing", CorruptFile),
        ({"llama.block_count": u32(1 << 31)}, "n_layers", CorruptFile),
        ({"llama.block_count": None}, "llama.block_count is missing", CorruptFile),
        ({"general.architecture": None}, "architecture is missing", UnsupportedModel),
        ({"llama.embedding_length": u32(64)}, r"'token_embd.weight' has shape \[320, 32\]", CorruptFile),
        ({"llama.attention.head_count": u32(0)}, "head_count is 0", CorruptFile),
        ({"llama.attention.head_count_kv": u32(3)}, "4 heads cannot share 3", CorruptFile),
        ({"llama.attention.head_count_kv": u32(1)}, r"attn_k.weight' has shape \[64, 32\]", CorruptFile),
        ({"llama.attention.layer_norm_rms_epsilon": f32(float("nan"))}, "a number was expected", CorruptFile),
        ({"llama.rope.freq_base": f32(-1.0)}, "rope_theta is -1.0", CorruptFile),
        ({"llama.rope.dimension_count": u32(16)}, "dimension_count is 16", UnsupportedModel),
        ({"llama.rope.scaling.type": "su"}, "rope scaling 'su'", UnsupportedModel),
        ({"llama.rope.scaling.type": NUMBERS}, r"'\[0 1 2\]'; a text was expected", CorruptFile),
        ({"llama.rope.scaling.type": "longrope"}, "rope_factors_short.weight' is missing", CorruptFile),
        ({"llama.rope.scaling.attn_factor": f32(2.0)}, "attn_factor is 2.0", UnsupportedModel),
        (YARN | {"llama.rope.scaling.attn_factor": f32(2.0)}, "attn_factor is 2.0", UnsupportedModel),
        (YARN | {"llama.rope.scaling.yarn_ext_factor": f32(0.5)}, "yarn_ext_factor is 0.5", UnsupportedModel),
        (YARN | {"llama.rope.scaling.factor": f32(0.0)}, "does not make sense", CorruptFile),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer 'rwkv'", UnsupportedModel),
        ({"tokenizer.ggml.pre": "poro-chat"}, "pre-tokenizer 'poro-chat'", UnsupportedModel),
        ({"tokenizer.ggml.tokens": ["x"] * 321}, "tokenizer.ggml.token_type", CorruptFile),
        ({"tokenizer.ggml.tokens": []}, "is empty", CorruptFile),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing", CorruptFile),
        ({"tokenizer.ggml.merges": ["a b c"]}, "not a pair", CorruptFile),
        ({"tokenizer.ggml.merges": ["q zz"]}, "the library that reads it fails", CorruptFile),
        ({"tokenizer.ggml.eos_token_id": u32(9999)}, "eos_token_id is not one of", CorruptFile),
        ({"tokenizer.ggml.eos_token_id": NUMBERS}, "eos_token_id is not one of", CorruptFile),
        ({"tokenizer.ggml.bos_token_id": NUMBERS}, "bos_token_id is not one of", CorruptFile),
        ({"general.architecture": NUMBERS}, "architecture", UnsupportedModel),
    ],
)
def test_wrong_keys_one_line(keys, words, error, tmp_path):
    """Each wrong key has its own words; nothing else escapes."""
    load_gguf(write(tmp_path))
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(error, match=words) as caught:
        load_gguf(write(tmp_path, **keys))
    assert "\n" not in str(caught.value)


def test_more_tokens_than_rows(tmp_path):
    """A token without an embedding row would index out of bounds."""
    tokens = [f"t{i}" for i in range(321)]
    keys = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": None}
    with pytest.raises(CorruptFile, match="321 tokens, the embedding only 320"):
        load_gguf(write(tmp_path, **keys))


def test_foreign_tensors_are_not_ignored(tmp_path):
    """A tensor that the decoder would leave out changes the model: refused by name."""
    extra = {"blk.0.attn_q_norm.weight": ("F32", (32,), np.ones(32, "<f4").tobytes())}
    made = Shape(n_layers=1, hidden_size=32, intermediate_size=96)
    with pytest.raises(UnsupportedModel, match="attn_q_norm"):
        load_gguf(write(tmp_path, gguf_tensors(made, "F16") | extra))


def longrope_tensors(*sizes: int):
    return {
        f"rope_factors_{name}.weight": ("F32", (n,), np.ones(n, "<f4").tobytes())
        for name, n in zip(("short", "long"), sizes, strict=False)
    }


@pytest.mark.parametrize(
    ("sizes", "keys", "words", "error"),
    [
        ((16, 16), {"type": None}, "rope_factors_short.weight' is no part", UnsupportedModel),
        ((16,), {}, "rope_factors_long.weight' is missing", CorruptFile),
        ((16, 15), {}, "does not make sense", CorruptFile),
        ((16, 16), {"factor": f32(4.0)}, "factor is 4 beside longrope", UnsupportedModel),
        ((16, 16), {"attn_factor": f32(-1.0)}, "does not make sense", CorruptFile),
    ],
)
def test_longrope_that_does_not_fit_is_refused(tmp_path, sizes, keys, words, error):
    made = Shape(n_layers=1, hidden_size=32, intermediate_size=96)
    told = {f"llama.rope.scaling.{key}": value for key, value in ({"type": "longrope"} | keys).items()}
    with pytest.raises(error, match=words) as caught:
        load_gguf(write(tmp_path, gguf_tensors(made, "F16") | longrope_tensors(*sizes), **told))
    assert "\n" not in str(caught.value)


def test_llama_3_divisors_beside_longrope_are_refused(tmp_path):
    made = Shape(n_layers=1, hidden_size=32, intermediate_size=96, llama3=True)
    tensors = gguf_tensors(made, "F16") | longrope_tensors(16, 16)
    with pytest.raises(UnsupportedModel, match="one of the two"):
        load_gguf(write(tmp_path, tensors, **{"llama.rope.scaling.type": "longrope"}))


# Llama-3 rope -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scaling", "theta", "head_dim"),
    [
        (Llama3Rope(8.0, 1.0, 4.0, 8192), 500000.0, 128),
        (Llama3Rope(32.0, 1.0, 4.0, 8192), 500000.0, 64),
        (Llama3Rope(16.0, 1.0, 8.0, 4096), 100000.0, 128),
        (LLAMA3, 10000.0, 32),
    ],
)
def test_scaling_is_recovered_from_its_divisors(scaling, theta, head_dim):
    """float32 divisors, as files store them, give back the parameters."""
    stored = llama3_divisors(scaling, head_dim, theta).astype(np.float32)
    assert len(set(stored.tolist())) > 1
    assert llama3_from_divisors(stored, theta) == scaling


def test_other_divisors_are_not_guessed():
    """Noise, negative or constant divisors are no Llama-3 scaling."""
    rng = np.random.default_rng(0)
    for stored in (1 + rng.random(64), -np.ones(64), np.full(64, np.nan), np.linspace(1, 8, 64)):
        assert llama3_from_divisors(stored, 10000.0) is None

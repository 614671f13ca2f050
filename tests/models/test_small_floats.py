"""Small floats in safetensors files: weights equal MLX's to the bit, and bad files are one line."""

import json

import numpy as np
import pytest

from ruvmlx.backends.reference import unpack_weights
from ruvmlx.errors import CorruptFile, RuvmlxError, UnsupportedModel
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.files.affine import dequantise
from ruvmlx.models.files.safetensors_file import ALL_BYTES, read_safetensors
from ruvmlx.models.files.small_floats import MODES
from ruvmlx.models.load import load_model
from ruvmlx.models.weights.stored import stored_matrix
from ruvmlx.platform.mx import mx

from .small_float_models import FP8, MODE_NAMES, make_small_floats, mlx_weights

HOW = [*MODE_NAMES, *FP8]


@pytest.fixture(params=HOW)
def folder(request, tmp_path):
    return make_small_floats(tmp_path / "m", request.param)


def change(folder, **keys):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | keys))


def test_weights_are_mlxs_to_the_bit(folder):
    model = load_model(str(folder))
    got, want = unpack_weights(model.load_weights(), model.config), mlx_weights(folder)
    assert got.keys() == want.keys()
    for name, w in want.items():
        assert (got[name] == w).all() and np.abs(w).max() > 0, name


def test_eight_bits_hold_mxfp4_exactly_and_the_others_nearly(folder):
    """A group of 32 is off by at most half a step of its largest weight."""
    model = load_model(str(folder))
    weights = model.load_weights()
    for module, shape in matrices(model.config):
        if (stored := stored_matrix(weights, module)) is None:
            continue
        assert stored.shape == shape
        want = stored.dequantise()
        got = dequantise(*(weights[f"{module}.{part}"] for part in ("weight", "scales", "biases")), shape[1])
        groups = want.reshape(shape[0], -1, 32)
        step = np.abs(groups).max(2, keepdims=True) / 127 * 1.01  # scales are rounded up
        exact = stored.type.affine
        assert (np.abs(got.reshape(groups.shape) - groups) <= (0 if exact else step / 2)).all()
        np.testing.assert_array_equal(stored.dequantise(slice(3, 9)), want[3:9])


def test_some_matrices_may_be_plain_or_in_another_format(tmp_path):
    """As mlx-lm writes mixtures: the table names each matrix that differs from the default."""
    folder = make_small_floats(tmp_path / "m", "mxfp4", keep=("lm_head", "o_proj"))
    path = folder / "model.safetensors"
    tensors, module = dict(mx.load(str(path))), "model.layers.0.mlp.up_proj"
    own = {"group_size": 32, "bits": 8}
    w = mx.dequantize(
        tensors[f"{module}.weight"], tensors[f"{module}.scales"], group_size=32, bits=4, mode="mxfp4"
    )
    parts = mx.quantize(w, **own)
    tensors |= {
        f"{module}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts, strict=True)
    }
    mx.eval(tensors)
    mx.save_safetensors(str(path), tensors)
    change(folder, quantization={"group_size": 32, "bits": 4, "mode": "mxfp4", module: own})
    model = load_model(str(folder))
    weights = model.load_weights()
    assert stored_matrix(weights, "lm_head") is None and stored_matrix(weights, module) is None
    assert stored_matrix(weights, "model.layers.0.mlp.down_proj").type.name == "mxfp4"
    got = unpack_weights(weights, model.config)[f"{module}.weight"]
    want = mx.dequantize(*parts, **own).astype(mx.float32)
    np.testing.assert_allclose(got, np.array(want), atol=0.02 * np.abs(got).max())  # bfloat16


@pytest.mark.parametrize(
    ("how", "keys", "error", "words"),
    [
        ("mxfp4", {"group_size": 64}, UnsupportedModel, "mxfp4 with 4 bits in groups of 64; 4 bits in"),
        ("mxfp4", {"mode": "mxfp5"}, UnsupportedModel, "mode 'mxfp5'; affine, mxfp4"),
        ("mxfp4", {"mode": "nvfp4", "group_size": 16}, CorruptFile, "scales' has shape"),
        ("mxfp8", {"mode": "affine"}, (CorruptFile, UnsupportedModel), "U8"),
        ("fp8-blocks", {"weight_block_size": [16, 0]}, CorruptFile, "weight_block_size"),
        ("fp8-blocks", {"weight_block_size": [128, 128]}, CorruptFile, "weight_scale_inv' has shape"),
        ("fp8-blocks", {"weight_block_size": None}, CorruptFile, "weight_block_size is 'None'"),
        ("fp8", {"quant_method": "fp9"}, UnsupportedModel, "F8_E4M3|'fp9'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(tmp_path, how, keys, error, words):
    folder = make_small_floats(tmp_path / "m", how)
    table = "quantization_config" if how in FP8 else "quantization"
    change(folder, **{table: json.loads((folder / "config.json").read_text())[table] | keys})
    with pytest.raises(error, match=words) as caught:
        load_model(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("how", "suffix"), [
    ("mxfp4", "up_proj.scales"), ("nvfp4", "up_proj.scales"), ("mxfp8", "up_proj.scales"),
    ("mxfp8", "up_proj.weight"), ("fp8", "up_proj.weight"), ("fp8", "up_proj.weight_scale_inv"),
])  # fmt: skip
def test_nan_is_refused(tmp_path, how, suffix):
    """Bytes of ones are NaN in e8m0, e4m3 and bfloat16 alike."""
    folder = make_small_floats(tmp_path / "m", how)
    path = folder / "model.safetensors"
    tensor = read_safetensors(path, ALL_BYTES)[f"model.layers.0.mlp.{suffix}"]
    data = bytearray(path.read_bytes())
    at = tensor.offset + tensor.nbytes - 2
    data[at : at + 2] = b"\xff\xff"
    path.write_bytes(bytes(data))
    weights = load_model(str(folder)).load_weights()
    with pytest.raises(CorruptFile, match=r"NaN.*Fetch"):
        list(weights.values())
    with pytest.raises(CorruptFile, match="NaN"):
        stored_matrix(weights, "model.layers.0.mlp.up_proj").dequantise()


def test_such_formats_elsewhere_stay_with_mlx_lm(tmp_path):
    """Scales of powers of two beside fp8, and formats that another tool names."""
    folder = make_small_floats(tmp_path / "m", "fp8-blocks")
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    for told in (
        {"scale_fmt": "ue8m0"},
        {"quant_method": "compressed-tensors"},
        {"quant_method": "modelopt"},
    ):
        change(folder, quantization_config=table | told)
        assert not load_model(str(folder)).is_own


@pytest.mark.parametrize("how", HOW)
def test_mutants_load_or_raise_one_line(tmp_path, how, full):
    """Of the header and of config.json; 200 each, 1,000 with --full."""
    folder = make_small_floats(tmp_path / "m", how, n_layers=1)
    rng = np.random.default_rng(HOW.index(how))
    files = [folder / "model.safetensors", folder / "config.json"]
    sound = [file.read_bytes() for file in files]
    header = 8 + int.from_bytes(sound[0][:8], "little")
    for _ in range(1000 if full else 200):
        which = int(rng.integers(2))
        data = bytearray(sound[which])
        for at in rng.integers(8 if which == 0 else 0, header if which == 0 else len(data), 2):
            data[at] = rng.integers(32, 127)
        files[which].write_bytes(bytes(data))
        try:
            model = load_model(str(folder))
            if model.is_own:
                unpack_weights(model.load_weights(), model.config)
        except RuvmlxError as error:
            assert "\n" not in str(error)
        files[which].write_bytes(sound[which])
    assert set(MODES) <= set(HOW)

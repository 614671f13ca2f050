"""safetensors folders: headers, shapes, quantisation, shards, and mutants of all of them."""

import json
import random
import struct
import time

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, RuvmlxError, UnsupportedModel
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.files.safetensors_file import read_safetensors
from ruvmlx.models.load import load_model

from .make_models import make_safetensors_model, safetensors_bytes
from .shapes import random_weights


def write(tmp_path, data: bytes):
    path = tmp_path / "x.safetensors"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def with_header(header, data=bytes(64), length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype="F32", shape=(2, 3), span=(0, 24), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span), **more}


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_arrays_come_back_also_unaligned(tmp_path, pad):
    """A header of odd length leaves the data unaligned; values survive, with and without a copy."""
    a = np.arange(6, dtype="<f4").reshape(2, 3)
    header = json.dumps({"w": entry()}).encode()
    header += b" " * (-len(header) % 8 + pad)
    found = read_safetensors(write(tmp_path, with_header(header, a.tobytes())))
    assert np.array_equal(found["w"].array(), a)
    assert found["w"].array().flags.aligned


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"1234567", "7 bytes long"),
        (with_header({"w": entry()}, length=1 << 62), "does not fit"),
        (with_header(b"{not json"), "cannot be read"),
        (with_header(b"\xff\xfe{}"), "cannot be read"),
        (with_header(b"[" * 100_000), "cannot be read"),
        (with_header([1]), "not an object"),
        (with_header(b'{"w": 1, "w": 2}'), "occurs twice"),
        (with_header({"w": 5}), "entry of 'w'"),
        (with_header({"w": entry(dtype="Q9")}), "dtype 'Q9'"),
        (with_header({"w": entry(dtype=None)}), "dtype 'None'"),
        (with_header({"w": entry(shape=(2, -3))}), "shape"),
        (with_header({"w": entry(shape=(2, 1.5))}), "shape"),
        (with_header({"w": entry(shape=(True, 6))}), "shape"),
        (with_header({"w": entry(shape=[1] * 9)}), "shape"),
        (with_header({"w": entry(shape=(1 << 61, 1 << 61))}), "is F32"),
        (with_header({"w": entry(span=(0, 25))}), "in 25 bytes"),
        (with_header({"w": entry(span=(24, 0))}), "lies at 24 to 0"),
        (with_header({"w": entry(span=(48, 72))}), "the data end at 64"),
        (with_header({"w": entry(span=(0, 24, 48))}), "data_offsets"),
        (with_header({"a": entry(), "b": entry(span=(8, 32))}), "overlap"),
    ],
)
def test_bad_headers_have_each_their_own_line(tmp_path, data, words):
    """Each kind of wrong header has its own line."""
    with pytest.raises(CorruptFile, match=words) as caught:
        read_safetensors(write(tmp_path, data))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_other_dtypes_are_named(tmp_path):
    """Eight-bit floats are sound but not run."""
    with pytest.raises(UnsupportedModel, match="F8_E4M3"):
        read_safetensors(write(tmp_path, with_header({"w": entry(dtype="F8_E4M3")})))


def test_mutated_headers_load_in_bounds_or_raise(tmp_path):
    """3,000 mutants: every array inside the file, or one RuvmlxError, never slow."""
    rng = random.Random(3)
    a = {"one": np.ones((3, 5), "<f2"), "two": np.zeros((7,), "<f4"), "three": np.ones((2, 4), "<u4")}
    data = safetensors_bytes(a)
    header = 8 + struct.unpack_from("<Q", data)[0]
    numbers = [b"0", b"-1", b"1e9", b"99999999999999999999", b"true", b"null", b'"x"', b"[]", b"3"]
    loaded = 0
    for _ in range(3000):
        out = bytearray(data)
        for _ in range(rng.choice([1, 1, 2])):
            at, kind = rng.randrange(max(1, min(header, len(out) - 8))), rng.randrange(5)
            if kind == 0:
                out[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                digits = [i for i in range(8, header) if out[i : i + 1].isdigit()]
                at = rng.choice(digits) if digits else at
                out[at : at + 1] = rng.choice(numbers)
            elif kind == 2:
                out[:8] = struct.pack("<Q", rng.choice([0, 1, header - 9, header, 1 << 40, (1 << 64) - 1]))
            elif kind == 3:
                del out[at : at + rng.choice([1, 8, 200])]
            else:
                out[at:at] = rng.randbytes(rng.choice([1, 4]))
        loaded += try_read(write(tmp_path, bytes(out)))
    assert 50 < loaded < 2500


def try_read(path) -> bool:
    start = time.process_time()
    try:
        for t in read_safetensors(path).values():
            assert t.offset + t.nbytes <= path.stat().st_size
            assert t.array().tobytes() == path.read_bytes()[t.offset : t.offset + t.nbytes]
        return True
    except RuvmlxError as error:
        assert "\n" not in str(error)
        return False
    finally:
        assert time.process_time() - start < 1


# Folders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_folder_gives_the_weights_back(dtype, bits, tmp_path):
    """Plain and packed weights, three float types, three shards: the originals to their precision."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", dtype=dtype, bits=bits, shards=3)))
    got, want = model.load_weights(), random_weights(model.config)
    for module, (_, cols) in matrices(model.config):
        value = got[f"{module}.weight"]
        if bits:
            assert got[f"{module}.scales"].dtype in (np.float16, np.float32)
            value = spread(got, module, cols, bits)
        atol = {None: 0.04, 4: 0.4, 8: 0.05}[bits]
        np.testing.assert_allclose(value.astype(np.float32), want[f"{module}.weight"], atol=atol)
    assert model.bits < {None: 33, 4: 6, 8: 10}[bits]


def spread(got, module: str, cols: int, bits: int) -> np.ndarray:
    """scale * q + bias."""
    shifts = bits * np.arange(32 // bits, dtype=np.uint32)
    q = (got[f"{module}.weight"][..., None] >> shifts & (2**bits - 1)).reshape(-1, cols)
    group = cols // got[f"{module}.scales"].shape[1]
    wide = [np.repeat(got[f"{module}.{k}"].astype(np.float32), group, 1) for k in ("scales", "biases")]
    return q * wide[0] + wide[1]


def test_mlx_reads_the_same_arrays(tmp_path):
    """mx.load of the same file gives the same packed words and values."""
    mx = pytest.importorskip("mlx.core")
    folder = make_safetensors_model(tmp_path / "m", bits=4, dtype="bfloat16")
    theirs = mx.load(str(folder / "model.safetensors"))
    ours = load_model(str(folder)).load_weights()
    assert set(ours) == set(theirs)
    for name, array in ours.items():
        other = theirs[name]
        other = other if other.dtype == mx.uint32 else other.astype(mx.float32)
        np.testing.assert_array_equal(
            np.array(other), array if array.dtype == np.uint32 else array.astype("<f4")
        )


def change(folder, file: str, **keys):
    path = folder / file
    data = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({k: v for k, v in data.items() if v != "absent"}))


def edit(folder, change_tensors):
    """Rewrite the folder's tensors."""
    tensors = {n: t.array().copy() for n, t in read_safetensors(folder / "model.safetensors").items()}
    change_tensors(tensors)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def test_wrong_shapes_name_both(tmp_path):
    """A tensor of other sides than config.json asks for: one line with the name and both shapes."""
    folder = make_safetensors_model(tmp_path / "m")
    change(folder, "config.json", num_key_value_heads=1)
    with pytest.raises(CorruptFile, match=r"k_proj.weight' has shape \[64, 64\]; .* asks for \[32, 64\]"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"quantization": {"group_size": 32, "bits": 4}}, r"scales' has shape \[320, 1\]"),
        ({"quantization": {"group_size": 64, "bits": 8}}, r"weight' has shape \[320, 8\]"),
        ({"quantization": "absent"}, "has shape"),
    ],
)
def test_wrong_quantisation_is_refused(keys, words, tmp_path):
    """Bits and group size are checked against the arrays, not believed."""
    folder = make_safetensors_model(tmp_path / "m", bits=4)
    change(folder, "config.json", **keys)
    with pytest.raises(CorruptFile, match=words):
        load_model(str(folder))


def test_single_modules_may_differ(tmp_path):
    """mlx-lm's mixed quantisation: one module 8-bit, one not quantised, in a 4-bit model."""
    four = make_safetensors_model(tmp_path / "four", bits=4)
    eight = load_model(str(make_safetensors_model(tmp_path / "eight", bits=8, group_size=32))).load_weights()
    plain = load_model(str(make_safetensors_model(tmp_path / "plain"))).load_weights()
    up, head = "model.layers.1.mlp.up_proj", "lm_head"

    def mix(tensors):
        tensors |= {f"{up}.{k}": eight[f"{up}.{k}"] for k in ("weight", "scales", "biases")}
        tensors[f"{head}.weight"] = plain[f"{head}.weight"]
        del tensors[f"{head}.scales"], tensors[f"{head}.biases"]

    edit(four, mix)
    own = {up: {"group_size": 32, "bits": 8}, head: False}
    change(four, "config.json", quantization={"group_size": 64, "bits": 4, **own})
    got = load_model(str(four)).load_weights()
    np.testing.assert_array_equal(got[f"{up}.weight"], eight[f"{up}.weight"])
    np.testing.assert_array_equal(got["lm_head.weight"], plain["lm_head.weight"])
    assert "lm_head.scales" not in got


def test_nan_is_refused_at_load(tmp_path):
    """One NaN among the weights; the message names the tensor."""
    folder = make_safetensors_model(tmp_path / "m")
    edit(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"].__setitem__((7, 5), np.nan))
    model = load_model(str(folder))
    with pytest.raises(CorruptFile, match=r"layers\.1\.mlp\.up_proj"):
        dict(model.load_weights())


def test_foreign_and_unused_tensors(tmp_path):
    """Old rope tables and a tied head's copy are left out; anything else unknown is refused."""
    folder = make_safetensors_model(tmp_path / "m", tie=True)
    unused = {
        "lm_head.weight": np.ones((320, 64), "<f2"),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, "<f4"),
    }
    edit(folder, lambda t: t.update(unused))
    assert not set(unused) & set(load_model(str(folder)).load_weights())
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": np.ones(32, "<f2")}))
    with pytest.raises(UnsupportedModel, match="q_norm"):
        load_model(str(folder))


def test_head_decides_when_tying_is_not_said(tmp_path):
    """Without tie_word_embeddings, a stored head means that it is not tied."""
    for tie in (False, True):
        folder = make_safetensors_model(tmp_path / str(tie), tie=tie)
        change(folder, "config.json", tie_word_embeddings="absent")
        assert load_model(str(folder)).config.tie_word_embeddings is tie


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../m2/model.safetensors", "not a safetensors file beside it"),
        ("gone.safetensors", "gone.safetensors is missing"),
    ],
)
def test_index_cannot_lead_away(name, words, tmp_path):
    """An index names files beside it and nothing else."""
    folder = make_safetensors_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )
    with pytest.raises(CorruptFile, match=words):
        load_model(str(folder))


def test_pickles_are_refused(tmp_path):
    """A pickle can run code: it is never opened."""
    folder = make_safetensors_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin is a pickle"):
        load_model(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CorruptFile, match="no model"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "file", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("text", ["", "{", "[]", "\ufffe", '{"a":' * 5000])
def test_broken_json_files(file, text, tmp_path):
    """Each of the folder's JSON files, broken, is one line with its name."""
    folder = make_safetensors_model(tmp_path / "m")
    (folder / file).write_text(text)
    with pytest.raises(CorruptFile, match=file):
        load_model(str(folder))

"""What the GGUF reader accepts, and the one line it says about the rest."""

import struct

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, ModelNotFound, UnsupportedModel
from ruvmlx.models.files.gguf import read_gguf

from .gguf_writer import ALIGNMENT, Typed, gguf_bytes, u32

ROW = np.arange(32, dtype="<f4").tobytes()
TENSORS = {"a": ("F32", (32,), ROW), "b": ("F32", (32,), ROW)}


def read(tmp_path, data: bytes):
    path = tmp_path / "x.gguf"
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return read_gguf(path)


def refuse(tmp_path, data: bytes, words: str, error=CorruptFile):
    with pytest.raises(error, match=words) as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("version", [2, 3])
def test_values_and_tensors_come_back(tmp_path, version):
    """Every kind of value the writer knows, and a tensor of odd, unequal sides."""
    w = np.arange(3 * 64, dtype="<f4").reshape(3, 64)
    values = {
        "s": "é\n",
        "u": u32(7),
        "q": Typed(10, 1 << 40),
        "f": Typed(6, 0.5),
        "t": True,
        "l": ["a", ""],
        "n": np.array([1, -2], np.int32),
    }
    file = read(tmp_path, gguf_bytes(values, {"w": ("F32", w.shape, w.tobytes())}, version))
    assert file.version == version
    assert {k: v for k, v in file.metadata.items() if k != "n"} == {
        "s": "é\n",
        "u": 7,
        "q": 1 << 40,
        "f": 0.5,
        "t": True,
        "l": ["a", ""],
    }
    assert file.metadata["n"].tolist() == [1, -2]
    assert file.tensors["w"].shape == (3, 64)
    assert np.array_equal(file.raw(file.tensors["w"]).view("<f4").reshape(3, 64), w)


def test_no_file_and_empty_file(tmp_path):
    """Absent is not corrupt."""
    with pytest.raises(ModelNotFound, match="no such file"):
        read_gguf(tmp_path / "none.gguf")
    refuse(tmp_path, b"", "empty")


def header(n_tensors: int, n_kv: int, rest: bytes = bytes(64), magic=b"GGUF", version=3) -> bytes:
    return struct.pack("<4sIQQ", magic, version, n_tensors, n_kv) + rest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GG", "needs 4 bytes"),
        (b"GGML" + bytes(60), "begins with b'GGML'"),
        (header(0, 0, version=1), "version 1"),
        (header(1 << 60, 0), "tensors cannot fit"),
        (header(0, 1 << 60), "metadata keys cannot fit"),
        (header(3, 0), "tensors cannot fit"),
        (header(0, 1, struct.pack("<Q", 1 << 63) + bytes(64)), "metadata key is 9223372036854775808 bytes"),
    ],
)
def test_counts_larger_than_the_file_are_refused(tmp_path, data, words):
    """Counts larger than the file could hold are refused before anything is made of them."""
    refuse(tmp_path, data, words)


def test_big_endian_is_named(tmp_path):
    """A sound file of another byte order is unsupported, not corrupt."""
    refuse(tmp_path, struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian", UnsupportedModel)


def kv(key: bytes, value: bytes) -> bytes:
    return header(0, 1, struct.pack("<Q", len(key)) + key + value + bytes(64))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (struct.pack("<I", 13), "unknown value type 13"),
        (struct.pack("<IQ", 8, 1 << 40), "needs 1099511627776 bytes"),
        (struct.pack("<IQ", 8, 2) + b"\xff\xfe", "not UTF-8"),
        (struct.pack("<IIQ", 9, 8, 1 << 61), "strings of k cannot fit"),
        (struct.pack("<IIQ", 9, 4, 1 << 61), "array k of"),
        (struct.pack("<IIQ", 9, 9, 1), "array of arrays"),
        (struct.pack("<IIQ", 9, 77, 1), "array of unknown type 77"),
        (struct.pack("<IIQQ", 9, 8, 2, 1 << 50), "string 0 of k reaches past the end"),
        (struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xff\xfe", "string 0 of k is not UTF-8"),
    ],
)
def test_bad_metadata_values_are_refused(tmp_path, value, words):
    """Lengths, nesting, types and encodings of metadata values."""
    refuse(tmp_path, kv(b"k", value), words)


def test_duplicate_names_are_refused(tmp_path):
    """A key or a tensor that occurs twice could mean two things."""
    data = gguf_bytes({"key1": u32(1), "key2": u32(1)}, {})
    refuse(tmp_path, data.replace(b"key2", b"key1"), "'key1' occurs twice")
    data = gguf_bytes({}, {"ten1": TENSORS["a"], "ten2": TENSORS["b"]})
    refuse(tmp_path, data.replace(b"ten2", b"ten1"), "'ten1' occurs twice")


@pytest.mark.parametrize("alignment", [u32(0), u32(1), u32(48), u32(1 << 20), True, "32"])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path, alignment):
    """Only powers of two from 8 up are alignments."""
    refuse(tmp_path, gguf_bytes({"general.alignment": alignment}, TENSORS), "general.alignment")


def edit_info(name: bytes, at: int, fmt: str, value: int) -> bytes:
    """A sound two-tensor file with one field of `name`'s entry changed; `at` counts from the rank."""
    data = bytearray(gguf_bytes({}, {"ten1": TENSORS["a"], "ten2": TENSORS["b"]}))
    struct.pack_into(fmt, data, data.index(name) + len(name) + at, value)
    return bytes(data)


RANK, DIM, TYPE, OFFSET = 0, 4, 12, 16


@pytest.mark.parametrize(
    ("at", "fmt", "value", "words"),
    [
        (RANK, "<I", 0, "0 dimensions"),
        (RANK, "<I", 5, "5 dimensions"),
        (DIM, "<Q", 0, "impossible dimensions"),
        (DIM, "<Q", 1 << 63, "impossible dimensions"),
        (DIM, "<Q", 1 << 40, "ends at byte"),
        (TYPE, "<I", 99, "unknown type 99"),
        (TYPE, "<I", 4, "unknown type 4"),
        (OFFSET, "<Q", 8, "not a multiple of 32"),
        (OFFSET, "<Q", 0, "'ten1' and 'ten2' overlap"),
        (OFFSET, "<Q", (1 << 64) - ALIGNMENT, "ends at byte"),
        (OFFSET, "<Q", 1 << 20, "ends at byte"),
    ],
)
def test_bad_tensor_entries(tmp_path, at, fmt, value, words):
    """Rank, sizes, type, alignment, bounds and overlap of a tensor."""
    read(tmp_path, edit_info(b"ten2", TYPE, "<I", 0))
    refuse(tmp_path, edit_info(b"ten2", at, fmt, value), words)


def test_rows_of_odd_length_cannot_be_blocks(tmp_path):
    """33 weights are not whole blocks of 32."""
    refuse(tmp_path, gguf_bytes({}, {"w": ("Q4_0", (33,), bytes(64))}), "not a multiple of 32")


def test_other_quantisations_are_named(tmp_path):
    """IQ2_XXS is sound but not run; the message says what is."""
    error = refuse(tmp_path, edit_info(b"ten2", TYPE, "<I", 16), "IQ2_XXS", UnsupportedModel)
    assert "Q4_0, Q4_1, Q5_0" in str(error)
    assert error.exit_code == 1


def test_messages_stay_on_one_line(tmp_path):
    """Names come from the file and may hold newlines, escapes and thousands of characters."""
    name = "\n\x1b[31m" + "x" * 3000
    error = refuse(tmp_path, gguf_bytes({}, {name: ("Q4_0", (33,), bytes(64))}), "not a multiple")
    assert "\x1b" not in str(error) and len(str(error)) < 300


def test_hostile_string_count_costs_nothing(tmp_path):
    """More strings than any vocabulary has are refused by number, though the file could hold them."""
    count = (1 << 21) + 1
    data = kv(b"k", struct.pack("<IIQ", 9, 8, count) + bytes(8 * count))
    refuse(tmp_path, data, "strings of k cannot fit")


@pytest.mark.parametrize(("value", "name"), [(15, "Q4_K_M"), (1, "F16"), (9999, ""), (None, "")])
def test_a_file_names_its_quantisation(tmp_path, value, name):
    """general.file_type, in llama.cpp's names; one that is not known has no name."""
    metadata = {} if value is None else {"general.file_type": u32(value)}
    assert read(tmp_path, gguf_bytes(metadata, TENSORS)).file_type == name

"""Mutated GGUF files: each loads to sound arrays or raises one RuvmlxError, quickly and in little memory."""

import random
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.errors import RuvmlxError
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.config.model import Message, Model
from ruvmlx.models.files.gguf_types import ROWS
from ruvmlx.models.load import load_gguf
from ruvmlx.models.weights.stored import stored_matrix
from tests.limits import peak_memory

from .gguf_writer import gguf_bytes
from .make_gguf import gguf_metadata, gguf_tensors
from .shapes import Shape
from .vocabularies import gguf_spm_keys

TINY = Shape(
    hidden_size=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32, intermediate_size=64, llama3=True
)
WIDE = Shape(
    hidden_size=256, n_layers=1, n_heads=4, n_kv_heads=1, head_dim=64, intermediate_size=256, tie=True
)
BLOCKS = [row.name for row in ROWS if row.block > 1 and row.name not in ("Q4_0", "Q4_1", "Q8_0")]
EXTREMES = [0, 1, 2, 7, 31, 255, 0x7FFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF]
WIDE_EXTREMES = [*EXTREMES, 1 << 32, (1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]
MAX_SECONDS, MAX_GROWTH_MB = 1.0, 200  # seconds of processor time: the machine may be busy


def spm_metadata() -> dict:
    keys = {k: v for k, v in gguf_metadata(TINY).items() if not k.startswith("tokenizer.")}
    return keys | gguf_spm_keys()


def mutate(data: bytes, header: int, rng: random.Random) -> bytes:
    """One to three edits: flipped bits, extreme numbers, cuts, insertions; most of them in the header."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if not out:
            break
        at = rng.randrange(header if rng.random() < 0.85 else len(out)) % max(1, len(out))
        kind = rng.randrange(6)
        if kind <= 1:
            out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)])
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice(EXTREMES))
        elif kind == 3:
            out[at : at + 8] = struct.pack(
                "<Q", rng.choice([*WIDE_EXTREMES, len(data), max(0, len(data) - at)])
            )
        elif kind == 4:
            del out[at : at + rng.choice([1, 4, 8, 100, len(out)])]
        else:
            out[at:at] = rng.randbytes(rng.choice([1, 4, 8, 32]))
    return bytes(out)


def exercise(model: Model) -> None:
    """Everything that a loaded model hands out is in bounds and usable."""
    weights = model.load_weights()
    for module, (rows, _) in matrices(model.config):
        assert weights[f"{module}.weight"].shape[0] == rows
        if (stored := stored_matrix(weights, module)) is not None:
            assert np.isfinite(stored.dequantise().sum(dtype=np.float64)), module
    for name, array in weights.items():
        assert np.isfinite(array.sum(dtype=np.float64)), name
    tokenizer = model.tokenizer
    ids = tokenizer.encode("the end", special=True) + tokenizer.encode_chat([Message("user", "a <|im_end|>")])
    assert all(0 <= i < model.config.vocab_size for i in ids)
    tokenizer.decode(ids)


def header_size(data: bytes) -> int:
    return data.index(b"output_norm.weight") + 400


@pytest.mark.parametrize("vocabulary", ["byte-level", "sentencepiece"])
def test_mutants_load_or_raise_one_line(vocabulary, tmp_path):
    """4,000 mutants per vocabulary; no other exception, none slow, no great memory."""
    metadata = gguf_metadata(TINY) if vocabulary == "byte-level" else spm_metadata()
    loaded, refused = run_mutants(gguf_bytes(metadata, gguf_tensors(TINY, "Q4_0")), 4000, tmp_path)
    assert loaded > 150 and refused > 1500  # both outcomes are really reached


@pytest.mark.parametrize("first", [0, 7])
def test_mutants_of_every_block_format(first, tmp_path):
    """2,000 mutants of each of two files that hold all formats between them, one in every matrix."""
    kinds = iter(BLOCKS[first:] + BLOCKS[:first])
    formats = {kind: gguf_tensors(WIDE, kind) for kind in BLOCKS}
    tensors = {}
    for name, (_, shape, _) in formats["Q4_K"].items():
        tensors[name] = formats[next(kinds) if len(shape) == 2 else "Q4_K"][name]
    loaded, refused = run_mutants(gguf_bytes(gguf_metadata(WIDE), tensors), 2000, tmp_path)
    assert loaded > 100 and refused > 700


def run_mutants(data: bytes, count: int, tmp_path: Path) -> tuple[int, int]:
    """-> how many loaded, how many were refused; none slowly or in much memory."""
    rng, path = random.Random(7), tmp_path / "mutant.gguf"
    before = peak_memory()
    loaded = refused = 0
    for _ in range(count):
        path.unlink(missing_ok=True)
        path.write_bytes(mutate(data, header_size(data), rng))
        start = time.process_time()
        if try_load(path):
            loaded += 1
        else:
            refused += 1
        assert time.process_time() - start < MAX_SECONDS
    assert peak_memory() - before < MAX_GROWTH_MB << 20
    return loaded, refused


def try_load(path: Path) -> bool:
    try:
        exercise(load_gguf(path))
    except RuvmlxError as error:
        assert "\n" not in str(error) and 10 < len(str(error)) < 400
        return False
    return True


def test_every_truncation_is_refused(tmp_path):
    """A file cut anywhere is never loaded: 300 lengths, all of the first hundred bytes among them."""
    data = gguf_bytes(gguf_metadata(TINY), gguf_tensors(TINY, "Q8_0"))
    path = tmp_path / "cut.gguf"
    last = len(data) - 64  # the last tensor's padding may be missing
    for size in [*range(100), *np.linspace(100, last, 200).astype(int)]:
        path.unlink(missing_ok=True)
        path.write_bytes(data[:size])
        assert not try_load(path), size


def test_every_header_number_takes_extremes(tmp_path):
    """Eight bytes at every 4th of the first 2,000 set to the largest and to a negative number."""
    data = gguf_bytes(gguf_metadata(TINY), gguf_tensors(TINY, "F16"))
    path = tmp_path / "word.gguf"
    refused = 0
    for at in range(0, 2000, 4):
        for value in ((1 << 64) - 1, 1 << 63):
            path.unlink(missing_ok=True)
            path.write_bytes(data[:at] + struct.pack("<Q", value) + data[at + 8 :])
            refused += not try_load(path)
    assert refused > 900

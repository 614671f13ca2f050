"""What `ruvmlx show` and the documentation say of a GGUF type's memory is what the backends take."""

import re
from pathlib import Path

import pytest

from ruvmlx.backends.matrix_types import bytes_in_memory, matrix_types, mlx_bits, native_bits
from ruvmlx.backends.mlx import graph
from ruvmlx.backends.native.weights import _plan
from ruvmlx.models.files.gguf_types import ROWS
from ruvmlx.models.load import load_gguf
from ruvmlx.platform.mx import mx
from tests.models.make_gguf import make_gguf_model

from .test_gguf_formats import PACKED

BY_NAME = {row.name: row for row in ROWS}
LARGE = {
    "hidden_size": 2048,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 64,
    "n_layers": 1,
    "vocab_size": 2048,
}


@pytest.mark.parametrize("quant", PACKED)
def test_bits_are_those_that_a_matrix_takes(quant, tmp_path):
    """Of a head [2048, 2048]: the C library's bytes, and MLX's."""
    model = load_gguf(make_gguf_model(tmp_path / "m.gguf", quant=quant, intermediate_size=256, **LARGE))
    weights, shape = model.load_weights(), (2048, 2048)
    packed = _plan(weights, "lm_head", shape).nbytes
    assert 8 * packed / 2048**2 == pytest.approx(native_bits(BY_NAME[quant]), abs=0.01)
    net = graph.build(model.config, weights, mx.float32 if BY_NAME[quant].wide else mx.float16, False)
    taken = sum(p.nbytes for name, p in graph.parameters(net).items() if name.startswith("lm_head."))
    assert 8 * taken / 2048**2 == mlx_bits(BY_NAME[quant])
    held = sum(p.nbytes for p in graph.parameters(net).values())
    assert bytes_in_memory(model.types, "mlx") == pytest.approx(held, rel=0.005)  # norms are float16 there
    (row,) = matrix_types(model)
    assert (row.type, row.matrices) == (quant, 9)
    assert ("mlx" in row.rounded) == (quant in ("Q2_K", "Q3_K", "Q6_K"))


def test_the_documentation_has_the_same_bits():
    """The table of docs/models.md."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| ((?:I?Q|MX)[^|]*) \| ([\d., ]+) \| ([^|]*) \| ([^|]*) \|$", text, re.M)
    named = set()
    for names, file_bits, native, mlx in rows:
        for i, name in enumerate(names.split(", ")):
            kind = BY_NAME[name]
            named.add(name)
            bits = [8 * kind.nbytes / kind.block, native_bits(kind), mlx_bits(kind)]
            for said, want in zip((file_bits, native, mlx), bits, strict=True):
                found = [float(x) for x in re.findall(r"\d+\.\d+", said)] or [bits[0]]  # "as in the file"
                assert found[min(i, len(found) - 1)] == pytest.approx(want, abs=0.006), (name, said)
    assert named == {row.name for row in ROWS if row.block > 1} - {"Q8_K"}

"""Operations per decoded token, counted in MLX's exported graph, beside mlx-lm's."""

from pathlib import Path

import pytest

from ruvmlx.backends.mlx.kernels import rope_append
from ruvmlx.platform.mx import mx
from tests.research import launches

TABLE = Path(launches.__file__).with_name("LAUNCHES.md")
ONE = launches.SHAPES["Llama 3.2 1B"]


def test_the_committed_table_is_true():
    for line in launches.table():
        assert line in TABLE.read_text().splitlines()


@pytest.mark.parametrize("name", launches.SHAPES)
def test_at_most_15_percent_more_than_mlx_lm(name):
    shape = launches.SHAPES[name]
    theirs = launches.theirs(shape)
    for ours in (launches.ours(shape), launches.ours(shape, full=True)):
        assert ours.launches <= launches.LIMIT * theirs.launches
        assert ours.nodes < theirs.nodes


def test_a_layer_launches_three_of_our_kernels_and_no_conversion():
    """15 launches, of which three are our kernels and none turns one type into another; mlx-lm has 17."""
    two, one = (launches.ours(launches.DecoderSize(n, 32, 8, 64)) for n in (2, 1))
    layer = {
        name: n - one.by_name.get(name, 0) for name, n in two.by_name.items() if n != one.by_name.get(name)
    }
    assert layer == {
        "rms_norm": 2,
        "QuantizedMatmul": 7,
        "rope_append": 1,
        "attend_decode": 1,
        "attend_merge": 1,
        "Add": 2,
        "swiglu": 1,
        "Reshape": 1,
    }
    theirs = [launches.theirs(launches.DecoderSize(n, 32, 8, 64)).launches for n in (1, 2)]
    assert theirs[1] - theirs[0] == 17


def test_a_batch_is_one_graph():
    """Seven sequences: the products are those of one; open pages are joined once a layer, the first time."""
    one, seven = launches.ours(ONE), launches.ours(ONE, 7)
    assert seven.by_name["QuantizedMatmul"] == one.by_name["QuantizedMatmul"]
    assert seven.launches - one.launches <= ONE.n_layers


@pytest.mark.parametrize("name", launches.SHAPES)
def test_a_prompt_is_described_without_a_read(name):
    """By the same tracing, which refuses to evaluate; the head's product is left out."""
    found, layers = launches.prompt(launches.SHAPES[name]).by_name, launches.SHAPES[name].n_layers
    assert found["gather"] == found["append"] == found["scaled_dot_product_attention"] == layers
    assert found["QuantizedMatmul"] == 7 * layers


def test_a_read_would_be_refused(monkeypatch):
    """Planted: a layer that looks at what was appended."""
    write = launches.tiered.PromptStep.write
    monkeypatch.setattr(
        launches.tiered.PromptStep, "write", lambda self, *a: (write(self, *a), mx.eval(a[-1]))
    )
    with pytest.raises((RuntimeError, ValueError)):
        launches.prompt(ONE)


def test_a_cast_would_be_counted(monkeypatch):
    """Planted: keys in float32 before the kernel."""
    before = launches.ours(ONE).launches
    launches.ours.cache_clear()
    run = rope_append.rope_append_gpu
    wide = lambda q, k, *rest: run(q.astype(mx.float32), k.astype(mx.float32), *rest)  # noqa: E731
    monkeypatch.setattr(rope_append, "rope_append_gpu", wide)
    assert launches.ours(ONE).launches == before + 2 * ONE.n_layers
    launches.ours.cache_clear()

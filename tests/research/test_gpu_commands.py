"""The commands that measure on a GPU compute their tables rightly, and run on a CPU."""

import dataclasses

from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from tests.models.make_models import make_safetensors_model
from tests.research import beside_mlx_lm, gpu_time, same_words


def test_the_players_read_and_write_at_each_context(tmp_path):
    """A model with a short context reads a longer one, for the speed is the same."""
    small = load_model(str(make_safetensors_model(tmp_path / "m", bits=4)))
    limit = small.shape.max_context
    model = beside_mlx_lm.with_room(small, limit + 9)
    assert model.context == limit + 9 and beside_mlx_lm.with_room(small, 8).context == limit
    with mx.stream(mx.cpu):
        players = beside_mlx_lm.make_players(model, "cpu")
        found = beside_mlx_lm.measure_turns(players, model.shape.vocab_size, 2, limit + 2, 4)
    assert {name: len(speeds) for name, speeds in found.items()} == {"mlx-lm": 2, "plain": 2, "tiered": 2}
    assert all(speed > 0 for speeds in found.values() for both in speeds for speed in both)


def test_a_ratio_is_the_median_of_the_rounds():
    """Not the ratio of the medians: a slow second counts for both players of its round."""
    found = {
        "mlx-lm": [(10.0, 1.0), (40.0, 2.0), (20.0, 4.0)],
        "plain": [(10.0, 3.0), (80.0, 2.0), (60.0, 8.0)],
    }
    lines = beside_mlx_lm.table(found)
    assert lines[2].split() == ["plain", "prefill", "60.0", "tok/s", "2.00"]
    assert lines[3].split() == ["plain", "decode", "3.0", "tok/s", "2.00"]


def test_the_first_difference_is_found():
    assert same_words.same_length([1, 2, 3], [1, 2, 3]) == 3
    assert same_words.same_length([1, 2, 3], [1, 5, 3]) == 1
    assert same_words.same_length([1, 2], [1, 2, 3]) == 2


def test_the_judge_tells_how_far_two_tokens_are_apart(tmp_path):
    model = load_model(str(make_safetensors_model(tmp_path / "m", bits=4)))
    judge = same_words.NativeBackend(model)
    prompt, words = [3, 4, 5], [6, 7, 8]
    logits = judge.prefill([*prompt, 6], judge.new_cache()).logits
    want = abs(float(logits[7] - logits[9]))
    assert same_words.distance(judge, prompt, words, [6, 9, 8], 1).startswith(f"{want:.4f} apart")


def test_the_gpu_is_busy_once_where_kernels_overlap():
    """Two kernels at one time count once; a gap counts for nothing; host events are no kernels."""
    events = [
        {"cat": "kernel", "name": "b", "ts": 12.0, "dur": 6.0},
        {"cat": "kernel", "name": "a", "ts": 10.0, "dur": 4.0},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 30.0, "dur": 1.0},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 100.0},
        {"name": "no category", "ts": 0.0, "dur": 100.0},
    ]
    spans = gpu_time.spans_of(events)
    assert gpu_time.busy(spans) == 9.0
    assert gpu_time.lines(spans, 2, 1) == ["         3.0 us     0.5 x  b"]


def test_an_8b_model_has_the_real_sizes():
    from ruvmlx.apps.bench.random_model import SHAPES, tensors

    numbers = sum(d[0] * (d[1] if len(d) > 1 else 1) for _, d, _ in tensors(SHAPES["llama-8b"]).values())
    assert numbers == 8_030_261_248
    assert dataclasses.astuple(SHAPES["llama-8b"])[:5] == (4096, 32, 32, 8, 128)

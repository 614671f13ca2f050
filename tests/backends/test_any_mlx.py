"""Architectures that the project does not name, on mlx-lm's own models."""

import functools
import json

import numpy as np
import pytest

from ruvmlx import progress
from ruvmlx.backends.mlx import any_load
from ruvmlx.backends.mlx.any_backend import AnyBackend
from ruvmlx.backends.mlx.any_cache import AnyCache
from ruvmlx.backends.mlx.plain_cache import SlidingKVCache
from ruvmlx.backends.select import describe, for_model, open_backend
from ruvmlx.errors import CorruptFile, Interrupted, RuvmlxError, UnsupportedModel, UsageError
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.lora.micro_lora import MicroLoRA
from ruvmlx.models.config.model import ModelShape
from ruvmlx.models.load import load_model
from ruvmlx.platform.mx import mx
from ruvmlx.sampling import Sampling
from tests.models.other_models import ARCHITECTURES, make_other_model, make_stored_model
from tests.oracles.mlx_lm import mlx_lm_model

TOKENS = np.random.default_rng(3).integers(3, 320, 70).tolist()  # past gemma3's window of 24
KINDS = sorted(ARCHITECTURES)


@pytest.fixture(scope="session")
def opened(tmp_path_factory):
    @functools.cache
    def opened(kind, bits=None):
        folder = make_other_model(tmp_path_factory.mktemp(kind), kind, bits)
        return folder, AnyBackend(load_model(str(folder)), device="cpu")

    return opened


def oracle_logits(folder, tokens):
    """Every token's logits, by mlx-lm's own loader and model."""
    with mx.stream(mx.cpu):
        out = mlx_lm_model(folder)(mx.array([tokens]))
        return np.array(getattr(out, "logits", out).astype(mx.float32))[0]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_mlx_lms(opened, kind, bits):
    """In one piece, in two, and token by token."""
    folder, backend = opened(kind, bits)
    expected = oracle_logits(folder, TOKENS)
    scale = np.abs(expected).max()
    assert np.abs(backend.verify(TOKENS, backend.new_cache()) - expected).max() < 1e-4 * scale
    cache = backend.new_cache()
    backend.prefill(TOKENS[:41], cache)
    steps = [backend.decode(token, cache).logits for token in TOKENS[41:]]
    assert np.abs(np.array(steps) - expected[41:]).max() < 1e-4 * scale and cache.offset == len(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_lead_to_the_logits_with_their_cap_and_scale(opened, kind):
    folder, backend = opened(kind)
    hidden = backend.hidden_states(TOKENS)
    assert hidden.shape == (len(TOKENS), 64)
    np.testing.assert_allclose(backend.head(hidden), oracle_logits(folder, TOKENS), atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_added_to_the_final_logits(opened, kind):
    _, backend = opened(kind)
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(64, 2)).astype(np.float32), rng.normal(size=(2, 320)).astype(np.float32)
    adapter = MicroLoRA(a, b, 0.5)
    plain, adapted = (backend.verify(TOKENS[:9], backend.new_cache(), x) for x in (None, adapter))
    change = adapter.scale * backend.hidden_states(TOKENS[:9]) @ a @ b
    np.testing.assert_allclose(adapted - plain, change, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_and_a_dump_go_on_like_the_original(opened, kind):
    _, backend = opened(kind)
    cache = backend.new_cache()
    backend.prefill(TOKENS[:30], cache)
    fork, restored, dump = cache.fork(), backend.new_cache(), cache.dump()
    data = b"".join(bytes(part) for part in dump.parts)
    assert len(data) == dump.nbytes == cache.nbytes
    at = iter([0])
    position = next(at)

    def read(n):
        nonlocal position
        position += n
        return data[position - n : position]

    restored.restore(dump.facts, read)
    backend.decode(7, cache)  # must not reach the others
    logits = [backend.decode(5, c).logits for c in (fork, restored)]
    fresh = backend.new_cache()
    expected = backend.prefill([*TOKENS[:30], 5], fresh).logits
    for got in logits:
        np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trimmed_cache_has_forgotten_or_says_that_it_cannot(opened, kind):
    _, backend = opened(kind)
    for held in (12, 60):
        cache = backend.new_cache()
        backend.prefill(TOKENS[:held], cache)
        if cache.trim(4):
            assert cache.offset == held - 4
            expected = backend.prefill([*TOKENS[: held - 4], 9], backend.new_cache()).logits
            np.testing.assert_allclose(backend.decode(9, cache).logits, expected, atol=1e-4)
        else:
            assert kind == "mamba"
            assert cache.offset == held and cache.room == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_draws_what_single_steps_draw(opened, kind):
    """As on a GPU: a step ahead where the caches can take it back, none where they cannot."""
    _, backend = opened(kind)
    cache = backend.new_cache()
    stream = backend.stream(cache, None, Sampling(temperature=0), 12)
    stream.prefill(TOKENS[:20])
    drawn = [stream.read() for _ in range(10)]
    hidden = stream.take_hidden()
    stream.close()
    assert cache.offset == 29 and hidden.shape == (10, 64)
    again, step = backend.new_cache(), None
    step = backend.prefill(TOKENS[:20], again)
    for token in drawn:
        assert token == int(np.argmax(step.logits))
        step = backend.decode(token, again)


def test_a_failed_step_leaves_an_empty_cache(opened):
    _, backend = opened("mamba")
    cache = backend.new_cache()
    backend.prefill(TOKENS[:5], cache)
    with pytest.raises(ZeroDivisionError), cache.running(1):
        raise ZeroDivisionError
    assert cache.offset == 0 and backend.prefill(TOKENS[:5], cache).logits.shape == (320,)


def test_what_it_cannot_have_is_refused_by_name(opened):
    folder, backend = opened("mixtral")
    model = load_model(str(folder))
    with pytest.raises(RuvmlxError, match="mixtral"):
        backend.set_lora(BaseLoRA({("q_proj", 0): (np.zeros((64, 1)), np.zeros((1, 64)))}))
    with pytest.raises(UnsupportedModel, match="mixtral"):
        _ = model.config
    for name in ("native", "hybrid", "reference"):
        with pytest.raises(UsageError, match="mixtral"):
            open_backend(name, model)
    assert for_model(describe(), "auto", model.shape).name == "mlx"
    assert isinstance(open_backend("auto", model), AnyBackend) and "tiers" in backend.caveat


def test_a_model_that_cannot_be_split_is_refused():
    """Its logits come from its ids, not from any submodule's hidden states."""
    from ruvmlx.backends.mlx.any_graph import SplitGraph
    from ruvmlx.platform.mx import nn

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.head = nn.Linear(8, 10)

        def __call__(self, tokens, cache=None):
            return self.head(self.embed(tokens)) + tokens[..., None]

    shape = ModelShape("odd", 8, 1, 10, 64, False)
    with pytest.raises(UnsupportedModel, match="odd"):
        SplitGraph(Odd(), shape)


def test_sizes_that_config_json_has_wrong_are_refused(opened, tmp_path):
    folder = make_other_model(tmp_path / "m", "mixtral")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"vocab_size": 999}))
    with pytest.raises((CorruptFile, UnsupportedModel), match="mixtral"):
        AnyBackend(load_model(str(folder)), device="cpu")


def test_loading_is_counted_and_can_be_stopped(opened, monkeypatch):
    """In pieces of several tensors; a watch that raises ends it."""
    folder, _ = opened("mixtral")
    model, seen = load_model(str(folder)), []
    monkeypatch.setattr(any_load, "PIECE", 30_000)
    monkeypatch.setattr(progress, "TICK", 0)

    class Recorder(progress.Watch):
        stop = False

        def progress(self, report):
            seen.append(report)
            if self.stop and report.done:
                raise Interrupted("stopped")

    watch = Recorder()
    open_backend("auto", model, watch=watch)
    counts = [report.done for report in seen]
    assert counts == sorted(counts) and counts[-1] == model.bytes and len(set(counts)) > 4
    assert {(r.what, r.total) for r in seen} == {(f"Loading {model.name}", model.bytes)}
    watch.stop = True
    with pytest.raises(Interrupted):
        open_backend("auto", model, watch=watch)


def test_code_in_the_folder_never_runs(tmp_path):
    folder = make_other_model(tmp_path / "m", "mixtral")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"model_file": "evil.py"}))
    (folder / "evil.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(UnsupportedModel, match="model_file"):
        load_model(str(folder))


def test_the_cache_of_a_model_without_room_never_steps_ahead(opened):
    _, backend = opened("mamba")
    assert isinstance(backend.new_cache(), AnyCache) and backend.new_cache().room == 0


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_a_familiar_model_in_a_format_of_mlx_lms(tmp_path, mode):
    """Llama is ours, such weights are not: mlx-lm runs them, and the note says why."""
    folder = make_stored_model(tmp_path / "m", mode)
    model = load_model(str(folder))
    backend = open_backend("auto", model)
    assert isinstance(backend, AnyBackend) and "llama models with" in backend.caveat
    assert f"{'compressed-tensors' if mode == 'nvfp4' else mode} weights" in backend.caveat
    expected = oracle_logits(folder, TOKENS)
    assert (
        np.abs(backend.verify(TOKENS, backend.new_cache()) - expected).max() < 1e-3 * np.abs(expected).max()
    )
    assert (4 if mode[-1] == "4" else 8) < model.bits < 9  # norms are float32


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_weights_to_be_converted_are_refused_with_the_command(tmp_path, method):
    folder = make_stored_model(tmp_path / "m", "mxfp4")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": {"quant_method": method}}))
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), {"lm_head.weight": mx.zeros((320, 64))})
    with pytest.raises(UnsupportedModel, match=rf"{method}.*mlx_lm.convert --hf-path"):
        load_model(str(folder))


@pytest.mark.parametrize(("held", "n"), [(0, 1), (0, 9), (3, 1), (5, 4), (30, 1), (30, 9)])
@pytest.mark.parametrize("window", [None, 4, 16])
def test_a_layer_with_a_narrower_window_than_its_cache_has_its_own(held, n, window):
    """Against the whole mask, of which the cache holds the last columns."""
    cache = SlidingKVCache(16)
    for _ in range(held):
        cache.update_and_fetch(mx.zeros((1, 1, 1, 8)), mx.zeros((1, 1, 1, 8)))
    mask = cache.make_mask(n, window_size=window)
    keys, _ = cache.update_and_fetch(mx.zeros((1, 1, n, 8)), mx.zeros((1, 1, n, 8)))
    columns = np.arange(held + n)
    rows = columns[held:, None]
    whole = (columns <= rows) & (rows - columns < (window or 16))
    seen = np.ones((n, keys.shape[2]), bool) if mask is None else mask
    if isinstance(mask, str):
        seen = np.tril(np.ones((n, keys.shape[2]), bool), keys.shape[2] - n)
    assert (np.array(seen) == whole[:, -keys.shape[2] :]).all() and not whole[:, : -keys.shape[2]].any()

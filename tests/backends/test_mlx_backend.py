"""The protocol's promises, on small random models."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.errors import CorruptFile, RuvmlxError, UsageError
from ruvmlx.kv.policy import F16
from ruvmlx.models.load import load_model
from tests.models.make_models import make_safetensors_model

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 320, 90)]


class Rank2:
    """A HeadAdapter: logits += hidden @ a @ b."""

    def __init__(self, d=64, v=320):
        rng = np.random.default_rng(5)
        self.a = rng.standard_normal((d, 2)).astype(np.float32)
        self.b = rng.standard_normal((2, v)).astype(np.float32)

    def add_to_logits(self, logits, hidden):
        logits += hidden @ self.a @ self.b


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(make_safetensors_model(tmp_path_factory.mktemp("llama"))))


@pytest.fixture(scope="module")
def sliding(tmp_path_factory):
    return load_model(str(make_safetensors_model(tmp_path_factory.mktemp("mistral"), sliding_window=16)))


@pytest.fixture(params=["mlx", "reference", "native"])
def backend(request, model):
    if request.param == "mlx":
        return MLXBackend(model, device="cpu", chunk=32)
    kind = ReferenceBackend if request.param == "reference" else NativeBackend
    return kind(model, chunk=32)


def test_progress_is_called_after_each_chunk(backend):
    """Called after each chunk with the tokens done so far; the last call says all."""
    seen, cache = [], backend.new_cache()
    backend.prefill(TOKENS, cache, progress=seen.append)
    assert seen == [32, 64, 90]
    assert cache.offset == 90


def test_progress_may_stop(backend):
    """Raising leaves exactly the reported tokens in the cache, and going on from there is exact."""

    def stop(done):
        if done == 64:
            raise KeyboardInterrupt

    cache, whole = backend.new_cache(), backend.new_cache()
    with pytest.raises(KeyboardInterrupt):
        backend.prefill(TOKENS, cache, progress=stop)
    assert cache.offset == 64
    resumed = backend.prefill(TOKENS[64:], cache)
    expected = backend.prefill(TOKENS, whole)
    np.testing.assert_allclose(resumed.logits, expected.logits, atol=1e-4)


def test_prefill_decode_and_verify_add_the_same_adapter(backend):
    """prefill, decode and verify add the same low-rank change; hidden states and the frozen head stay."""
    adapter = Rank2()
    plain, changed = backend.new_cache(), backend.new_cache()
    for call in (lambda c, a: backend.prefill(TOKENS[:9], c, a), lambda c, a: backend.decode(7, c, a)):
        before, after = call(plain, None), call(changed, adapter)
        np.testing.assert_allclose(after.hidden, before.hidden, atol=1e-5)
        np.testing.assert_allclose(
            after.logits - before.logits, before.hidden @ adapter.a @ adapter.b, atol=1e-3
        )
        assert np.abs(after.logits - before.logits).max() > 1
    before, after = backend.verify(TOKENS[9:14], plain), backend.verify(TOKENS[9:14], changed, adapter)
    hidden = backend.hidden_states([*TOKENS[:9], 7, *TOKENS[9:14]])[-5:]
    np.testing.assert_allclose(after - before, hidden @ adapter.a @ adapter.b, atol=1e-3)


def test_step_belongs_to_the_caller(backend):
    """Writing into a Step changes nothing that comes later."""
    cache, other = backend.new_cache(), backend.new_cache()
    step = backend.prefill(TOKENS[:5], cache)
    backend.prefill(TOKENS[:5], other)
    assert step.logits.dtype == step.hidden.dtype == np.float32
    step.logits[:], step.hidden[:] = 1e9, -1e9
    np.testing.assert_array_equal(backend.decode(3, cache).logits, backend.decode(3, other).logits)


def test_head_of_hidden_is_verify(backend):
    """head(hidden_states(x)) = verify(x): the head is frozen and sees what verify sees."""
    hidden = backend.hidden_states(TOKENS)
    assert hidden.shape == (90, 64)
    np.testing.assert_allclose(backend.head(hidden), backend.verify(TOKENS, backend.new_cache()), atol=1e-4)
    np.testing.assert_allclose(backend.embed(TOKENS), hidden.mean(0), atol=1e-5)


def test_trim_forgets_the_newest_tokens(backend):
    """Forgets the newest tokens, not more than there are; nbytes follows the content."""
    cache = backend.new_cache()
    assert cache.nbytes == 0
    backend.prefill(TOKENS[:40], cache)
    width = 2 if backend.name == "native" else 4  # float16 or float32
    assert cache.nbytes >= 2 * 2 * 40 * 2 * 32 * width  # k and v, 2 layers, 40 tokens, 2 heads of 32
    assert not cache.trim(41)
    assert not cache.trim(-1)
    assert cache.trim(40)
    assert cache.offset == 0
    again, fresh = backend.prefill(TOKENS[50:60], cache), backend.prefill(TOKENS[50:60], backend.new_cache())
    np.testing.assert_allclose(again.logits, fresh.logits, atol=1e-5)


def test_bad_tokens_are_usage_errors(backend):
    """An empty prompt and an id outside the vocabulary are usage errors, and change nothing."""
    cache = backend.new_cache()
    for tokens in ([], [320], [-1]):
        with pytest.raises(UsageError):
            backend.prefill(tokens, cache)
    assert cache.offset == 0


def broken(model, change):
    """The model with its weights changed."""

    def load():
        weights = dict(model.load_weights())
        change(weights)
        return weights

    return replace(model, load_weights=load)


def poison(weights):
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)


@pytest.mark.parametrize("kind", [MLXBackend, NativeBackend, ReferenceBackend])
def test_nan_is_an_error(model, kind):
    """NaN logits never reach a sampler."""
    backend = kind(broken(model, poison))
    for call in (backend.prefill, backend.verify):
        with pytest.raises(RuvmlxError, match="NaN"):
            call(TOKENS[:4], backend.new_cache())


@pytest.mark.parametrize("kind", [MLXBackend, NativeBackend])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.pop("lm_head.weight"),
        lambda w: w.update({"model.layers.9.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}),
        lambda w: w.update({"model.norm.weight": np.zeros(63, np.float32)}),
    ],
)
def test_weights_that_do_not_fit(model, change, kind):
    """A missing, a surplus and a misshapen tensor: one line each, naming it."""
    with pytest.raises(CorruptFile) as error:
        kind(broken(model, change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [MLXBackend, NativeBackend])
def test_sliding_cache_is_bounded(sliding, kind):
    """Memory stops growing with the window; a long sequence may still forget some of its newest tokens."""
    backend = kind(sliding, chunk=8)
    cache, mirror = backend.new_cache(), backend.new_cache()
    tokens = [t % 320 for t in range(7, 7 + 13 * 1200, 13)]
    sizes = []
    for i in range(0, 1200, 8):
        backend.prefill(tokens[i : i + 8], cache)
        sizes.append(cache.nbytes)
    assert max(sizes[100:]) == max(sizes[60:100])
    assert cache.trim(100)
    backend.prefill(tokens[:1100], mirror)
    np.testing.assert_allclose(backend.decode(5, cache).logits, backend.decode(5, mirror).logits, atol=1e-4)
    assert not cache.trim(1000)
    assert cache.offset == 1101


def test_one_thread_after_another(model):
    """A backend made in one thread works in another; calls come one at a time."""
    made = []
    maker = threading.Thread(target=lambda: made.append(MLXBackend(model, device="cpu")))
    maker.start()
    maker.join()
    backend = made[0]
    here = backend.prefill(TOKENS[:8], backend.new_cache()).logits
    there = []
    user = threading.Thread(
        target=lambda: there.append(backend.prefill(TOKENS[:8], backend.new_cache()).logits)
    )
    user.start()
    user.join()
    np.testing.assert_array_equal(here, there[0])


@pytest.mark.parametrize("kind", [MLXBackend, ReferenceBackend])
@pytest.mark.parametrize("name", ["model", "sliding"])
def test_forks_do_not_see_each_others_tokens(request, name, kind):
    """Two sequences go on from the same tokens, and neither sees the other's."""
    backend = kind(request.getfixturevalue(name), chunk=32)
    one = backend.new_cache(F16)
    backend.prefill(TOKENS[:70], one)
    two = one.fork()
    assert one.stats() == two.stats() and two.offset == 70
    left, right = backend.prefill(TOKENS[70:80], one), backend.prefill(TOKENS[80:], two)
    again = backend.decode(5, one)
    for prompt, step in ((TOKENS[:80], left), (TOKENS[:70] + TOKENS[80:], right), ([*TOKENS[:80], 5], again)):
        want = backend.prefill(prompt, backend.new_cache())
        np.testing.assert_allclose(step.logits, want.logits, atol=1e-4)


@pytest.mark.parametrize("kind", [MLXBackend, ReferenceBackend])
def test_stats_of_a_plain_cache(model, kind):
    backend = kind(model, chunk=32)
    cache = backend.new_cache()
    backend.prefill(TOKENS, cache)
    stats = cache.stats()
    assert (stats.policy, stats.tokens) == ("f16", (0, 0, 90))
    assert stats.bytes == cache.nbytes == 2 * stats.f16_bytes  # float32 here
    assert stats.f16_bytes >= 2 * 2 * 90 * 2 * 32 * 2  # k and v, 2 layers, 90 tokens, 2 heads of 32

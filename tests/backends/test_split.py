"""A model whose layers are divided between the C decoder and MLX computes what one backend computes."""

import numpy as np
import pytest

from ruvmlx.backends import select, weight_bytes
from ruvmlx.backends.hybrid.split import SplitBackend
from ruvmlx.backends.hybrid.split_cache import SplitCache
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.engine import LLMInferenceEngine
from ruvmlx.errors import AdapterMismatch, UsageError
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.lora.base_lora import BaseLoRA
from ruvmlx.models.load import load_model
from ruvmlx.models.weights.halves import halves
from ruvmlx.platform import cpu
from tests.backends.test_hybrid import random_lora
from tests.engine.test_engine import request
from tests.models.make_models import make_safetensors_model

from .test_agreement import SHAPES, SIZES, STORED, TOKENS, walk, worst

SMALL = TierPolicy("tiered", (64, 128))
TOLERANCE = 3e-3  # of the largest logit: the C decoder rounds activations to 16 bits


def divide(model, first, own_layers=True) -> SplitBackend:
    below, above = halves(model, first)
    native = NativeBackend(below, threads=2, chunk=37)
    return SplitBackend(native, MLXBackend(above, device="cpu", own_layers=own_layers))


def whole_logits(model) -> np.ndarray:
    backend = NativeBackend(model, threads=2)
    return backend.verify(TOKENS, backend.new_cache())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(str(make_safetensors_model(tmp_path_factory.mktemp("split") / "m", **SIZES)))


@pytest.mark.parametrize("stored", ["float32", "4-bit"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_logits_are_those_of_one_backend(tmp_path, shape, stored):
    """Odd chunks, single tokens, several at once, a trim and the same tokens again; each family's head."""
    model = load_model(str(make_safetensors_model(tmp_path / "m", **SHAPES[shape], **STORED[stored])))
    whole = whole_logits(model)
    for first in (1, 2):
        assert worst(walk(divide(model, first), TOKENS), whole) < TOLERANCE


def test_layers_that_a_gpu_would_use(model):
    assert worst(walk(divide(model, 2, own_layers=False), TOKENS), whole_logits(model)) < TOLERANCE


def test_each_half_holds_its_part(model):
    """The halves together hold the whole model once, and no tensor twice."""
    names = [set(half.load_weights()) for half in halves(model, 1)]
    assert not any(name.startswith("lm_head") for name in names[0] | names[1])
    assert sum("mlp.up_proj.weight" in name for name in names[0]) == 1
    assert sum("mlp.up_proj.weight" in name for name in names[1]) == 2
    first, last = (half.load_weights() for half in halves(model, 1))
    whole, layer = model.load_weights(), "model.layers.{}.mlp.up_proj.weight"
    embedding = "model.embed_tokens.weight"
    np.testing.assert_array_equal(first[embedding], whole[embedding])
    np.testing.assert_array_equal(last[embedding], whole["lm_head.weight"])
    np.testing.assert_array_equal(last[layer.format(1)], whole[layer.format(2)])


def test_a_base_lora_reaches_both_halves(model):
    split, whole = divide(model, 1), NativeBackend(model, threads=2)
    lora = random_lora(model.config)
    below = BaseLoRA({("q_proj", 0): lora.pairs["q_proj", 1]}, 0.5)
    for one in (lora, below, None):
        split.set_lora(one)
        whole.set_lora(one)
        got, wanted = (b.prefill(TOKENS[:50], b.new_cache()).logits for b in (split, whole))
        np.testing.assert_allclose(got, wanted, atol=TOLERANCE * np.abs(wanted).max())
        assert split.lora is one
    split.set_lora(lora)
    with pytest.raises(AdapterMismatch):
        split.set_lora(BaseLoRA({("q_proj", 9): lora.pairs["q_proj", 1]}))
    np.testing.assert_array_equal(split.prefill(TOKENS[:50], split.new_cache()).logits.shape, wanted.shape)
    assert split.lora is lora


def test_a_reply_with_tiers_and_a_resumed_session(model):
    """The engine's replies, the cache on its way to disk and back, and the statistics of both parts."""
    split, whole = divide(model, 2), NativeBackend(model, threads=2)
    some = {"prompt": "hello " * 30, "max_new_tokens": 12}
    wanted = LLMInferenceEngine(model, whole, SMALL).generate(request(**some))
    engine = LLMInferenceEngine(model, split, SMALL)
    got = engine.generate(request(**some, session_id="a"))
    assert got.token_ids == wanted.token_ids and got.kv.tokens == wanted.kv.tokens
    cache = engine.sessions.get("a").cache
    again, dump = split.new_cache(SMALL), cache.dump()
    stream = bytearray(b"".join(bytes(part) for part in dump.parts))
    assert len(stream) == dump.nbytes

    def read(n):
        taken = bytes(stream[:n])
        del stream[:n]
        return taken

    again.restore(dump.facts, read)
    assert again.offset == cache.offset and not stream
    np.testing.assert_array_equal(split.decode(5, again).logits, split.decode(5, cache.fork()).logits)
    assert again.nbytes == again.first.nbytes + again.last.nbytes > 0


def test_a_failure_of_one_half_leaves_the_cache_as_it_was(model, monkeypatch):
    """The first layers have read the tokens when MLX fails: they are taken back."""
    split = divide(model, 1)
    cache = split.new_cache(SMALL)
    split.prefill(TOKENS[:70], cache)
    wanted = split.decode(5, cache.fork()).logits
    with monkeypatch.context() as patch:
        patch.setattr(split.last, "_forward", lambda *args: 1 / 0)
        for call in (lambda: split.decode(5, cache), lambda: split.verify(TOKENS[:40], cache)):
            with pytest.raises(ZeroDivisionError):
                call()
            assert cache.first.offset == cache.last.offset == 70
    np.testing.assert_array_equal(split.decode(5, cache).logits, wanted)


@pytest.mark.parametrize(("limit", "first"), [(10**9, 0), (None, 1), (0.5, 2)])
def test_a_model_is_divided_only_if_two_copies_do_not_fit(model, monkeypatch, limit, first):
    """limit: bytes; None: one copy and a half fit; 0.5: half of a copy fits MLX's device."""
    one = weight_bytes.bytes_of_weights(model.types, model.bytes, model.parameters, "mlx", "cpu")
    room = limit if limit and limit > 1 else int(one * (limit or 1.1))
    monkeypatch.setattr(cpu, "memory_limit", lambda metal: room)
    backend = select.open_backend("hybrid", model, threads=1)
    assert getattr(backend, "n_first", 0) == first and backend.name == "hybrid"
    assert "layers 1-" in backend.kernels or not first


def test_tokens_outside_the_vocabulary_are_refused(model):
    split = divide(model, 1)
    for call in (split.prefill, split.verify, lambda ids, cache: split.hidden_states(ids, cache=cache)):
        with pytest.raises(UsageError):
            call([10**6], split.new_cache())
    cache = split.first.new_cache()
    with pytest.raises(ValueError, match="layers: bad argument"):  # more than a chunk
        split.first.first_layers(TOKENS[:38], cache)
    assert cache.offset == 0 and len(split.first.first_layers(TOKENS[:37], cache)) == cache.offset == 37


class Part:
    """A cache of `offset` tokens that can be cut only at multiples of `grain`."""

    def __init__(self, offset, grain):
        self.offset, self.grain = offset, grain

    def trim(self, n):
        self.offset = (self.offset - n) // self.grain * self.grain
        return True


@pytest.mark.parametrize("grains", [(64, 1), (1, 64), (64, 48), (1, 1)])
def test_both_parts_keep_the_same_tokens(grains):
    """A part with pages of 8 bits removes more tokens than it must."""
    cache = SplitCache(*(Part(200, grain) for grain in grains))
    assert cache.trim(10) and cache.first.offset == cache.last.offset == cache.offset
    assert cache.offset == {(64, 48): 0, (1, 1): 190}.get(grains, 128)
    assert not cache.trim(201) and not cache.trim(-1)

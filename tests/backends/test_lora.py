"""set_lora: three backends, fused weights and each other; taking it off again; stale caches."""

import functools

import numpy as np
import pytest

from ruvmlx.backends.mlx import backend as mlx
from ruvmlx.backends.mlx.backend import MLXBackend
from ruvmlx.backends.reference import ReferenceBackend
from ruvmlx.engine import GenerationRequest, LLMInferenceEngine, Sampling
from ruvmlx.errors import AdapterMismatch, CorruptFile
from ruvmlx.lora.base_lora import EMBEDDING, MODULES, BaseLoRA, place_shape
from ruvmlx.models.load import load_model
from ruvmlx.platform import cpu
from tests.models.make_models import make_safetensors_model

from .exact_prompts import ExactPrompts
from .test_agreement import FLOAT32_TOLERANCE, SHAPES, SIZES, STORED, TOKENS, walk, worst
from .test_families import MPTS
from .test_families import SHAPES as OTHERS
from .test_native import TOLERANCE as NATIVE_TOLERANCE

FAMILIES = OTHERS | MPTS
OPEN = {
    "reference": ReferenceBackend,
    "native": functools.partial(ExactPrompts, threads=2, chunk=37),
    "mlx": functools.partial(MLXBackend, device="cpu", chunk=37),
}


def random_base(config, seed=3, modules=MODULES, size=0.15) -> BaseLoRA:
    """Ranks 1, 3, 5 and 7 in turn; every second layer lacks its k_proj and up_proj. The embedding's lora_a is
    as large as the products of the others with their inputs are, because it is read, not multiplied."""
    rng, pairs = np.random.default_rng(seed), {}
    for i, module in enumerate(modules):
        for layer in range(1 if module in ("lm_head", "embed_tokens") else config.n_layers):
            if layer % 2 and module in ("k_proj", "up_proj"):
                continue
            shape, rank = place_shape(config, module, layer), (1, 3, 5, 7)[(i + layer) % 4]
            if shape is None:
                continue
            n_in, n_out = shape
            spread = 1 if module == "embed_tokens" else n_in**-0.5
            a = rng.normal(0, spread, (n_in, rank)).astype(np.float32)
            pairs[module, layer] = (a, rng.normal(0, size, (rank, n_out)).astype(np.float32))
    return BaseLoRA(pairs, scale=0.7)


def fused(model, base) -> ReferenceBackend:
    """The oracle with W + scale * (A B)^T in its weights, and E + scale * A B in its embedding."""
    backend = ReferenceBackend(model)
    weights = backend._weights
    if "lm_head.weight" not in weights:  # tied: the embedding itself stays as it is
        backend.config = backend.config.__class__(**vars(backend.config) | {"tie_word_embeddings": False})
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for (module, layer), (a, b) in base.pairs.items():
        if module == "embed_tokens":
            weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] + base.scale * (a @ b)
            continue
        block = "mlp" if module in MODULES[4:7] else "self_attn"
        name = "lm_head" if module == "lm_head" else f"model.layers.{layer}.{block}.{module}"
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + base.scale * (a @ b).T
    return backend


@pytest.fixture(autouse=True)
def steady(monkeypatch):
    """As many BLAS threads throughout: how a sum is split decides its last bit."""
    monkeypatch.setattr(type(mlx.BLAS), "adapt", lambda *_: None)


PARAMS = [("mistral-window-64", "4-bit"), ("llama-tied-biased", "float16")]
PARAMS += [("stablelm-biased", "float16"), ("mpt-grouped", "4-bit")]


@pytest.fixture(params=PARAMS, ids="-".join)
def model(request, tmp_path):
    shape, stored = request.param
    made = (SHAPES | FAMILIES)[shape]
    return load_model(str(make_safetensors_model(tmp_path / "m", **made, **STORED[stored])))


@pytest.mark.parametrize("name", OPEN)
def test_agrees_with_fused_weights(model, name):
    """All modules, the head too, at odd ranks: prefill, decode, verify, head; then as if it never was."""
    base, backend = random_base(model.config), OPEN[name](model)
    before = walk(backend, TOKENS)
    backend.set_lora(base)
    assert backend.lora is base
    oracle = fused(model, base)
    want = oracle.verify(TOKENS, oracle.new_cache())
    tolerance = NATIVE_TOLERANCE if name == "native" else FLOAT32_TOLERANCE
    assert worst(before, want) > 100 * tolerance
    assert worst(walk(backend, TOKENS), want) < tolerance
    hidden = oracle.hidden_states(TOKENS[:9])
    assert worst(dict(enumerate(backend.head(hidden))), oracle.head(hidden)) < tolerance
    backend.set_lora(None)
    after = walk(backend, TOKENS)
    assert all(np.array_equal(after[i], row) for i, row in before.items())


@pytest.mark.parametrize("name", ["native", "mlx"])
def test_4_bits_run_as_their_floats(model, name):
    """The backend reads packed factors; the twin is the NumPy reference with the unpacked factors in its
    weights. Then the factors of 32 bits take their place, with the bits that they have alone."""
    base, backend = random_base(model.config), OPEN[name](model)
    backend.set_lora(base)
    plain = backend.verify(TOKENS[:70], backend.new_cache())
    packed = base.to_4_bits()
    assert packed.nbytes < base.nbytes and packed.to_4_bits() is packed
    backend.set_lora(packed)
    assert backend.lora is packed
    oracle = fused(model, BaseLoRA(dict(packed.pairs), packed.scale))
    want = oracle.verify(TOKENS, oracle.new_cache())
    tolerance = NATIVE_TOLERANCE if name == "native" else FLOAT32_TOLERANCE
    assert worst(walk(backend, TOKENS), want) < tolerance
    assert worst(dict(enumerate(plain)), want[:70]) > 10 * tolerance  # packing itself changes the logits
    hidden = oracle.hidden_states(TOKENS[:9])
    assert worst(dict(enumerate(backend.head(hidden))), oracle.head(hidden)) < tolerance
    backend.set_lora(base)
    np.testing.assert_array_equal(backend.verify(TOKENS[:70], backend.new_cache()), plain)


@pytest.mark.parametrize("name", OPEN)
def test_the_embedding_alone_at_every_rank(model, name):
    """The kernels take four rows at a time, so the ranks are below, at and above four. The output head does
    not change. This holds also for a model whose embedding and head are one matrix."""
    backend, untouched = OPEN[name](model), ReferenceBackend(model)
    hidden = untouched.hidden_states(TOKENS[:9])
    rng, (height, width) = np.random.default_rng(11), place_shape(model.config, *EMBEDDING)
    tolerance = NATIVE_TOLERANCE if name == "native" else FLOAT32_TOLERANCE
    for rank in (1, 4, 7):
        a, b = rng.normal(0, 1, (height, rank)), rng.normal(0, 0.15, (rank, width))
        base = BaseLoRA({EMBEDDING: (a.astype(np.float32), b.astype(np.float32))}, 0.7)
        for change in (base, base.to_4_bits()) if name != "reference" else (base,):
            backend.set_lora(change)
            oracle = fused(model, BaseLoRA(dict(change.pairs), change.scale))
            want = oracle.verify(TOKENS[:41], oracle.new_cache())
            caches = [backend.new_cache(), backend.new_cache()]
            got = dict(enumerate(backend.verify(TOKENS[:39], caches[0])))
            backend.prefill(TOKENS[:40], caches[1])
            rows = backend.decode_batch(TOKENS[39:41], caches)
            got |= {39 + i: row.logits for i, row in enumerate(rows)}
            assert worst(got, want) < tolerance
            assert worst(dict(enumerate(backend.head(hidden))), untouched.head(hidden)) < tolerance


@pytest.mark.parametrize("name", OPEN)
def test_one_base_after_another(model, name):
    """What the second does not name is as in the frozen model."""
    first, second = random_base(model.config), random_base(model.config, 5, ("v_proj", "down_proj"))
    backend, oracle = OPEN[name](model), fused(model, second)
    backend.set_lora(first)
    backend.set_lora(second)
    want = oracle.verify(TOKENS[:70], oracle.new_cache())
    got = backend.verify(TOKENS[:70], backend.new_cache())
    assert worst(dict(enumerate(got)), want) < (NATIVE_TOLERANCE if name == "native" else FLOAT32_TOLERANCE)


@pytest.mark.parametrize("how", ["packed", "as on a gpu"])
def test_the_graphs_of_other_machines(tmp_path, monkeypatch, how):
    """Packed weights on a CPU, and mlx-lm's own modules as a GPU runs them."""
    path = make_safetensors_model(
        tmp_path / "m", **SIZES, **STORED["4-bit" if how == "packed" else "float32"]
    )
    model = load_model(str(path))
    if how == "packed":
        monkeypatch.setattr(cpu, "total_memory", lambda: 1)
    else:
        as_on_metal = functools.partial(mlx.plan, device="metal")
        monkeypatch.setattr(mlx, "plan", lambda weights, _: as_on_metal(weights))
    base, backend = random_base(model.config), MLXBackend(model, device="cpu", chunk=37)
    before = backend.verify(TOKENS[:70], backend.new_cache())
    backend.set_lora(base)
    oracle = fused(model, base)
    assert worst(walk(backend, TOKENS), oracle.verify(TOKENS, oracle.new_cache())) < FLOAT32_TOLERANCE
    backend.set_lora(None)
    np.testing.assert_array_equal(backend.verify(TOKENS[:70], backend.new_cache()), before)


@pytest.mark.parametrize("name", OPEN)
def test_what_does_not_fit_is_refused_and_changes_nothing(tiny, name):
    backend = OPEN[name](tiny)
    base = random_base(tiny.config)
    backend.set_lora(base)
    a, b = base.pairs["q_proj", 0]
    for pairs in ({("q_proj", 0): (a, b[:, 1:])}, {("q_proj", 2): (a, b)}, {("r_proj", 0): (a, b)}):
        with pytest.raises(AdapterMismatch, match="_proj of layer"):
            backend.set_lora(BaseLoRA(pairs))
    with pytest.raises(CorruptFile, match="NaN"):
        backend.set_lora(BaseLoRA({("q_proj", 0): (a, b * np.nan)}))
    assert backend.lora is base


@pytest.mark.parametrize("name", OPEN)
def test_a_chat_goes_on_under_another_base_as_if_it_had_no_cache(tiny, name):
    backend = OPEN[name](tiny)
    engine = LLMInferenceEngine(tiny, backend)

    def reply(n, session):
        ids = list(TOKENS[:n])
        request = GenerationRequest(
            input_ids=ids, session_id=session, max_new_tokens=5, sampling=Sampling(0.0), ignore_eos=True
        )
        return (engine if session else LLMInferenceEngine(tiny, backend)).generate(request)

    reply(50, "chat")
    assert reply(70, "chat").cached_tokens > 40
    backend.set_lora(random_base(tiny.config))
    changed = reply(80, "chat")
    assert changed.cached_tokens == 0
    assert changed.token_ids == reply(80, None).token_ids
    assert reply(90, "chat").cached_tokens > 70
    backend.set_lora(None)
    back = reply(100, "chat")
    assert back.cached_tokens >= 70  # what was read under this base before
    assert back.token_ids == reply(100, None).token_ids

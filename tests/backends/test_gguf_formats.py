"""Models in every packed type of GGUF: native and MLX against NumPy, and against llama.cpp."""

from pathlib import Path

import numpy as np
import pytest

from ruvmlx.backends.mlx import graph
from ruvmlx.backends.mlx.backend import MLXBackend, plan
from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.backends.reference import ReferenceBackend, unpack_weights
from ruvmlx.kernels.matmul import implementations
from ruvmlx.models.config.layout import matrices
from ruvmlx.models.files.gguf_types import ROWS
from ruvmlx.models.load import load_gguf
from ruvmlx.models.weights.stored import stored_tensor
from ruvmlx.platform.mx import mx
from tests.models.make_gguf import make_gguf_model
from tests.models.vocabularies import TOKENS as VOCABULARY
from tests.oracles import llama_cpp
from tests.oracles.divergence import mean_kl

from .test_agreement import TOKENS, worst
from .test_native import COARSE_TOLERANCE, TOLERANCE

PACKED = [row.name for row in ROWS if row.block > 1]
SHAPE = {"hidden_size": 256, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "intermediate_size": 512}
TEXT = Path(__file__).parents[1] / "data" / "teacher_forced.txt"
ROUNDED = {"Q2_K"}  # on the native backend, to 8 bits; elsewhere see gguf_types.py
packed = pytest.mark.parametrize("quant", PACKED)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")

    def make(quant):
        path = folder / f"{quant}.gguf"
        return load_gguf(path if path.exists() else make_gguf_model(path, quant=quant, **SHAPE))

    return make


def difference(backend, want):
    got = backend.verify(TOKENS[: len(want)], backend.new_cache())
    return worst(dict(enumerate(got)), want)


def oracle(model, n=70):
    backend = ReferenceBackend(model)
    return backend.verify(TOKENS[:n], backend.new_cache())


@packed
def test_native_agrees_with_the_oracle(quant, made):
    """The oracle has the file's weights to the last bit; native, too, but for types that it rounds."""
    model = made(quant)
    want = oracle(model)
    backend = NativeBackend(model, threads=2, chunk=37)
    assert difference(backend, want) < TOLERANCE * (20 if quant in ROUNDED else 3)


@pytest.mark.parametrize("quant", ["Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q8_0"])
def test_a_prompt_has_activations_of_8_bits(quant, made):
    """So the keys and values of a prompt are a little coarser. `verify` and `hidden_states` have 16 bits."""
    model = made(quant)
    backend, want = NativeBackend(model, threads=2), oracle(model)[-1]
    exact, coarse = backend.new_cache(), backend.new_cache()
    logits = backend.verify(TOKENS[:70], exact)
    np.testing.assert_array_equal(backend.head(backend.hidden_states(TOKENS[:70])), logits)

    def error(got):
        return np.abs(got - want).max() / np.abs(want).max()

    assert 2 * error(logits[-1]) < error(backend.prefill(TOKENS[:70], coarse).logits) < COARSE_TOLERANCE
    after = [backend.verify(TOKENS[:20], cache) for cache in (exact, coarse)]
    assert 0 < np.abs(after[0] - after[1]).max() / np.abs(after[0]).max() < COARSE_TOLERANCE


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q4_1"])
def test_parts_of_a_prompt_have_the_bits_of_the_whole(quant, made):
    model = made(quant)
    backend, odd = NativeBackend(model, threads=2), NativeBackend(model, threads=1, chunk=19)
    want = backend.prefill(TOKENS[:70], backend.new_cache()).logits
    np.testing.assert_array_equal(odd.prefill(TOKENS[:70], odd.new_cache()).logits, want)
    cache = backend.new_cache()
    for begin, end in ((0, 1), (1, 18), (18, 69), (69, 70)):
        got = backend.prefill(TOKENS[begin:end], cache).logits
    np.testing.assert_array_equal(got, want)


def test_a_prompt_of_floats_is_exact(made):
    backend = NativeBackend(made("F16"), threads=2)
    logits = backend.verify(TOKENS[:70], backend.new_cache())[-1]
    error = np.abs(backend.prefill(TOKENS[:70], backend.new_cache()).logits - logits).max()
    assert error < 1e-6 * np.abs(logits).max()


@pytest.mark.parametrize(("quant", "close"), [("Q4_K", 1e-4), ("Q4_1", 1e-3), ("Q8_0", 1e-3)])
@pytest.mark.parametrize("impl", implementations())
def test_a_prompt_is_the_same_with_all_instructions(impl, quant, close, made):
    """The instruction sets add the groups in different orders. So an activation can be rounded to the other
    of two neighbouring 8-bit numbers."""
    first, second = (NativeBackend(made(quant), threads=2, impl=name) for name in ("scalar", impl))
    a, b = (x.prefill(TOKENS[:70], x.new_cache()).logits for x in (first, second))
    assert np.abs(a - b).max() < close * np.abs(a).max()


@packed
def test_mlx_on_a_cpu_agrees_with_the_oracle(quant, made):
    """It unpacks to float32, from the file's blocks where the affine layout would round."""
    model = made(quant)
    assert difference(MLXBackend(model, device="cpu"), oracle(model)) < TOLERANCE


@packed
def test_mlx_keeps_the_affine_form_on_a_gpu(quant, made):
    """Packed as `plan` says, MLX's own dequantisation gives the oracle's weights, or nearly so."""
    model = made(quant)
    weights = model.load_weights()
    how = plan(weights, "metal")
    assert not how.unpack
    assert how.dtype == (mx.float32 if weights.stored_tensor("lm_head").type.wide else mx.float16)
    net = graph.build(model.config, weights, mx.float32, False)
    want = unpack_weights(weights, model.config)
    for module, (_, width) in matrices(model.config):
        kind = weights.stored_tensor(module).type
        parts = {k: graph.parameters(net)[f"{module}.{k}"] for k in ("weight", "scales", "biases")}
        fmt = {"bits": kind.affine_bits, "group_size": kind.affine_group}
        got = np.array(mx.dequantize(*parts.values(), **fmt))
        assert got.shape == (len(want[f"{module}.weight"]), width)
        most = np.abs(want[f"{module}.weight"]).max()
        close = 3e-7 if kind.affine or kind.name == "Q8_K" else 0.51 / 127
        assert np.abs(got - want[f"{module}.weight"]).max() <= close * most


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K", "Q3_K"])
def test_native_takes_the_bytes_of_the_file(quant, made):
    """Super-blocks are packed as they are; Q3_K takes those of Q6_K."""
    model = made(quant)
    kind = stored_tensor(model.load_weights(), "lm_head").type
    backend = NativeBackend(model, threads=1)
    weights = backend.nbytes - backend.decoder.nbytes
    share = {"Q3_K": 210 / 110}.get(quant, 1.0)
    assert kind.name == quant
    assert weights < 1.02 * share * model.bytes + 64 * 1024


@pytest.mark.parametrize("quant", ["Q4_K", "Q5_K", "Q6_K", "Q3_K", "IQ4_XS"])
def test_random_models_run_in_llama_cpp_alike(quant, tmp_path):
    """Random weights: llama.cpp's activations have 8 bits, ours 16; the rest is rounding."""
    path = make_gguf_model(tmp_path / "m.gguf", quant=quant, vocab_size=len(VOCABULARY), **SHAPE)
    model, tokens = load_gguf(path), np.random.default_rng(0).integers(3, len(VOCABULARY), 40).tolist()
    theirs = llama_cpp.logits(path, tokens)
    numpy, native = ReferenceBackend(model), NativeBackend(model, threads=2)
    want = numpy.verify(tokens, numpy.new_cache())
    ours = native.verify(tokens, native.new_cache())
    spread = np.abs(want).max()
    assert np.abs(theirs - want).max() < 0.05 * spread
    assert np.abs(ours - want).max() < 0.002 * spread


def kl_to_llama_cpp(model, backends, tokens):
    theirs = llama_cpp.logits(model.path, tokens)
    found = {}
    for name, make in backends.items():
        backend = make(model)
        found[name] = mean_kl(theirs, backend.verify(tokens, backend.new_cache()))
    return found


NATIVE = {"native": NativeBackend}
BOTH = NATIVE | {"mlx": lambda model: MLXBackend(model, device="cpu")}


@pytest.mark.parametrize("file_type", [name for name in llama_cpp.FILE_TYPES if name != "Q4_0"])
def test_kl_to_llama_cpp(file_type, full, starter_file, tmp_path, record_property):
    """The starter, requantised by llama.cpp: at most 0.01 nats. Rows of 576 that a type does not fit fall
    back to blocks of 32 there. --full: 500 tokens, native and MLX, every type."""
    if not full and file_type not in ("Q4_K_M", "Q2_K"):
        pytest.skip("only with --full")
    model = load_gguf(llama_cpp.requantise(starter_file, tmp_path / "m.gguf", file_type))
    tokens = model.tokenizer.encode(TEXT.read_text())[: 500 if full else 48]
    for name, kl in kl_to_llama_cpp(model, BOTH if full else NATIVE, tokens).items():
        record_property(f"kl_{name}", kl)
        print(f"\n{file_type}: mean KL(llama.cpp || {name}) over {len(tokens)} tokens: {kl:.6f} nats")
        assert -1e-9 <= kl <= 0.01

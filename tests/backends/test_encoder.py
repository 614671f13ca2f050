"""The encoder against its float64 twin, at odd sizes; several texts together, and what it refuses."""

import numpy as np
import pytest

from ruvmlx.backends.base import Embedding
from ruvmlx.backends.encoder import backend as encoder_backend
from ruvmlx.backends.encoder import forward
from ruvmlx.backends.encoder.backend import finish
from ruvmlx.backends.select import open_backend
from ruvmlx.errors import AdapterMismatch, UnsupportedModel, UsageError
from ruvmlx.models.load import load_model
from tests.models.encoder_models import EncoderShape, encoder_weights, make_encoder, make_gguf_encoder
from tests.models.gguf_writer import decode_blocks, encode_blocks
from tests.oracles.encoder import states_ref, vector_ref

FAMILIES = ("bert", "roberta", "xlm-roberta", "nomic_bert")
LENGTHS = (5, 1, 37, 2, 12)
CLOSE = {"atol": 3e-5, "rtol": 0}


def texts_of(shape, lengths=LENGTHS):
    rng = np.random.default_rng(3)
    return [rng.integers(0, shape.vocab, n).tolist() for n in lengths]


def open_encoder(path):
    return open_backend("auto", load_model(str(path)))


def vectors(backend, texts):
    return np.stack(finish(backend.text_vectors(texts)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", None])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_the_twins(tmp_path, family, pooling):
    """Of texts of many lengths together; without the files of sentence-transformers, the mean."""
    shape = EncoderShape(family)
    backend, texts = open_encoder(make_encoder(tmp_path / "m", shape, pooling)), texts_of(shape)
    weights = encoder_weights(shape)
    wanted = [vector_ref(shape, weights, text, pooling or "mean") for text in texts]
    np.testing.assert_allclose(vectors(backend, texts), wanted, **CLOSE)
    np.testing.assert_allclose(backend.embed(texts[0]), wanted[0], **CLOSE)
    states = states_ref(shape, weights, texts[2])
    np.testing.assert_allclose(backend.hidden_states(texts[2]), states, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_file_gives_the_vectors_of_the_folder(tmp_path, family):
    shape = EncoderShape(family)
    folder = open_encoder(make_encoder(tmp_path / "m", shape, "cls"))
    file = open_encoder(make_gguf_encoder(tmp_path / "m.gguf", shape, "cls"))
    np.testing.assert_allclose(
        vectors(file, texts_of(shape)), vectors(folder, texts_of(shape)), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("quant", ["F16", "Q8_0", "Q4_0"])
def test_a_quantised_file(tmp_path, quant):
    """The twin has the weights as the file stores them. Tables but that of the words are not quantised."""
    shape = EncoderShape("nomic_bert", hidden=64, heads=2, ffn=96, layers=2)
    backend, stored = open_encoder(make_gguf_encoder(tmp_path / "m.gguf", shape, "mean", quant)), {}
    for name, w in encoder_weights(shape).items():
        packed = w.ndim == 2 and name != "token_types.weight"
        raw = encode_blocks(w, quant) if packed else b""
        half = packed and quant == "F16"
        stored[name] = w.astype(np.float16) if half else decode_blocks(raw, quant, w.shape) if packed else w
    wanted = [vector_ref(shape, stored, text, "mean") for text in texts_of(shape)]
    np.testing.assert_allclose(vectors(backend, texts_of(shape)), wanted, **CLOSE)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_folder_of_16_bits(tmp_path, dtype):
    import ml_dtypes

    kind, shape = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype], EncoderShape()
    backend = open_encoder(make_encoder(tmp_path / "m", shape, dtype=kind))
    weights = {name: w.astype(kind) for name, w in encoder_weights(shape).items()}
    wanted = [vector_ref(shape, weights, text, "mean") for text in texts_of(shape)]
    np.testing.assert_allclose(vectors(backend, texts_of(shape)), wanted, **CLOSE)


def test_a_text_does_not_depend_on_the_texts_beside_it(tmp_path, monkeypatch):
    """Nor on the sizes of blocks and batches."""
    shape = EncoderShape()
    backend, texts = open_encoder(make_encoder(tmp_path / "m", shape)), texts_of(shape)
    alone = [vectors(backend, [text])[0] for text in texts]
    for rows, scores, batch in ((256, 1 << 22, 2048), (3, 100, 12), (1, 1, 1)):
        monkeypatch.setattr(forward, "ROWS", rows)
        monkeypatch.setattr(forward, "SCORES", scores)
        monkeypatch.setattr(encoder_backend, "BATCH_TOKENS", batch)
        np.testing.assert_allclose(vectors(backend, texts), alone, atol=2e-6, rtol=0)


def test_other_work_can_run_between_two_blocks(tmp_path):
    """Several times in each layer, also within one long text."""
    shape, pauses = EncoderShape(context=900), []
    backend = open_encoder(make_encoder(tmp_path / "m", shape))
    [text] = texts_of(shape, [900])
    backend.hidden_states(text, pause=lambda: pauses.append(1))
    assert len(pauses) >= 10 * shape.layers


def test_an_encoder_writes_no_text(tmp_path):
    backend = open_encoder(make_encoder(tmp_path / "m", EncoderShape()))
    assert isinstance(backend, Embedding)
    calls = [
        lambda: backend.new_cache(),
        lambda: backend.prefill([1], None),
        lambda: backend.decode(1, None),
        lambda: backend.decode_batch([1], [None]),
        lambda: backend.verify([1], None),
        lambda: backend.head(np.zeros((1, 40), np.float32)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="embeds texts and writes none"):
            call()
    with pytest.raises(AdapterMismatch, match="no adapters"):
        backend.set_lora(object())
    with pytest.raises(UsageError, match="at most 37"):
        backend.embed([1] * 38)
    with pytest.raises(UsageError, match="outside the vocabulary"):
        backend.embed([10_000])


def test_a_decoder_is_no_encoder(tmp_path, tiny_folder):
    assert not isinstance(open_backend("reference", load_model(str(tiny_folder))), Embedding)
    with pytest.raises(UnsupportedModel, match="bert models embed texts"):
        _ = load_model(str(make_encoder(tmp_path / "m", EncoderShape()))).config

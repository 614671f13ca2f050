"""Vectors and token ids of encoders beside llama.cpp's, on the same GGUF files."""

import numpy as np
import pytest

from ruvmlx.backends.select import open_backend
from ruvmlx.models.load import load_model
from ruvmlx.sona.embedding import text_ids
from tests.models.encoder_models import EncoderShape, make_gguf_encoder

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle")
TEXTS = ["hello", "The sea, and the wind!", "singing rivers 12", "海 and the sea", "zebra x"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "nomic_bert"])
def test_vectors_are_llamacpps(tmp_path, family, pooling):
    """Its GELU is a table of 16-bit numbers of another formula, so the third digit can differ."""
    shape = EncoderShape(family, hidden=64, heads=4, ffn=96, spare=0)
    file = make_gguf_encoder(tmp_path / "m.gguf", shape, pooling)
    model = load_model(str(file))
    oracle = llama_cpp.Llama(str(file), embedding=True, n_ctx=shape.context, n_batch=512, verbose=False)
    backend = open_backend("auto", model)
    for text in TEXTS:
        ids = text_ids(model, text)
        assert oracle.tokenize(text.encode(), add_bos=True, special=False) == ids, text
        theirs = np.array(oracle.embed(text, normalize=True))
        ours = backend.embed(ids)
        assert ours @ theirs > 0.9999, (text, float(ours @ theirs))

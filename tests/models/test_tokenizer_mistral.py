"""Mistral's own vocabularies (PyPI's mistral-common), rebuilt from pieces and scores as in a GGUF."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.models.gguf import read_gguf
from ruvmlx.models.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.tokenizer_json import folder_tokenizer

from .gguf_writer import u32, write_gguf
from .make_models import vocab_only_keys
from .strings import STRINGS


def vocabularies() -> list[Path]:
    spec = find_spec("mistral_common")
    folders = spec.submodule_search_locations if spec else []
    return sorted(p for folder in folders for p in (Path(folder) / "data").glob("*.model.v*"))


FILES = vocabularies()
pytestmark = pytest.mark.skipif(not FILES, reason="needs mistral-common, which carries the vocabularies")


def piece_type(sp, i: int) -> int:
    checks = {2: sp.is_unknown, 3: sp.is_control, 5: sp.is_unused, 6: sp.is_byte}
    return next((kind for kind, check in checks.items() if check(i)), 1)


def as_gguf(sp, path: Path) -> Path:
    """What llama.cpp's converter would write of this vocabulary."""
    n = sp.vocab_size()
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": np.array([sp.get_score(i) for i in range(n)], np.float32),
        "tokenizer.ggml.token_type": np.array([piece_type(sp, i) for i in range(n)], np.int32),
        "tokenizer.ggml.bos_token_id": u32(sp.bos_id()),
        "tokenizer.ggml.eos_token_id": u32(sp.eos_id()),
    }
    return write_gguf(path, vocab_only_keys(n) | keys, {})


@pytest.fixture(scope="module", params=FILES, ids=lambda p: p.name[-24:])
def pair(request, tmp_path_factory):
    """sentencepiece itself, and our tokenizer from a GGUF of the same pieces."""
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_file=str(request.param))
    return sp, gguf_tokenizer(read_gguf(as_gguf(sp, tmp_path_factory.mktemp("v") / "v.gguf")))


def test_same_ids_as_sentencepiece(pair):
    """Fifty strings and one long one."""
    sp, ours = pair
    for text in [*STRINGS, "\n".join(STRINGS)]:
        ids = sp.encode(text)
        assert ours.encode(text, add_bos=False) == ids, repr(text)
        assert ours.decode(ids) == sp.decode(ids)
    assert ours.encode("a")[0] == sp.bos_id()


def test_control_pieces_are_never_read_from_typed_text(pair):
    """<s>, [INST]... are never read from typed text, and always where they are asked for."""
    sp, ours = pair
    control = [i for i in range(sp.vocab_size()) if sp.is_control(i)]
    assert len(control) >= 2
    for i in control:
        text = sp.id_to_piece(i)
        assert not set(ours.encode(text + " x", add_bos=False)) & set(control)
        assert ours.encode("x" + text, add_bos=False, special=True)[-1] == i


def test_llama_cpp_reads_the_same_vocabulary_alike(tmp_path):
    """The largest of the vocabularies in llama.cpp itself, special tokens matched and not."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle")
    import sentencepiece

    path = as_gguf(sentencepiece.SentencePieceProcessor(model_file=str(FILES[0])), tmp_path / "v.gguf")
    oracle = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    ours = gguf_tokenizer(read_gguf(path))
    for text in [*STRINGS, "[INST] a [/INST]b</s><s> c"]:
        for special in (False, True):
            want = oracle.tokenize(text.encode(), add_bos=True, special=special)
            assert ours.encode(text, special=special) == want, repr(text)


@pytest.mark.skipif(len(FILES) < 2, reason="needs several vocabularies")
def test_tokenizer_model_in_a_folder(tmp_path):
    """The same file beside a safetensors model."""
    import sentencepiece

    (tmp_path / "tokenizer.model").write_bytes(FILES[-1].read_bytes())
    ours = folder_tokenizer(tmp_path)
    sp = sentencepiece.SentencePieceProcessor(model_file=str(FILES[-1]))
    for text in STRINGS:
        assert ours.encode(text, add_bos=False) == sp.encode(text)
    assert ours.bos_id == sp.bos_id() and sp.eos_id() in ours.eos_ids

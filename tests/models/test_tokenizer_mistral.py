"""Mistral's own vocabularies (PyPI's mistral-common), rebuilt from pieces and scores as in a GGUF."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from ruvmlx.models.config.model import Message
from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.text.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.text.tokenizer_json import folder_tokenizer

from .gguf_writer import u32, write_gguf
from .mistral_data import conversations, encoder, mistral_file
from .strings import STRINGS
from .texts import varied_texts
from .vocabularies import vocab_only_keys


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
    """A thousand texts and one long one."""
    sp, ours = pair
    for text in [*varied_texts(ours.special_tokens), "\n".join(STRINGS)]:
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


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name[-24:])
def test_tokenizer_model_in_a_folder(file, tmp_path):
    """With tokenizer.model in a folder, ids, decoded texts and chat prompts equal mistral-common's."""
    from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer

    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    ours, theirs = folder_tokenizer(tmp_path), SentencePieceTokenizer(file)
    for text in varied_texts(ours.special_tokens):
        want = theirs.encode(text, bos=False, eos=False)
        assert ours.encode(text, add_bos=False) == want, repr(text)
        assert ours.decode(want) == theirs.decode(want), repr(text)
    assert ours.bos_id == theirs.bos_id and ours.eos_ids == {theirs.eos_id}
    if "[INST]" in ours.special_tokens:  # in version 1 it is plain text, and any vocabulary could mean it
        rendered = encoder(file)
        for name, messages in conversations(3).items():
            assert ours.encode_chat(messages) == rendered(messages), name


def test_version_1_with_a_template_of_its_own(tmp_path):
    """Version 1 has no special tokens for turns: with a template of its form the ids are mistral-common's."""
    file = mistral_file("tokenizer.model.v1")
    (tmp_path / "tokenizer.model").write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    chat = [Message("user", "What is 2 + 2?")]
    assert folder_tokenizer(tmp_path).encode_chat(chat) == encoder(file)(chat)

"""Token ids against llama.cpp's own tokenizer for the same GGUF files."""

import random

import numpy as np
import pytest

from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.text.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.text.pretokenizers import PATTERNS

from .gguf_writer import u32, write_gguf
from .strings import STRINGS
from .vocabularies import gguf_spm_keys, vocab_only_keys

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle")


def both(path):
    """Ours and theirs on one file."""
    oracle = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return gguf_tokenizer(read_gguf(path)), oracle


def assert_same(ours, oracle, text: str, special: bool):
    want = oracle.tokenize(text.encode(), add_bos=False, special=special)
    assert ours.encode(text, add_bos=False, special=special) == want, repr(text)


@pytest.fixture(scope="module")
def starter(starter_file):
    return both(starter_file)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", STRINGS)
def test_starter_ids_are_llamacpps(starter, text, special):
    """Fifty strings, with and without matching of special tokens."""
    assert_same(*starter, text, special)


def random_text(rng: random.Random) -> str:
    """Stretches of letters, digits, marks, spaces and special tokens from everywhere in Unicode."""
    pools = [
        "abcdeABCDE", "0123456789", " \t\n\r\u00a0\u3000", "'sStTlLdD", ".,;:!?-/\\<|>[]{}()", "àéîõüß",
        "你好世界", "😀👍🏽\u200d", "\u0300\u0301\u0489", "٠१²Ⅷ", "_#@$%^&*+=~`\"",
        "".join(chr(rng.randrange(0x20, 0x2FFF)) for _ in range(8)),
    ]  # fmt: skip
    parts = [
        "".join(rng.choices(rng.choice(pools), k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 25))
    ]
    return "".join(parts + ["<|im_end|>"] * rng.randrange(2))


@pytest.mark.parametrize("special", [False, True])
def test_starter_ids_of_random_texts(starter, special):
    """Five hundred random texts."""
    rng = random.Random(11)
    for _ in range(500):
        assert_same(*starter, random_text(rng), special)


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_every_pretokenizer_cuts_as_llamacpp_does(starter_file, pre, tmp_path):
    """The starter's vocabulary under each pre-tokenizer name that we know, cut as llama.cpp cuts it."""
    keys = {k: v for k, v in read_gguf(starter_file).metadata.items() if k.startswith("tokenizer.")}
    keys = {k: u32(v) if type(v) is int else v for k, v in keys.items()}
    path = write_gguf(
        tmp_path / "v.gguf",
        vocab_only_keys(len(keys["tokenizer.ggml.tokens"])) | keys | {"tokenizer.ggml.pre": pre},
        {},
    )
    ours, oracle = both(path)
    rng = random.Random(5)
    for text in STRINGS + [random_text(rng) for _ in range(100)]:
        assert_same(ours, oracle, text, True)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("special", [False, True])
def test_sentencepiece_vocabulary(prefix, special, tmp_path):
    """A small SentencePiece vocabulary, with and without the space in front."""
    keys = gguf_spm_keys(prefix)
    path = write_gguf(tmp_path / "s.gguf", vocab_only_keys(len(keys["tokenizer.ggml.tokens"])) | keys, {})
    ours, oracle = both(path)
    rng = random.Random(6)
    for text in STRINGS + [random_text(rng) for _ in range(100)] + ["the end</s>and then <s>on"]:
        if text and not text.startswith("\x00"):
            assert_same(ours, oracle, text, special)


def test_bos_follows_the_file(starter, tmp_path):
    """add_bos_token false, true, or absent, where SentencePiece means yes."""
    assert starter[0].encode("a", add_bos=True) == starter[1].tokenize(b"a", add_bos=True)
    for said in (True, False, None):
        keys = gguf_spm_keys() | ({} if said is None else {"tokenizer.ggml.add_bos_token": said})
        path = write_gguf(tmp_path / f"{said}.gguf", vocab_only_keys(300) | keys, {})
        ours, oracle = both(path)
        assert ours.encode("the", add_bos=True) == oracle.tokenize(b"the", add_bos=True)
        assert (ours.encode("the", add_bos=True)[0] == 1) is (said is not False)


def test_pieces_are_llamacpps(starter):
    """token_bytes of every ordinary token equals llama.cpp's piece."""
    ours, oracle = starter
    for i in [*range(17, 400), *np.random.default_rng(0).integers(17, ours.vocab_size, 2000).tolist()]:
        if len(ours.token_bytes(i)) < 32:  # llama-cpp-python's buffer; longer pieces come back empty
            assert ours.token_bytes(i) == oracle.detokenize([i]), i

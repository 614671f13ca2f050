"""The table with which an encoder's GGUF file replaces characters: SentencePiece's own, and damaged ones."""

import io
import logging
import re
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import normalizers

from ruvmlx.errors import CorruptFile
from ruvmlx.models.load import load_model
from ruvmlx.models.text import tokenizer_encoder
from ruvmlx.models.text.characters_map import MOST_BYTES, fault_of_map

from . import encoder_models
from .encoder_models import EncoderShape, make_gguf_encoder
from .encoder_vocabularies import gguf_vocab


@pytest.fixture(scope="module")
def table():
    """The table of the rule nmt_nfkc, which XLM-R has, too."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words of a text"] * 50), model_writer=out, vocab_size=40,
        hard_vocab_limit=False, minloglevel=logging.ERROR,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(out.getvalue())
    return model.normalizer_spec.precompiled_charsmap


def test_the_table_of_sentencepiece_is_sound(table):
    assert fault_of_map(table) == ""
    assert normalizers.Precompiled(table).normalize_str("ﬁne ½") == "fine 1⁄2"


def trie_of(table):
    size = int.from_bytes(table[:4], "little")
    return table[: 4 + size], table[4 + size :]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda t: b"", "trie of 0 bytes"),
        (lambda t: b"\0\0\0\0abc", "trie of 0 bytes"),
        (lambda t: b"\xff\xff\xff\x7f" + b"a" * 100, "does not fit"),
        (lambda t: t[:1000], "does not fit"),
        (lambda t: trie_of(t)[0], "outside of the table"),
        (lambda t: trie_of(t)[0] + b"\xff" + trie_of(t)[1][1:], "not UTF-8"),
        (lambda t: trie_of(t)[0] + trie_of(t)[1] + b"a" * (MOST_BYTES + 1), "by more than"),
        (lambda t: t[:4] + b"\0\xfe\xff\x7f" * (len(trie_of(t)[0]) // 4 - 1) + b"a\0", "outside of the trie"),
        (lambda t: trie_of(t)[0] + "é".encode() * (len(trie_of(t)[1]) // 2 + 1), "by more than"),
    ],
)  # fmt: skip
def test_damaged_tables_are_refused(table, damage, fault):
    assert re.search(fault, fault_of_map(damage(table)))


def test_a_mutant_is_refused_or_works(table):
    """A panic of the library would write on the terminal."""
    program = """
import sys, random
from tokenizers import normalizers
from ruvmlx.models.text.characters_map import fault_of_map
table, worked = open(sys.argv[1], "rb").read(), 0
for seed in range(300):
    rng, changed = random.Random(seed), bytearray(table)
    for _ in range(rng.choice([1, 4, 50])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    if not fault_of_map(bytes(changed)):
        worked += 1
        every = "".join(map(chr, [*range(1, 0x3100), *range(0xFB00, 0xFFFE), *range(0x1F000, 0x1F300)]))
        normalizers.Precompiled(bytes(changed)).normalize_str(every)
print(worked)
"""
    with tempfile.NamedTemporaryFile() as file:
        file.write(table)
        file.flush()
        done = subprocess.run(
            [sys.executable, "-c", program, file.name], capture_output=True, text=True, check=True
        )
    assert done.stderr == "" and 10 < int(done.stdout) < 300


def test_an_encoder_with_a_damaged_table_is_one_line(tmp_path, monkeypatch, capfd, table):
    """And an encoder with a sound table reads texts with it."""
    keys = gguf_vocab(True)
    for data in (table, b"\0\0\0\0abc"):
        own = keys | {tokenizer_encoder.CHARS_MAP: np.frombuffer(data, np.uint8)}
        monkeypatch.setattr(encoder_models, "gguf_vocab", lambda unigram, own=own: own)
        path = make_gguf_encoder(tmp_path / f"{len(data)}.gguf", EncoderShape("xlm-roberta"))
        if data is table:
            model = load_model(str(path))
            assert model.tokenizer.encode("ｓｅａ") == model.tokenizer.encode("sea")
        else:
            with pytest.raises(CorruptFile, match=r"precompiled_charsmap is damaged[^\n]*$"):
                load_model(str(path)).tokenizer.encode("sea")
    assert capfd.readouterr().err == ""

"""This module makes the tokenizer of an encoder's GGUF file with the library `tokenizers`: WordPiece (BERT)
and Unigram (XLM-R).

llama.cpp's converter writes WordPiece tokens in another form: "▁hello" begins a word and "ing" continues one,
where Hugging Face writes "hello" and "##ing".
"""

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import CorruptFile
from ..files.error_text import library
from .characters_map import fault_of_map
from .tokenizer_base import BaseTokenizer
from .tokenizer_bpe import ids_of
from .tokenizer_json import SPACE, piece_text, word_text

if TYPE_CHECKING:
    from .gguf_vocab import GGUFVocab

WORD_PIECE, UNIGRAM = "bert", "t5"  # values of the key tokenizer.ggml.model
CONTINUES = "##"
CAPITAL = re.compile("[A-Z]")
MAX_WORD = 100  # a longer word becomes the unknown token, as in Hugging Face's BERT
CHARS_MAP = "tokenizer.ggml.precompiled_charsmap"


class GGUFEncoderTokenizer(BaseTokenizer):
    """The tokenizer of a GGUF file whose key `tokenizer.ggml.model` is "bert" or "t5"."""

    def __init__(self, vocab: "GGUFVocab"):
        kind = vocab.text("tokenizer.ggml.model")
        first = _id(vocab, ("[CLS]", "<s>"), ("cls", "bos"))
        last = _id(vocab, ("[SEP]", "</s>"), ("seperator", "eos"))  # GGUF spells the key so
        special = {**vocab.special_tokens, **_ids_by_text(vocab, first, last)}
        common = {"bos_id": first, "eos_id": last, "special_tokens": special, "strips_leading_space": True}
        super().__init__(**vocab.common(adds_bos=True) | common)
        self._is_word_piece, self._where = kind == WORD_PIECE, vocab.where
        self._pieces = _word_pieces(vocab) if self._is_word_piece else vocab.tokens
        with library(vocab.where):
            self._library = _word_piece(vocab, self._pieces) if self._is_word_piece else _unigram(vocab)

    def _encode_run(self, text: str, first: bool) -> list[int]:
        with library(self._where):
            return ids_of(self._library, text)

    def _piece_bytes(self, token_id: int) -> bytes:
        text = word_text if self._is_word_piece else piece_text
        return text(self._pieces[token_id])


def _id(vocab: "GGUFVocab", texts: tuple[str, ...], keys: tuple[str, ...]) -> int | None:
    """Return the id of the first of `texts` that is in the vocabulary, else the id that the first of `keys`
    names."""
    for text in texts:
        if text in vocab.tokens:
            return vocab.tokens.index(text)
    return next((found for found in map(vocab.token_id, keys) if found is not None), None)


def _ids_by_text(vocab: "GGUFVocab", *ids: int | None) -> dict[str, int]:
    return {vocab.tokens[i]: i for i in ids if i is not None}


def _word_pieces(vocab: "GGUFVocab") -> list[str]:
    """Return the vocabulary in Hugging Face's form."""
    return [_word_piece_of(token) for token in vocab.tokens]


def _word_piece_of(token: str) -> str:
    if token.startswith(SPACE):
        return token.removeprefix(SPACE)
    return token if token.startswith("[") and token.endswith("]") else f"{CONTINUES}{token}"


def _word_piece(vocab: "GGUFVocab", pieces: list[str]) -> Any:
    """Return BERT's tokenizer. A vocabulary without capital letters is that of a model that reads small
    letters without accents."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    unknown = _id(vocab, ("[UNK]",), ("unknown",))
    if unknown is None:
        raise CorruptFile(f"{vocab.where}: the vocabulary has no token for unknown words.")
    small = not any(CAPITAL.search(piece) for piece in pieces if not piece.startswith("["))
    ids = {piece: i for i, piece in reversed(list(enumerate(pieces)))}
    model = models.WordPiece(ids, unk_token=pieces[unknown], max_input_chars_per_word=MAX_WORD)
    found = Tokenizer(model)
    found.normalizer = normalizers.BertNormalizer(lowercase=small)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return found


def _unigram(vocab: "GGUFVocab") -> Any:
    """Return XLM-R's tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    unknown = _id(vocab, ("<unk>",), ("unknown",))
    scores = [float(score) for score in vocab.scores]
    # A space is in no piece of text, so these pieces cannot be typed.
    special = vocab.special_tokens
    pieces = [f" {i}" if token in special else token for i, token in enumerate(vocab.tokens)]
    found = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unknown, False))
    map_bytes = vocab.file.metadata.get(CHARS_MAP)
    if isinstance(map_bytes, np.ndarray) and map_bytes.itemsize == 1 and map_bytes.size:
        if fault := fault_of_map(map_bytes.tobytes()):
            raise CorruptFile(f"{vocab.where}: the table {CHARS_MAP} is damaged: {fault}.")
        found.normalizer = normalizers.Precompiled(map_bytes.tobytes())
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return found

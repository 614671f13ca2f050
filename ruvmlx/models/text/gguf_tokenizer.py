"""This module makes the tokenizer of a GGUF file: byte-level BPE, SentencePiece, WordPiece or Unigram, as the
file's key tokenizer.ggml.model says."""

from ...errors import UnsupportedModel
from ..files.gguf import GGUFFile
from .gguf_vocab import GGUFVocab
from .tokenizer_base import BaseTokenizer


def gguf_tokenizer(file: GGUFFile) -> BaseTokenizer:
    """Return the tokenizer of a GGUF file."""
    vocab = GGUFVocab(file)
    kind = vocab.text("tokenizer.ggml.model")
    if kind == "gpt2":
        from .tokenizer_bpe import GGUFByteLevelTokenizer

        return GGUFByteLevelTokenizer(vocab)
    if kind == "llama":
        from .tokenizer_spm import gguf_sentencepiece

        return gguf_sentencepiece(vocab)
    if kind in ("bert", "t5"):
        from .tokenizer_encoder import GGUFEncoderTokenizer

        return GGUFEncoderTokenizer(vocab)
    raise UnsupportedModel(
        f"{vocab.where}: tokenizer {kind[:40]!r}; 'gpt2' (byte-level BPE), 'llama' (SentencePiece), "
        "'bert' (WordPiece) and 't5' (Unigram) are known."
    )

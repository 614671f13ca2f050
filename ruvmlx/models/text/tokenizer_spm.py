"""This module makes SentencePiece tokenizers from a tokenizer.model, or from the tokens and scores of a GGUF
file.

A GGUF file has only tokens, scores and types. The function `model_proto` writes the tokens, scores and types
as the protocol buffer that the sentencepiece library reads. The protocol buffer needs these fields
(sentencepiece_model.proto):

    ModelProto       1: repeated SentencePiece   2: TrainerSpec   3: NormalizerSpec
    SentencePiece    1: string piece   2: float score   3: enum type (the same numbers as GGUF's)
    TrainerSpec      3: enum model_type (BPE = 2)   35: bool byte_fallback
    NormalizerSpec   3: bool add_dummy_prefix   4: bool remove_extra_whitespaces   5: bool escape_whitespaces
"""

import struct
from pathlib import Path
from typing import Any

from ...errors import CorruptFile
from ...platform.files import read_ordinary
from ..files.error_text import one_line
from ..files.json_files import MAX_BYTES
from .gguf_vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, GGUFVocab
from .tokenizer_base import BaseTokenizer

SPACE = "\u2581"  # the character that stands for a space in SentencePiece tokens


class SentencePieceTokenizer(BaseTokenizer):
    """A tokenizer that uses the sentencepiece library. processor: a SentencePieceProcessor of the library.
    added: {text: id} of the added tokens, which need not be in the processor's vocabulary."""

    def __init__(self, processor: Any, added: dict[str, int] | None = None, **common: Any):
        super().__init__(**common)
        self._sp = processor
        self._pieces = processor.vocab_size()
        self._added = {i: text for text, i in (added or {}).items()}

    def _encode_run(self, text: str, first: bool) -> list[int]:
        """Return the ids of a run of text. If the vocabulary puts a space before a text, the tokenizer puts a
        space also before a run after a special token, as llama.cpp does."""
        return self._sp.encode(text)

    def _piece_bytes(self, token_id: int) -> bytes:
        if token_id in self._added or token_id >= self._pieces:
            return self._added.get(token_id, "").encode()
        if self._sp.is_control(token_id) or self._sp.is_unknown(token_id):
            return b""
        piece = self._sp.id_to_piece(token_id)
        if self._sp.is_byte(token_id):
            return bytes([int(piece[3:5], 16)])  # the piece is the name of a byte, for example "<0x0A>"
        return piece.replace(SPACE, " ").encode()

    def as_proto(self) -> bytes:
        """Return the content of a tokenizer.model file for this tokenizer."""
        return self._sp.serialized_model_proto()


def gguf_sentencepiece(vocab: GGUFVocab) -> SentencePieceTokenizer:
    """Return the tokenizer of a GGUF file whose key `tokenizer.ggml.model` is "llama"."""
    prefix = vocab.flag("tokenizer.ggml.add_space_prefix", True)
    squeeze = vocab.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    processor = load_processor(model_proto(vocab, prefix, squeeze), vocab.where)
    return SentencePieceTokenizer(processor, **vocab.common(adds_bos=True, strips_leading_space=prefix))


def load_processor(proto: bytes, where: str) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(2)  # otherwise the library writes its warnings on the terminal
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=proto)
        # `id_to_piece` raises an error if the text of a token is not UTF-8
        processor.id_to_piece(list(range(processor.vocab_size())))
    except (RuntimeError, OSError, ValueError, TypeError) as error:
        raise CorruptFile(f"{where}: not a sound SentencePiece vocabulary: {one_line(error)}.") from None
    return processor


def model_proto(vocab: GGUFVocab, add_prefix: bool, squeeze: bool) -> bytes:
    """Return the bytes of a ModelProto of sentencepiece. add_prefix: True if the tokenizer puts a space
    before a text. squeeze: True if the tokenizer removes extra spaces."""
    types = vocab.types.tolist()
    _check_types(vocab, types)
    pieces = zip(vocab.tokens, vocab.scores.tolist(), types, strict=True)
    trainer = _varint_field(3, 2) + _varint_field(35, BYTE in types)
    normalizer = (
        _bytes_field(1, b"identity")
        + _varint_field(3, add_prefix)
        + _varint_field(4, squeeze)
        + _varint_field(5, True)
    )
    body = [_bytes_field(1, _piece(*piece)) for piece in pieces]
    return b"".join(body) + _bytes_field(2, trainer) + _bytes_field(3, normalizer)


def _check_types(vocab: GGUFVocab, types: list[int]) -> None:
    """Raise CorruptFile if a type is unknown, if there is not exactly one token of type UNKNOWN, or if a byte
    token has a wrong text; sentencepiece requires a vocabulary without these faults."""
    if types.count(UNKNOWN) != 1:
        raise CorruptFile(
            f"{vocab.where}: {types.count(UNKNOWN)} tokens are of type 'unknown'; one was expected."
        )
    for token, kind in zip(vocab.tokens, types, strict=True):
        if kind not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE):
            raise CorruptFile(f"{vocab.where}: token {token[:40]!r} has unknown type {kind}.")
        if kind == BYTE and token not in _BYTE_PIECES:
            raise CorruptFile(f"{vocab.where}: byte token {token[:40]!r} is not written as <0x00> to <0xFF>.")


_BYTE_PIECES = frozenset(f"<0x{i:02X}>" for i in range(256))


def _piece(text: str, score: float, kind: int) -> bytes:
    return _bytes_field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + _varint_field(3, kind)


def _varint(n: int) -> bytes:
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(int(value))


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _read(path: Path) -> bytes:
    try:
        return read_ordinary(path, MAX_BYTES)
    except OSError as error:
        raise CorruptFile(f"{path.name} cannot be read: {error.strerror}. Fetch the model again.") from None


def read_tokenizer_model(path: Path, common: dict[str, Any], added: dict[str, int]) -> SentencePieceTokenizer:
    """Read the tokenizer.model of a safetensors model. common: arguments of BaseTokenizer that the folder's
    other files give."""
    processor = load_processor(_read(path), path.name)
    special = {
        processor.id_to_piece(i): i
        for i in range(processor.vocab_size())
        if processor.is_control(i) or processor.is_unknown(i)
    }
    common["special_tokens"] = special | common.get("special_tokens", {})
    if common.get("bos_id") is None and processor.bos_id() >= 0:
        common["bos_id"] = processor.bos_id()
    if common.get("eos_id") is None and processor.eos_id() >= 0:
        common["eos_id"] = processor.eos_id()
    size = max([processor.vocab_size(), *(i + 1 for i in added.values())])
    prefix = processor.encode_as_pieces("a")[0].startswith(SPACE)
    return SentencePieceTokenizer(processor, added, vocab_size=size, strips_leading_space=prefix, **common)

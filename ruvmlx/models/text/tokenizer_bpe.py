"""This module makes a byte-level BPE tokenizer from a GGUF vocabulary. Hugging Face's library `tokenizers`
does the merges."""

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...errors import CorruptFile
from ..files.error_text import library
from .byte_level import byte_chars, piece_to_bytes
from .pretokenizers import ADDS_BOS, WHOLE_WORDS, patterns
from .tokenizer_base import BaseTokenizer

if TYPE_CHECKING:  # gguf_vocab imports NumPy, which the child process of the tokenizer does not need
    from .gguf_vocab import GGUFVocab

BRIEF = 2000  # characters; the library encodes a shorter text in less than about a millisecond


class GGUFByteLevelTokenizer(BaseTokenizer):
    """The tokenizer of a GGUF file whose key `tokenizer.ggml.model` is "gpt2"."""

    def __init__(self, vocab: "GGUFVocab"):
        pre = vocab.text("tokenizer.ggml.pre") or "default"
        super().__init__(**vocab.common(adds_bos=pre in ADDS_BOS))
        self._tokens = vocab.tokens
        self._added = vocab.user_defined
        self._added_ids = frozenset(self._added.values())
        self._bpe = _build(vocab, pre, self._added)

    def _encode_run(self, text: str, first: bool) -> list[int]:
        return ids_of(self._bpe, text)

    def _piece_bytes(self, token_id: int) -> bytes:
        piece = self._tokens[token_id]
        return piece.encode() if token_id in self._added_ids else piece_to_bytes(piece)

    def as_json(self) -> dict[str, Any]:
        """Return this tokenizer as the content of a Hugging Face tokenizer.json, with the special tokens at
        their ids."""
        out = json.loads(self._bpe.to_str())
        out["model"]["vocab"] |= self.special_tokens
        added = {i: _added_token(i, text, True) for text, i in self.special_tokens.items()}
        added |= {i: _added_token(i, text, False) for text, i in self._added.items()}
        out["added_tokens"] = [added[i] for i in sorted(added)]
        out["decoder"] = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        }
        if self.adds_bos:
            out["post_processor"] = _puts_in_front(self.bos_id, self._special_text(self.bos_id))
        return out


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids that a tokenizer of the `tokenizers` library gives for a text. While the library's
    `encode` runs, for seconds if the text is long, no other Python thread can run (it holds Python's global
    lock). `encode_batch` does not hold this lock."""
    if len(text) < BRIEF:
        return tokenizer.encode(text, add_special_tokens=False).ids
    [encoding] = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoding.ids


def _added_token(token_id: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special, **flags}


def _puts_in_front(token_id: int | None, text: str) -> dict[str, Any]:
    """Return a post-processor for tokenizer.json that puts one token before each text."""
    first, rest = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    more = [first, rest, {"Sequence": {"id": "B", "type_id": 1}}]
    known = {text: {"id": text, "ids": [token_id], "tokens": [text]}}
    return {"type": "TemplateProcessing", "single": [first, rest], "pair": more, "special_tokens": known}


def byte_level_bpe(
    ids: Mapping[str, int],
    merges: list[tuple[str, str]],
    cuts: Iterable[str],
    added: Iterable[str],
    where: str,
    whole_words: bool = False,
) -> Any:
    """Return a byte-level BPE tokenizer of the `tokenizers` library. Raises CorruptFile if the library does
    not accept the tokens, merges and patterns.

    ids: {token in the characters of byte_level.py: id}
    merges: the pairs of tokens to merge, in the order of their priority
    cuts: the patterns that split the text into pieces; each pattern splits the pieces of the pattern before
    added: texts that become tokens before the patterns split the text
    whole_words: True if a piece that is in the vocabulary becomes one token without merges
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

    with library(where):
        steps: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if missing := [c for c in byte_chars() if c not in ids]:
            # The tokenizer drops a byte that has no token, and does not merge the tokens before and after it.
            steps.append(pre_tokenizers.Split(Regex(_char_class(missing)), "removed"))
        tokenizer = Tokenizer(models.BPE(dict(ids), merges, ignore_merges=whole_words))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def _build(vocab: "GGUFVocab", pre: str, added: dict[str, int]) -> Any:
    # The BPE vocabulary has no special tokens, so a word that a user spells like a special token stays
    # ordinary text.
    ids = {token: i for i, token in enumerate(vocab.tokens) if token not in vocab.special_tokens}
    cuts = patterns(pre, vocab.where)
    return byte_level_bpe(ids, _merges(vocab), cuts, added, vocab.where, whole_words=pre in WHOLE_WORDS)


def _merges(vocab: "GGUFVocab") -> list[tuple[str, str]]:
    if "tokenizer.ggml.merges" not in vocab.file.metadata:
        raise CorruptFile(f"{vocab.where}: tokenizer.ggml.merges is missing. Fetch the model again.")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in vocab.strings("tokenizer.ggml.merges")]
    bad = next((i for i, pair in enumerate(pairs) if len(pair) != 2), None)
    if bad is not None:
        raise CorruptFile(f"{vocab.where}: merge {bad} of tokenizer.ggml.merges is not a pair.")
    return pairs


def _char_class(chars: list[str]) -> str:
    return "[" + "".join(f"\\x{{{ord(c):x}}}" for c in chars) + "]"

"""This module reads and checks the metadata keys that describe a GGUF file's tokenizer: tokens, types,
scores, special tokens."""

from functools import cached_property
from typing import Any

import numpy as np

from ...errors import CorruptFile
from ..files.gguf import GGUFFile
from .tokenizer_base import END_TOKENS, is_special

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class GGUFVocab:
    """The vocabulary in the metadata keys tokenizer.ggml.* of a GGUF file. The class checks the types of the
    keys' values. V: the number of tokens. tokens: the texts of the tokens, V in all. types: int [V]. scores:
    float32 [V]."""

    def __init__(self, file: GGUFFile):
        self.file, self.where = file, file.path.name
        self.tokens = self.strings("tokenizer.ggml.tokens")
        self.chat_template = self.text("tokenizer.chat_template") or None
        if not self.tokens:
            raise CorruptFile(f"{self.where}: the vocabulary (tokenizer.ggml.tokens) is empty or missing.")

    # Keys by type --------------------------------------------------------------------------------

    def _bad(self, key: str, expected: str) -> CorruptFile:
        return CorruptFile(f"{self.where}: key {key} is not {expected}.")

    def strings(self, key: str) -> list[str]:
        value = self.file.metadata.get(key, [])
        if not isinstance(value, list):
            raise self._bad(key, "a list of strings")
        return value

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key, "")
        if not isinstance(value, str):
            raise self._bad(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self._bad(key, "true or false")
        return value

    def _per_token(self, key: str, kinds: str) -> np.ndarray | None:
        """Return the key's array with one number for each token, or None if the file does not have the
        key."""
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, np.ndarray)
            or value.dtype.kind not in kinds
            or len(value) != len(self.tokens)
        ):
            raise self._bad(key, f"a list of {len(self.tokens)} numbers")
        return value

    def token_id(self, name: str) -> int | None:
        """Return `tokenizer.ggml.<name>_token_id`, or None if the file has no such token."""
        key = f"tokenizer.ggml.{name}_token_id"
        value: Any = self.file.metadata.get(key)
        if value is None:
            return None
        if isinstance(value, int) and value in (-1, 0xFFFFFFFF):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.tokens):
            raise self._bad(key, f"one of the {len(self.tokens)} tokens")
        return value

    # Derived facts ----------------------------------------------------------------------------------

    @cached_property
    def types(self) -> np.ndarray:
        """Return the type of each token (NORMAL, CONTROL, ...). A token of END_TOKENS, and a USER_DEFINED
        token that is special, get the type CONTROL. A thought tag with the type CONTROL gets the type
        USER_DEFINED."""
        stored = self._per_token("tokenizer.ggml.token_type", "iu")
        types = np.full(len(self.tokens), NORMAL) if stored is None else stored.astype(np.int64)
        for i in np.flatnonzero(types == USER_DEFINED):
            if is_special(self.tokens[i], False):
                types[i] = CONTROL
        for i in np.flatnonzero(types == CONTROL):
            if not is_special(self.tokens[i], True):
                types[i] = USER_DEFINED
        for place, token in enumerate(self.tokens):
            if token in END_TOKENS:
                types[place] = CONTROL
        return types

    @cached_property
    def scores(self) -> np.ndarray:
        scores = self._per_token("tokenizer.ggml.scores", "f")
        if scores is None or not np.isfinite(scores).all():
            raise self._bad("tokenizer.ggml.scores", f"a list of {len(self.tokens)} finite numbers")
        return scores.astype(np.float32)

    def _of_type(self, *kinds: int) -> dict[str, int]:
        return {self.tokens[i]: int(i) for i in np.flatnonzero(np.isin(self.types, kinds)) if self.tokens[i]}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        return self._of_type(CONTROL, UNKNOWN)

    @cached_property
    def user_defined(self) -> dict[str, int]:
        return self._of_type(USER_DEFINED)

    def common(self, *, adds_bos: bool, **more: Any) -> dict[str, Any]:
        """Return those arguments of BaseTokenizer that all GGUF tokenizers have.

        adds_bos: True if texts begin with BOS, for a file without the key add_bos_token

        The method ignores the key add_eos_token, because a model writes no reply after EOS.
        """
        ends = (self.token_id(name) for name in ("eot", "eom"))
        return {
            "vocab_size": len(self.tokens),
            "special_tokens": self.special_tokens,
            "bos_id": self.token_id("bos"),
            "adds_bos": self.flag("tokenizer.ggml.add_bos_token", adds_bos),
            "eos_id": self.token_id("eos"),
            "more_eos_ids": [i for i in ends if i is not None],
            "chat_template": self.chat_template,
            **more,
        }

"""This module has the base class of all tokenizers. The base class implements special tokens, BOS (the token
that begins a text), decoding and chats; the subclasses encode plain text.

A *special token* controls the model (<s>, <|im_end|>, [INST]...). Text becomes a special token only with
`special=True` or through the chat template; a user cannot type a special token. Added tokens that are no
special tokens (runs of spaces, <think>...) are found in any text, as in Hugging Face's tokenizers and
llama.cpp.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from ..config.model import Message, Tools
from .special_texts import SpecialTexts
from .token_cache import KnownRuns
from .typed_text import GUARD, THOUGHT_TAGS

# Each of these tokens ends a reply of a model whose vocabulary has the token, even if the model's files do
# not name it as an end token.
END_TOKENS = frozenset(
    str.split(
        "<|eot_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> <|eom_id|> <end_of_turn> <EOT> _<EOT> "
        "<|end_of_sentence|> <｜end▁of▁sentence｜>"
    )
)
# In a vocabulary with one of these tokens (gpt-oss, Solar Open), <|end|> ends only a part of a reply, for
# example the thought.
CALL_TOKENS = frozenset(("<|call|>", "<|calls|>"))
BRIEF = 64  # `_encode_bounded` first encodes text for about this number of tokens beyond the limit
LETTERS = 8  # ordinary text has on average at most this number of characters per token
LOOKS_SPECIAL = re.compile(r"<\|.*\|>|<｜.*｜>|\[/?[A-Z_]+\]|</?s>|<(start|end)_of_turn>", re.DOTALL)


def is_special(text: str, marked: bool) -> bool:
    """Return True if an added token is a special token. marked: True if the model's file marks the token as
    special."""
    if text in THOUGHT_TAGS or text in THOUGHT_TAGS.values():
        return False
    return marked or text in END_TOKENS or bool(LOOKS_SPECIAL.fullmatch(text))


class BaseTokenizer(ABC):
    """The base class of the tokenizers. A subclass implements the two methods `_encode_run` and
    `_piece_bytes`."""

    def __init__(
        self,
        *,
        vocab_size: int,
        special_tokens: Mapping[str, int],
        bos_id: int | None = None,
        adds_bos: bool = False,
        eos_id: int | None = None,
        more_eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        strips_leading_space: bool = False,
        trims_before: Iterable[str] = (),
        trims_after: Iterable[str] = (),
    ):
        """trims_before: the tokenizer removes the spaces and line ends before these special tokens.
        trims_after: the tokenizer removes the spaces and line ends after these special tokens."""
        self.vocab_size = vocab_size
        self.special_tokens: Mapping[str, int] = {text: i for text, i in special_tokens.items() if text}
        self.bos_id = bos_id
        self.adds_bos = adds_bos and bos_id is not None
        known_ends = END_TOKENS if CALL_TOKENS.isdisjoint(self.special_tokens) else END_TOKENS - {"<|end|>"}
        ends = {i for text, i in self.special_tokens.items() if text in known_ends}
        self.eos_id = eos_id  # the id of the token that templates get as the variable eos_token
        known = (i for i in more_eos_ids if 0 <= i < vocab_size)
        self.eos_ids = frozenset(ends.union(known, () if eos_id is None else (eos_id,)))
        self.chat_template = chat_template
        self.strips_leading_space = strips_leading_space
        self.trims_before, self.trims_after = frozenset(trims_before), frozenset(trims_after)
        self._special_ids = frozenset(self.special_tokens.values()) | self.eos_ids
        self.default_system: str | None = None
        self._bytes: dict[int, bytes] = {}

    # For subclasses ------------------------------------------------------------------------------

    @abstractmethod
    def _encode_run(self, text: str, first: bool) -> list[int]:
        """Return the ids of a run of text (a text, or the part of it between two special tokens), in which
        nothing becomes a special token. first: True if the run is the beginning of the whole text."""

    @abstractmethod
    def _piece_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token that is no special token."""

    # The protocol --------------------------------------------------------------------------------

    def encode(
        self, text: str, *, add_bos: bool = True, special: bool = False, most: int | None = None
    ) -> list[int]:
        """Return the token ids of a text. add_bos: True: put BOS (the token that begins a text) before the
        text if the model's setting `adds_bos` asks for it; False: do not. special: True if special tokens in
        the text become their ids. most: as in `encode_chat`."""
        if special:
            ids = self._encode_special(text, most=most)
        else:
            ids = self._encode_bounded(lambda text: self._encode_run(text, True), _clean(text), most)
        return self._with_bos(ids) if add_bos else ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to the text; b"" for a special token or an id without a
        token."""
        if token_id not in self._bytes:
            plain = 0 <= token_id < self.vocab_size and token_id not in self._special_ids
            self._bytes[token_id] = self._piece_bytes(token_id) if plain else b""
        return self._bytes[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; special tokens give no text. Invalid UTF-8 becomes U+FFFD."""
        data = b"".join(map(self.token_bytes, ids))
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def text_with_specials(self, ids: Sequence[int]) -> str:
        """Return the text of token ids with the strings of the special tokens."""
        names = {token_id: text.encode() for text, token_id in self.special_tokens.items()}
        return b"".join(names.get(i) or self.token_bytes(i) for i in ids).decode("utf-8", "replace")

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        tools: Tools = (),
        salt: str = "",
        most: int | None = None,
        opening: str = "",
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation. Only the chat template's own text gives special tokens;
        users' text does not. If the template writes BOS, the method does not add a second BOS.

        most: a limit of tokens. For a text of more tokens, the method can return only the ids of the text's
            beginning, but returns more than `most` ids.
        """
        has_system = any(message.role == "system" for message in messages)
        if self.default_system is not None and not (has_system or tools):
            messages = [Message("system", self.default_system), *messages]
        text = self._chat.render(messages, add_generation_prompt, thinking, tools, values)
        if opening:
            text = self._chat.begin_reply(text, opening)
        return self._with_bos(self._encode_special(text, salt, most))

    def chat_text(self, messages: Sequence[Message], *, tools: Tools = ()) -> str:
        """Return the text of the conversation as the chat template writes it, with the strings of special
        tokens."""
        return self._chat.render(messages, tools=tools).replace(GUARD, "")

    # Inside --------------------------------------------------------------------------------------

    @cached_property
    def _chat(self):
        from .chat_template import ChatTemplate

        names = self._special_text(self.bos_id), self._special_text(self.eos_id)
        return ChatTemplate(self.chat_template, self.special_tokens, *names, gap=self._gap())

    def _gap(self) -> str:
        """Return " " if the tokenizer puts a space before a whole text but not before a run of text after a
        special token; else ""."""
        if not self.strips_leading_space:
            return ""
        first, later = (
            b"".join(map(self.token_bytes, self._encode_run("a", is_first))) for is_first in (True, False)
        )
        return " " if first != later else ""

    def _special_text(self, token_id: int | None) -> str:
        """Return the string of a special token, or "" if the id is not a special token."""
        return next((text for text, i in self.special_tokens.items() if i == token_id), "")

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    @cached_property
    def _special_texts(self) -> SpecialTexts:
        return SpecialTexts(self.special_tokens)

    @cached_property
    def _runs(self) -> KnownRuns:
        return KnownRuns(self._encode_run)

    def forget_texts(self) -> None:
        """Drop the texts whose token ids are in memory."""
        vars(self).pop("_runs", None)

    def _encode_special(self, text: str, salt: str = "", most: int | None = None) -> list[int]:
        """Return the ids of a text in which the strings of special tokens become their ids. Before it encodes
        the text between the special tokens, the method removes the guard characters (U+FDD0) from this
        text."""
        text = _clean(text)
        parts = self._special_texts.split(text)
        ids: list[int] = []
        for i, part in enumerate(parts):
            if most is not None and len(ids) > most:
                return ids
            if i % 2:
                ids.append(self.special_tokens[part])
            elif run := self._trim(part.replace(GUARD, ""), parts[i - 1 : i], parts[i + 1 : i + 2]):
                begins, left = not ids, None if most is None else most - len(ids)
                ids += self._encode_bounded(partial(self._runs, first=begins, salt=salt), run, left)
        return ids

    def _trim(self, run: str, before: Sequence[str], after: Sequence[str]) -> str:
        """Return a run of text without the spaces that its neighbours remove. before, after: [the special
        token beside the run], or []."""
        run = run if self.trims_after.isdisjoint(before) else run.lstrip()
        return run if self.trims_before.isdisjoint(after) else run.rstrip()

    @staticmethod
    def _encode_bounded(encode: Callable[[str], Sequence[int]], run: str, most: int | None) -> list[int]:
        """Return the ids of a run of text. If the run has more than `most` tokens, the method can encode only
        the run's beginning, but returns more than `most` ids, because the beginning takes less time."""
        if most is not None and len(run) > (enough := LETTERS * (most + BRIEF)):
            begun = encode(run[:enough])
            if len(begun) > most:
                return list(begun)
        return list(encode(run))


def _clean(text: str) -> str:
    """Replace lone surrogates (undecodable bytes of a terminal) by "?", because tokenizers accept only
    UTF-8."""
    return text.encode("utf-8", "replace").decode() if _SURROGATE.search(text) else text


_SURROGATE = re.compile("[\ud800-\udfff]")

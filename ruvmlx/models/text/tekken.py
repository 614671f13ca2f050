"""This module reads Mistral's file tekken.json: a byte-level BPE vocabulary, its special tokens, and the
version of its chat form. The file has these fields:

    config           pattern, default_vocab_size, default_num_special_tokens, version ("v3", "v7", ...)
    vocab            rank, token_bytes (base64); the tokenizer uses only the first
                     default_vocab_size - default_num_special_tokens entries
    special_tokens   rank, token_str; old files do not have this field and use the tokens of _SPECIALS
    model_settings_builder   reasoning_effort: values, default; only in some files from v15 on

A special token's id is its rank. An ordinary token's id is its rank + default_num_special_tokens. The file
lists no merges. The tokenizer merges, at each step, the two neighbouring tokens that together form the token
with the lowest rank. In place of a list of merges, each split of a token into two tokens is a merge with the
token's rank. The tests compare the result with mistral-common's reader.
"""

import base64
from binascii import Error as NotBase64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, UnsupportedModel
from ..files.error_text import library, one_line
from ..files.json_fields import Fields
from ..files.json_files import read_object
from .byte_level import byte_chars, piece_to_bytes
from .mistral_template import EFFORTS, VERSIONS, Efforts, mistral_template
from .tokenizer_base import BaseTokenizer, is_special
from .tokenizer_bpe import byte_level_bpe, ids_of

_SPECIALS = str.split(
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
    "[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] [SYSTEM_PROMPT] "
    "[/SYSTEM_PROMPT] [TOOL_CONTENT]"
)
_MAX_TOKENS = 1 << 24  # the maximum number of tokens of a vocabulary


class TekkenTokenizer(BaseTokenizer):
    """The tokenizer of a model with a tekken.json."""

    def __init__(self, path: Path, template: str | None = None, eos_ids: Iterable[int] = ()):
        """template: the chat template of the model's folder; None: the chat form of the version that
        tekken.json names."""
        data = read_object(path, missing_ok=False)
        where = f"{path.parent.name}/{path.name}"
        config = Fields(Fields(data, where).table("config"), where)
        total, offset = _sizes(config)
        listed = _special_tokens(data, offset, where)
        special = {text: i for text, i in listed.items() if is_special(text, True)}
        super().__init__(
            vocab_size=total,
            special_tokens=special,
            bos_id=_special_id(special, "<s>", where),
            adds_bos=True,
            eos_id=_special_id(special, "</s>", where),
            more_eos_ids=eos_ids,
            chat_template=template or mistral_template(_version(config), _efforts(data, where)),
        )
        self._offset = offset
        self._added = {i: text for text, i in listed.items() if text not in special}
        self._pieces = _pieces(data.get("vocab"), total - offset, where)
        self._bpe = _build(self._pieces, offset, config, {text: i for i, text in self._added.items()})

    def _encode_run(self, text: str, first: bool) -> list[int]:
        with library("tekken.json"):
            return ids_of(self._bpe, text)

    def _piece_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        return piece_to_bytes(self._pieces[token_id - self._offset]) if token_id >= self._offset else b""


def _sizes(config: Fields) -> tuple[int, int]:
    """Return the number of all tokens, and how many of the ids (the lowest) are reserved for special
    tokens."""
    total, special = config.integer("default_vocab_size"), config.integer("default_num_special_tokens")
    if not 0 < special <= total - 256 <= _MAX_TOKENS:
        raise CorruptFile(
            f"{config.where}: {total} tokens, {special} of them special; 256 or more others were expected."
        )
    return total, special


def _version(config: Fields) -> int:
    said = config.data.get("version")
    version = next((v for v in VERSIONS if said == f"v{v}"), None)
    if version is None:
        known = ", ".join(f"v{v}" for v in VERSIONS)
        raise UnsupportedModel(
            f"{config.where}: version {one_line(said, 20)!r} of Mistral's chat form is not known; known are "
            f"{known}. Put the model's chat_template.jinja beside it."
        )
    return version


def _efforts(data: dict[str, Any], where: str) -> Efforts | None:
    table = Fields(Fields(data, where).table("model_settings_builder"), where).table("reasoning_effort")
    values, default = table.get("values"), table.get("default")
    if not table or values == []:
        return None
    if not isinstance(values, list) or default not in values or not all(v in EFFORTS for v in values):
        raise CorruptFile(
            f"{where}: reasoning_effort needs values out of {', '.join(EFFORTS)}, and a default."
        )
    return Efforts(tuple(values), str(default))


def _special_tokens(data: dict[str, Any], offset: int, where: str) -> dict[str, int]:
    """Return {text: id} of the special tokens that the file lists, or of _SPECIALS if it has no list."""
    entries = data.get("special_tokens")
    if entries is None:
        return {text: i for i, text in enumerate(_SPECIALS) if i < offset}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CorruptFile(f"{where}: special_tokens is not a list of objects.")
    found = {entry.get("token_str"): entry.get("rank") for entry in entries}
    sound = all(isinstance(text, str) and type(i) is int and 0 <= i < offset for text, i in found.items())
    if not sound or len(found) != len(entries) or len(set(found.values())) != len(entries):
        raise CorruptFile(f"{where}: special_tokens needs a text and a rank below {offset}, each only once.")
    return {str(text): int(i or 0) for text, i in found.items()}


def _special_id(special: dict[str, int], text: str, where: str) -> int:
    if text not in special:
        raise CorruptFile(f"{where}: the special token {text} is missing.")
    return special[text]


def _pieces(vocab: Any, count: int, where: str) -> list[str]:
    """Return the ordinary tokens in order of rank, written with the characters of byte_level.py."""
    if not isinstance(vocab, list) or len(vocab) < count:
        raise CorruptFile(f"{where}: vocab is not a list of {count} tokens or more.")
    chars = dict(enumerate(byte_chars()))
    try:
        data = [base64.b64decode(entry["token_bytes"], validate=True) for entry in vocab[:count]]
        in_order = all(entry["rank"] == rank for rank, entry in enumerate(vocab[:count]))
    except (KeyError, TypeError, ValueError, NotBase64):
        raise CorruptFile(f"{where}: vocab holds an entry without rank or base64 token_bytes.") from None
    if not in_order or data[:256] != [bytes([b]) for b in range(256)] or len(set(data)) != count:
        raise CorruptFile(f"{where}: vocab is not in order of rank: 256 bytes, then tokens, each only once.")
    return [token.decode("latin-1").translate(chars) for token in data]


def _build(pieces: list[str], offset: int, config: Fields, added: dict[str, int]) -> Any:
    pattern = config.data.get("pattern")
    if not isinstance(pattern, str):
        raise CorruptFile(f"{config.where}: config has no pattern.")
    ids = {piece: rank + offset for rank, piece in enumerate(pieces)}
    return byte_level_bpe(ids | added, _merges(pieces, ids), [pattern], added, config.where, whole_words=True)


def _merges(pieces: list[str], ids: dict[str, int]) -> list[tuple[str, str]]:
    """Return all splits of each token into two tokens, as merges in the order of rank. In a text, only one of
    a token's splits can occur, because the merges of lower rank have joined the token's bytes into just two
    tokens."""
    return [
        (piece[:k], piece[k:])
        for piece in pieces[256:]
        for k in range(1, len(piece))
        if piece[:k] in ids and piece[k:] in ids
    ]

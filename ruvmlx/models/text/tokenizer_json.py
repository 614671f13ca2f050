"""This module reads the tokenizer of a Hugging Face folder from tokenizer.json, else from tekken.json, else
from tokenizer.model.

The `tokenizers` library reads tokenizer.json. ruvmlx itself finds the special tokens in a text, if the caller
allows special tokens. The library encodes the text between the special tokens.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, UnsupportedModel
from ...platform.files import read_ordinary
from ..files.error_text import library
from ..files.json_files import read_object
from .byte_level import piece_to_bytes
from .chat_template import pick
from .tokenizer_base import BaseTokenizer, is_special
from .tokenizer_bpe import ids_of

SPACE = "\u2581"
MAX_TEMPLATE = 1 << 22  # the maximum size of chat_template.jinja in bytes


def folder_tokenizer(path: Path, eos: Iterable[Any] = ()) -> BaseTokenizer:
    """Return the tokenizer of a folder. eos: the values of eos_token_id in the folder's configuration files,
    each an id or a list of ids."""
    config = read_object(path / "tokenizer_config.json")
    template = _template(path, config)
    eos_ids = {i for entry in eos for i in token_ids(entry)}
    if (path / "tokenizer.json").is_file():
        return JsonTokenizer(path / "tokenizer.json", config, template, eos_ids)
    if (path / "tekken.json").is_file():
        from .tekken import TekkenTokenizer

        return TekkenTokenizer(path / "tekken.json", template, eos_ids)
    if (path / "tokenizer.model").is_file():
        return _sentencepiece(path, config, template, eos_ids)
    raise UnsupportedModel(
        f"{path.name} holds none of tokenizer.json, tekken.json and tokenizer.model. Fetch the model again."
    )


def token_ids(entry: Any) -> list[int]:
    """Return the ids in a value of eos_token_id. Parts of the value that are no ids are ignored, because the
    file was not checked before."""
    entries = entry if isinstance(entry, list) else [entry]
    return [i for i in entries if type(i) is int and i >= 0]


def _template(path: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template from chat_template.jinja, else from chat_template.json, else from
    tokenizer_config.json; None if there is none."""
    try:
        return read_ordinary(path / "chat_template.jinja", MAX_TEMPLATE).decode("utf-8")
    except FileNotFoundError:
        own = read_object(path / "chat_template.json").get("chat_template")
        found = own if own is not None else config.get("chat_template")
        return pick(found) if isinstance(found, str | list | dict) else None
    except (OSError, UnicodeDecodeError):
        raise CorruptFile(
            f"{path.name}: chat_template.jinja cannot be read. Fetch the model again."
        ) from None


def _token_name(config: dict[str, Any], key: str) -> str:
    """Return the text of the token that the field `key` of tokenizer_config.json names; "" if it names none.
    The value is "<s>" or {"content": "<s>", ...}."""
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


class JsonTokenizer(BaseTokenizer):
    """The tokenizer of a tokenizer.json file: byte-level BPE, a vocabulary in the style of SentencePiece, or
    WordPiece."""

    def __init__(self, path: Path, config: dict[str, Any], template: str | None, eos_ids: Iterable[int]):
        full = _read(path)
        added = full.get_added_tokens_decoder()
        special = {t.content: i for i, t in added.items() if is_special(t.content, t.special)}
        bos = special.get(_token_name(config, "bos_token"), _template_bos(full, special))
        self._full, self._steps = full, _Steps(full, path.name)
        super().__init__(
            vocab_size=1 + max([*added, full.get_vocab_size(with_added_tokens=True) - 1]),
            special_tokens=special,
            bos_id=bos,
            adds_bos=_adds_bos(full, config, bos),
            eos_id=special.get(_token_name(config, "eos_token"), _template_end(full, special)),
            more_eos_ids=eos_ids,
            chat_template=template,
            strips_leading_space=self._steps.prefixes_space or self._steps.word_pieces,
            trims_before=[t.content for t in added.values() if t.lstrip and t.content in special],
            trims_after=[t.content for t in added.values() if t.rstrip and t.content in special],
        )
        self._plain_added = {i: t.content for i, t in added.items() if t.content not in special}
        plain = [t for t in added.values() if t.content not in special]
        self._forbidden = frozenset(special.values()) - {_unknown_id(full.model, special)}
        self._first = self._steps.tokenizer(full, plain, first=True)
        self._later = self._steps.tokenizer(full, plain, first=False)

    def _encode_run(self, text: str, first: bool) -> list[int]:
        with library("tokenizer.json"):
            ids = ids_of(self._first if first else self._later, text)
        return ids if self._forbidden.isdisjoint(ids) else self._spelled_out(ids)

    def _spelled_out(self, ids: list[int]) -> list[int]:
        """Replace each special token in `ids` (except the unk_token) by the ids of its characters, because
        text that a user typed must not become a special token."""
        out: list[int] = []
        for i in ids:
            letters = self._special_text(i) if i in self._forbidden else None
            out += [j for c in letters for j in self._encode_run(c, False)] if letters else [i]
        return out

    def _piece_bytes(self, token_id: int) -> bytes:
        if token_id in self._plain_added:
            return self._plain_added[token_id].encode()
        piece = self._full.id_to_token(token_id) or ""
        if self._steps.word_pieces:
            return word_text(piece)
        return piece_to_bytes(piece) if self._steps.byte_level else piece_text(piece)


def _read(path: Path) -> Any:
    from tokenizers import Tokenizer

    with library(path.name):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template_bos(full: Any, special: dict[str, int]) -> int | None:
    """Return the id of the special token that the file's post-processor puts before a text, or None."""
    ids = full.encode("", add_special_tokens=True).ids
    return ids[0] if ids and ids[0] in special.values() else None


def _template_end(full: Any, special: dict[str, int]) -> int | None:
    """Return the id of the special token that the file's post-processor puts behind a text if it also puts
    one before it, or None."""
    ids = full.encode("", add_special_tokens=True).ids
    return ids[-1] if len(ids) > 1 and ids[-1] in special.values() else None


def _unknown_id(model: Any, special: dict[str, int]) -> int | None:
    """Return the id of the token for unknown text, or None if the model has none."""
    if type(model).__name__ == "Unigram":
        return json.loads(model.__getstate__()).get("unk_id")
    return special.get(getattr(model, "unk_token", None) or "")


def _adds_bos(full: Any, config: dict[str, Any], bos: int | None) -> bool:
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return bos is not None and full.encode("a", add_special_tokens=True).ids[:1] == [bos]


def word_text(piece: str) -> bytes:
    """Return the bytes of a WordPiece token: "##ing" gives b"ing", and "paris", which begins a word, gives
    b" paris"."""
    return (piece.removeprefix("##") if piece.startswith("##") else f" {piece}").encode()


def piece_text(piece: str) -> bytes:
    """Return the bytes of a SentencePiece token: "▁Paris" gives b" Paris", "<0x0A>" gives b"\\n"."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(SPACE, " ").encode()


class _Steps:
    """The normalizer and the pre-tokenizer (the two steps before the merges) of a tokenizer.json, and their
    properties that ruvmlx needs."""

    def __init__(self, full: Any, where: str):
        self._pre = _state(full.pre_tokenizer)
        self._normalizer = _state(full.normalizer)
        parts = {
            part.get("type"): part for state in (self._pre, _state(full.decoder)) for part in _flat(state)
        }
        self.byte_level = "ByteLevel" in parts
        self.word_pieces = type(full.model).__name__ == "WordPiece"
        metaspace = "Metaspace" in parts or "Replace" in parts or "ByteFallback" in parts
        if not (self.byte_level or metaspace or self.word_pieces):
            raise UnsupportedModel(
                f"{where}: neither byte-level nor SentencePiece-like nor WordPiece; no other kind is known."
            )
        self.prefixes_space = self._prefixes_space()

    def _prefixes_space(self) -> bool:
        """Return True if a step (Prepend, Metaspace or ByteLevel) puts a space before a text."""
        for part in [*_flat(self._pre), *_flat(self._normalizer)]:
            if part.get("prepend_scheme") in ("always", "first") or part.get("type") == "Prepend":
                return True
            if part.get("add_prefix_space") and "prepend_scheme" not in part:
                return True
        return False

    def tokenizer(self, full: Any, plain_added: list[Any], first: bool) -> Any:
        """Return a tokenizer of the library with the same vocabulary and steps as `full`, but without special
        tokens. first: True for a tokenizer that encodes the beginning of a text; False for the runs of text
        after a special token."""
        from tokenizers import Tokenizer

        out = Tokenizer(full.model)
        if self._normalizer:
            out.normalizer = full.normalizer
        if self._pre:
            out.pre_tokenizer = full.pre_tokenizer if first else self._inner_pre(full)
        out.add_tokens(plain_added)
        return out

    def _inner_pre(self, full: Any) -> Any:
        """Return the pre-tokenizer for runs of text after a special token: a Metaspace step with
        prepend_scheme "first" puts no space before these runs."""
        if not any(part.get("prepend_scheme") == "first" for part in _flat(self._pre)):
            return full.pre_tokenizer
        from tokenizers import Tokenizer

        changed = json.dumps(self._pre).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        shell = {"version": "1.0", "added_tokens": [], "model": empty, "pre_tokenizer": json.loads(changed)}
        return Tokenizer.from_str(json.dumps(shell)).pre_tokenizer


def _state(step: Any) -> dict[str, Any]:
    return json.loads(step.__getstate__()) if step is not None else {}


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the single steps inside a step of type Sequence. For a step of another type, return a list with
    the step itself."""
    inner = next((state[k] for k in ("pretokenizers", "normalizers", "decoders") if k in state), None)
    return [state] if inner is None else [part for step in inner for part in _flat(step)]


def _sentencepiece(
    path: Path, config: dict[str, Any], template: str | None, eos_ids: set[int]
) -> BaseTokenizer:
    """Return the tokenizer of tokenizer.model, with the added tokens in tokenizer_config.json and
    added_tokens.json."""
    from .tokenizer_spm import read_tokenizer_model

    added = _added_tokens(path, config)
    special = {text: i for text, (i, marked) in added.items() if is_special(text, marked)}
    adds = config.get("add_bos_token", True)
    common = {
        "special_tokens": special,
        "bos_id": special.get(_token_name(config, "bos_token")),
        "adds_bos": adds if isinstance(adds, bool) else True,
        "eos_id": special.get(_token_name(config, "eos_token")),
        "more_eos_ids": eos_ids,
        "chat_template": template,
    }
    return read_tokenizer_model(path / "tokenizer.model", common, {t: i for t, (i, _) in added.items()})


def _added_tokens(path: Path, config: dict[str, Any]) -> dict[str, tuple[int, bool]]:
    """Return {text: (id, True if the folder's files mark the token as special)} for the added tokens of a
    folder."""
    found = {
        t: (i, True) for t, i in read_object(path / "added_tokens.json").items() if type(i) is int and i >= 0
    }
    table = config.get("added_tokens_decoder")
    for key, entry in (table if isinstance(table, dict) else {}).items():
        if isinstance(entry, dict) and isinstance(entry.get("content"), str) and key.isdecimal():
            found[entry["content"]] = (int(key), entry.get("special") is not False)
    return found

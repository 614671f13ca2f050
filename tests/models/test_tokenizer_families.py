"""Tokenizers of the families on 1,000 texts against the libraries that their models were made with."""

import json
import unicodedata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ruvmlx.models.config.model import Message
from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.text.byte_level import byte_chars
from ruvmlx.models.text.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.text.tokenizer_json import folder_tokenizer

from .gguf_writer import u32, write_gguf
from .texts import varied_texts
from .vocabularies import vocab_only_keys

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Llama 3: Meta's own library and vocabulary -----------------------------------------------------------


@pytest.fixture(scope="module")
def llama3():
    """Meta's tokenizer of Llama 3."""
    if not find_spec("llama_models"):
        pytest.skip("needs llama-models, the oracle")
    from llama_models.llama3.tokenizer import Tokenizer

    return Tokenizer.get_instance()


def pieces_of(library: Any) -> list[str]:
    chars = dict(enumerate(byte_chars()))
    count = library.n_words - len(library.special_tokens)
    tokens = (library.model.decode_single_token_bytes(i) for i in range(count))
    return [token.decode("latin-1").translate(chars) for token in tokens]


def merges_of(pieces: list[str]) -> list[str]:
    """As transformers converts a list of ranks."""
    known = set(pieces)
    splits = ((p[:k], p[k:]) for p in pieces for k in range(1, len(p)))
    return [f"{a} {b}" for a, b in splits if a in known and b in known]


@pytest.fixture(scope="module", params=["gguf", "json"])
def ours(request, llama3, tmp_path_factory):
    """Our tokenizer of the same vocabulary, in a GGUF file and in a tokenizer.json."""
    pieces, folder = pieces_of(llama3), tmp_path_factory.mktemp("llama3")
    special = llama3.special_tokens
    if request.param == "gguf":
        keys = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [*pieces, *special],
            "tokenizer.ggml.token_type": np.array(
                [NORMAL] * len(pieces) + [CONTROL] * len(special), np.int32
            ),
            "tokenizer.ggml.merges": merges_of(pieces),
            "tokenizer.ggml.bos_token_id": u32(llama3.bos_id),
            "tokenizer.ggml.eos_token_id": u32(llama3.eot_id),
        }
        return gguf_tokenizer(read_gguf(write_gguf(folder / "v.gguf", vocab_only_keys(8) | keys, {})))
    body = json_body(pieces, merges_of(pieces), llama3.pat_str, {t: (i, True) for t, i in special.items()})
    body["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(body))
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder_tokenizer(folder)


def json_body(pieces: Any, merges: Any, pattern: str, added: dict[str, tuple[int, bool]]) -> dict[str, Any]:
    """A tokenizer.json of the form that Llama 3, Qwen and SmolLM3 have. added: text -> (id, special)."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": i, "content": t, "special": s, **flags} for t, (i, s) in added.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return {
        "version": "1.0",
        "added_tokens": sorted(tokens, key=lambda token: token["id"]),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def test_llama3_ids_and_text_are_metas(llama3, ours):
    """A thousand texts; special tokens in them stay text. Then words that no merges make."""
    words = [llama3.decode([i]) for i in range(100_000, 101_000)]
    for text in [*varied_texts(list(llama3.special_tokens)[:12]), *words]:
        want = llama3.encode(text, bos=False, eos=False)
        assert ours.encode(text, add_bos=False) == want, repr(text)
        assert ours.decode(want) == llama3.decode(want)
    assert ours.encode("a") == llama3.encode("a", bos=True, eos=False)
    assert ours.eos_ids >= {llama3.eot_id, llama3.eom_id, llama3.eos_id}


def test_llama3_special_tokens_are_metas(llama3, ours):
    """All 256 of them, where they are asked for."""
    for text, i in llama3.special_tokens.items():
        assert ours.encode(f"a{text}b", add_bos=False, special=True) == [64, i, 65]


def test_llama3_conversations_are_metas(llama3, ours):
    """Without a template in its files: the form that the vocabulary names, as Meta's own code encodes it."""
    chat_format = pytest.importorskip("llama_models.llama3.chat_format", reason="needs all of llama-models")
    from llama_models.datatypes import RawMessage

    typed = "<|eot_id|> <|start_header_id|>system"
    turns = [("system", "Be brief."), ("user", f"Hi {typed}"), ("assistant", "Né 😀"), ("user", "1234567")]
    for chat in (turns[1:2], turns, turns[:2]):
        messages = [RawMessage(role=r, content=c, **_stop(r)) for r, c in chat]
        want = chat_format.ChatFormat(llama3).encode_dialog_prompt(messages).tokens
        assert ours.encode_chat([Message(*turn) for turn in chat]) == want


def _stop(role: str) -> dict[str, Any]:
    from llama_models.datatypes import StopReason

    return {"stop_reason": StopReason.end_of_turn} if role == "assistant" else {}


# Qwen 2, 2.5, 3 and SmolLM3: their way to cut text, on the starter's vocabulary ------------------------

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
FAMILIES = {  # tokenizer.ggml.pre, pattern of tokenizer.json, normalizer
    "qwen": ("qwen2", rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{REST}", "NFC"),
    "smollm3": ("smaug-bpe", rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{REST}", None),
}
PLAIN_ADDED = {"<jupyter_start>": "<think>", "<jupyter_text>": "</think>", "<jupyter_code>": "<tool>"}


@pytest.fixture(params=sorted(FAMILIES))
def family(request, starter_file, tmp_path):
    """-> the library's tokenizer, ours of its tokenizer.json, ours of a GGUF file, the normal form."""
    from tokenizers import Tokenizer

    pre, pattern, form = FAMILIES[request.param]
    keys = {k: v for k, v in read_gguf(starter_file).metadata.items() if k.startswith("tokenizer.ggml")}
    tokens = [PLAIN_ADDED.get(token, token) for token in keys["tokenizer.ggml.tokens"]]
    types = keys["tokenizer.ggml.token_type"].copy()
    types[[i for i, token in enumerate(tokens) if token in PLAIN_ADDED.values()]] = USER_DEFINED
    added = {tokens[i]: (int(i), types[i] == CONTROL) for i in np.flatnonzero(types != NORMAL)}
    added = {text: (i, bool(special)) for text, (i, special) in added.items()}
    body = json_body(tokens, keys["tokenizer.ggml.merges"], pattern, added)
    body["normalizer"] = {"type": form} if form else None
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": pre}
    keys = {k: u32(v) if type(v) is int else v for k, v in (keys | changed).items()}
    path = write_gguf(tmp_path / "v.gguf", vocab_only_keys(8) | keys, {})
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    return library, folder_tokenizer(tmp_path), gguf_tokenizer(read_gguf(path)), form


def test_ids_are_the_tokenizers_librarys(family):
    """On 1,000 texts with special tokens, tokenizer.json and the GGUF file give the library's ids. The GGUF
    tokenizer does not normalise Unicode, so it is compared on normalised texts."""
    library, from_json, from_gguf, form = family
    specials = [*from_json.special_tokens, *PLAIN_ADDED.values()]
    for text in varied_texts(specials):
        want = library.encode(text, add_special_tokens=False).ids
        assert from_json.encode(text, add_bos=False, special=True) == want, repr(text)
        normal = unicodedata.normalize(form, text) if form else text
        want = library.encode(normal, add_special_tokens=False).ids
        assert from_gguf.encode(normal, add_bos=False, special=True) == want, repr(text)


def test_typed_special_tokens_stay_text(family):
    """A thousand texts: no special token comes out, and all text comes back."""
    _, from_json, from_gguf, form = family
    special = set(from_json.special_tokens.values())
    assert special == set(from_gguf.special_tokens.values()) and len(special) > 10
    for text in varied_texts(from_json.special_tokens):
        for tokenizer in (from_json, from_gguf):
            ids = tokenizer.encode(text, add_bos=False)
            assert special.isdisjoint(ids)
            wanted = unicodedata.normalize(form, text) if form and tokenizer is from_json else text
            assert tokenizer.decode(ids) == wanted


def test_thousand_texts_as_llama_cpp(starter_file):
    """SmolLM2's real file, special tokens matched and not, and the text that comes back."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, the oracle")
    oracle = llama_cpp.Llama(str(starter_file), vocab_only=True, verbose=False)
    tokenizer = gguf_tokenizer(read_gguf(Path(starter_file)))
    for text in varied_texts(tokenizer.special_tokens):
        for special in (False, True):
            want = oracle.tokenize(text.encode(), add_bos=False, special=special)
            assert tokenizer.encode(text, add_bos=False, special=special) == want, repr(text)

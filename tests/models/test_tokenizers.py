"""Tokenizers of every kind: round trips, special tokens, bytes for streaming, errors."""

import json

import numpy as np
import pytest

from ruvmlx.errors import CorruptFile, UnsupportedModel
from ruvmlx.models.files.gguf import read_gguf
from ruvmlx.models.load import load_model
from ruvmlx.models.text.byte_level import byte_chars, piece_to_bytes
from ruvmlx.models.text.gguf_tokenizer import gguf_tokenizer
from ruvmlx.models.text.tokenizer_json import folder_tokenizer

from .gguf_writer import write_gguf
from .make_models import make_safetensors_model
from .strings import STRINGS
from .vocabularies import gguf_spm_keys, gguf_vocab_keys, write_tokenizer


def gguf(tmp_path, **keys):
    path = tmp_path / "v.gguf"
    path.unlink(missing_ok=True)
    return gguf_tokenizer(read_gguf(write_gguf(path, {k: v for k, v in keys.items() if v is not None}, {})))


def spm_file(tmp_path):
    """A tokenizer.model trained on the spot."""
    import sentencepiece

    (tmp_path / "text.txt").write_text("\n".join(s for s in STRINGS if s.isprintable()) * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=700,
        model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        user_defined_symbols=["<tag>"], control_symbols=["[INST]"],
    )  # fmt: skip
    return tmp_path / "tokenizer.model"


def make(kind: str, tmp_path):
    if kind == "gguf byte-level":
        return gguf(tmp_path, **gguf_vocab_keys())
    if kind == "gguf sentencepiece":
        return gguf(tmp_path, **gguf_spm_keys())
    if kind == "tokenizer.json":
        write_tokenizer(tmp_path)
    else:
        spm_file(tmp_path)
    return folder_tokenizer(tmp_path)


KINDS = ["gguf byte-level", "gguf sentencepiece", "tokenizer.json", "tokenizer.model"]


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_and_bytes(kind, tmp_path):
    """decode(encode(x)) is x; the tokens' bytes, joined, are x's after the space the vocabulary adds."""
    tokenizer = make(kind, tmp_path)
    assert tokenizer.strips_leading_space is (kind in ("gguf sentencepiece", "tokenizer.model"))
    for text in STRINGS:
        if tokenizer.strips_leading_space:
            text = text.replace("▁", " ")  # SentencePiece writes spaces so: it cannot tell them apart
        ids = tokenizer.encode(text, add_bos=False)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert tokenizer.decode(ids) == text
        data = b"".join(map(tokenizer.token_bytes, ids))
        assert data == (b" " if tokenizer.strips_leading_space and text else b"") + text.encode()


@pytest.mark.parametrize("kind", KINDS)
def test_typed_special_tokens_stay_text(kind, tmp_path):
    """special=False never yields a special id, special=True yields each of them."""
    tokenizer = make(kind, tmp_path)
    specials = {t: i for t, i in tokenizer.special_tokens.items() if t != "<unk>"}
    assert len(specials) >= 2
    for text, i in specials.items():
        for typed in (text, f"a{text}b", text * 3, f" {text} "):
            ids = tokenizer.encode(typed, add_bos=False)
            assert not set(ids) & set(specials.values())
            assert tokenizer.decode(ids) == typed
            assert tokenizer.encode(typed, add_bos=False, special=True).count(i) == typed.count(text)
        assert tokenizer.token_bytes(i) == b""


@pytest.mark.parametrize("kind", KINDS)
def test_odd_input_becomes_replacement_characters(kind, tmp_path):
    """Lone surrogates become U+FFFD; ids outside the vocabulary and broken UTF-8 decode without an error."""
    tokenizer = make(kind, tmp_path)
    assert tokenizer.decode(tokenizer.encode("a\udcffb", add_bos=False)) == "a\ufffdb".replace("\ufffd", "?")
    assert tokenizer.decode([10**6, -1]) == ""
    cut = tokenizer.encode("é", add_bos=False)
    if kind != "tokenizer.model":
        assert tokenizer.decode(cut[:-1]).endswith("\ufffd")


def test_longest_special_wins(tmp_path):
    """A special token that begins with another one."""
    keys = gguf_vocab_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<|im_end|>>", "<|im"]
    keys["tokenizer.ggml.token_type"] = np.append(keys["tokenizer.ggml.token_type"], [3, 3]).astype(np.int32)
    tokenizer = gguf(tmp_path, **keys)
    last = len(keys["tokenizer.ggml.tokens"]) - 1
    got = tokenizer.encode("<|im_end|>><|im_end|><|im", add_bos=False, special=True)
    assert got == [last - 1, 2, last]


def test_plain_added_tokens_match_everywhere(tmp_path):
    """User-defined tokens are text: whole in any text, visible when decoded. Chat-like ones are special."""
    keys = gguf_vocab_keys()
    keys["tokenizer.ggml.tokens"] = [*keys["tokenizer.ggml.tokens"], "<think>", "<|eom|>"]
    keys["tokenizer.ggml.token_type"] = np.append(keys["tokenizer.ggml.token_type"], [4, 4]).astype(np.int32)
    tokenizer = gguf(tmp_path, **keys)
    think = len(keys["tokenizer.ggml.tokens"]) - 2
    ids = tokenizer.encode("a<think>b", add_bos=False)
    assert think in ids and tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.special_tokens["<|eom|>"] == think + 1
    assert think + 1 not in tokenizer.encode("<|eom|>", add_bos=False)


@pytest.mark.parametrize("source", ["gguf", "json"])
def test_a_word_spelled_like_a_special_token(source, tmp_path):
    """With ignore_merges a whole word of the vocabulary is taken as it is: not if it is special."""
    if source == "gguf":
        keys = gguf_vocab_keys() | {"tokenizer.ggml.pre": "llama-bpe"}
        keys["tokenizer.ggml.tokens"] = ["EOT", *keys["tokenizer.ggml.tokens"][1:]]
        tokenizer = gguf(tmp_path, **keys)
    else:
        write_tokenizer(tmp_path)
        data = json.loads((tmp_path / "tokenizer.json").read_text().replace("<|endoftext|>", "EOT"))
        data["model"]["ignore_merges"] = True
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.special_tokens["EOT"] == 0
    ids = tokenizer.encode("EOT", add_bos=False)
    assert 0 not in ids and tokenizer.decode(ids) == "EOT"


def test_missing_bytes_are_dropped(tmp_path):
    """A byte without a token leaves nothing, and nothing merges across the gap."""
    keys = gguf_vocab_keys()
    gap = byte_chars()[ord("#")]
    keys["tokenizer.ggml.tokens"] = ["unused" if t == gap else t for t in keys["tokenizer.ggml.tokens"]]
    tokenizer = gguf(tmp_path, **keys)
    assert tokenizer.encode("h#e", add_bos=False) == [tokenizer.encode(c, add_bos=False)[0] for c in "he"]
    assert len(tokenizer.encode("he", add_bos=False)) == 1


def test_eos_ids_come_from_everywhere(tmp_path):
    """generation_config's list, config.json's number, the tokenizer's eos_token and well-known end tokens."""
    folder = make_safetensors_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    tokenizer = load_model(str(folder)).tokenizer
    assert tokenizer.eos_ids == {0, 2, 7, 9}
    assert tokenizer.eos_id == 2


@pytest.mark.parametrize(("other", "ends"), [("<|user|>", True), ("<|call|>", False)])
def test_end_of_a_part_of_a_reply(other, ends, tmp_path):
    """<|end|> ends a reply of Phi-3, but in gpt-oss, which has <|call|>, only a part of a reply."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|end|>").replace("<|im_start|>", other))
    assert folder_tokenizer(tmp_path).eos_ids == ({0, 2} if ends else {0})


@pytest.mark.parametrize(
    ("change", "adds"),
    [({}, False), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False), ("post", True)],
)
def test_bos_of_a_folder(change, adds, tmp_path):
    """tokenizer_config.json decides; else whether tokenizer.json's own post-processor writes one."""
    write_tokenizer(tmp_path)
    if change == "post":
        piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        post = {
            "type": "TemplateProcessing",
            "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
        }
        post["special_tokens"] = {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        }
        post["pair"] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
        data = json.loads((tmp_path / "tokenizer.json").read_text()) | {"post_processor": post}
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    else:
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    tokenizer = folder_tokenizer(tmp_path)
    assert (tokenizer.encode("a")[0] == 0) is adds
    assert tokenizer.encode("a", add_bos=False)[0] != 0
    assert tokenizer.encode("<|endoftext|>a", special=True).count(0) == 1


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}


@pytest.mark.parametrize("style", ["metaspace", "prepend"])
def test_sentencepiece_like_json(style, tmp_path):
    """Llama-2's and Mistral's tokenizer.json: as the library itself encodes, also between special tokens."""
    from tokenizers import Tokenizer

    keys = gguf_spm_keys()
    pieces = keys["tokenizer.ggml.tokens"]
    merges = [[a, b] for p in pieces[259:270] for a, b in [(p[:-1], p[-1])] if a in pieces and b in pieces]
    model = {
        "type": "BPE",
        "vocab": {p: i for i, p in enumerate(pieces)},
        "merges": merges,
        "unk_token": "<unk>",
    }
    model |= {"byte_fallback": True, "fuse_unk": True}
    added = [
        {
            "id": i,
            "content": pieces[i],
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i in range(3)
    ]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    decoder = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    body = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    body |= {"pre_tokenizer": METASPACE} if style == "metaspace" else {"normalizer": normalizer}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    ours, theirs = folder_tokenizer(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.strips_leading_space
    for text in [*STRINGS, "the<s>and the</s> on", "<s>the"]:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_bos=False, special=True) == want, text
        if not text.startswith(" "):  # Metaspace puts no second space in front, and so loses the first
            assert ours.decode(ours.encode(text, add_bos=False)) == text.replace("▁", " ")


def test_special_tokens_that_trim_the_text_beside_them(tmp_path):
    """Phi-3's role tokens remove the line end after them: as the library itself encodes."""
    from tokenizers import Tokenizer

    folder = make_safetensors_model(tmp_path / "m")
    path = folder / "tokenizer.json"
    body = json.loads(path.read_text())
    for token, flag in zip(body["added_tokens"][1:], ("rstrip", "lstrip"), strict=True):
        token[flag] = True
    path.write_text(json.dumps(body))
    theirs = Tokenizer.from_file(str(path))
    for ours in (folder_tokenizer(folder), load_model(str(folder)).tokenizer):
        for text in ("<|im_start|>user\n the <|im_end|>\n<|im_start|>\n", " <|im_start|> <|im_end|> a", " a"):
            want = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, add_bos=False, special=True) == want, text


def test_added_tokens_beside_a_tokenizer_model(tmp_path):
    """Chat tokens that a fine-tune added after the SentencePiece vocabulary."""
    spm_file(tmp_path)
    added = {
        "700": {"content": "<|im_start|>", "special": True},
        "701": {"content": "<tool>", "special": False},
    }
    config = {"added_tokens_decoder": added, "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = folder_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 702
    assert tokenizer.encode("<|im_start|>hi", special=True)[:2] == [tokenizer.bos_id, 700]
    assert 700 not in tokenizer.encode("<|im_start|>hi")
    assert tokenizer.token_bytes(701) == b"<tool>"
    assert tokenizer.eos_id in tokenizer.eos_ids and tokenizer.decode([tokenizer.eos_id]) == ""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tokenizer.ggml.scores": None}, "tokenizer.ggml.scores"),
        ({"tokenizer.ggml.scores": np.full(297, np.nan, np.float32)}, "scores"),
        ({"tokenizer.ggml.token_type": np.ones(297, np.int32)}, "0 tokens are of type 'unknown'"),
        ({"tokenizer.ggml.token_type": np.full(297, 99, np.int32)}, "unknown"),
        ({"tokenizer.ggml.add_space_prefix": "yes"}, "true or false"),
        ({"tokenizer.ggml.tokens": ["a"] * 297}, "SentencePiece|byte token"),
    ],
)
def test_broken_sentencepiece_keys(keys, words, tmp_path):
    """What sentencepiece would refuse, and what it would not."""
    with pytest.raises(CorruptFile, match=words):
        gguf(tmp_path, **(gguf_spm_keys() | keys))


def test_the_library_writes_no_warning_on_the_terminal(tmp_path, capfd):
    """sentencepiece accepts a piece that is a null character, and has a warning for it."""
    keys = gguf_spm_keys()
    keys["tokenizer.ggml.tokens"][288] = "\0"
    gguf(tmp_path, **keys)
    assert capfd.readouterr().err == ""


def test_folder_without_a_known_tokenizer(tmp_path):
    """No file, a broken tokenizer.model, a tokenizer.json of another kind."""
    with pytest.raises(UnsupportedModel, match=r"none of tokenizer\.json, tekken\.json and tokenizer\.model"):
        folder_tokenizer(tmp_path)
    for junk in (b"\x0a\x03junk", spm_file(tmp_path).read_bytes().replace(b"<tag>", b"\xff\xfetag")):
        (tmp_path / "tokenizer.model").write_bytes(junk)
        with pytest.raises(CorruptFile, match=r"tokenizer\.model"):
            folder_tokenizer(tmp_path)
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    with pytest.raises(UnsupportedModel, match="neither byte-level"):
        folder_tokenizer(tmp_path)


def test_byte_characters_are_a_bijection():
    """256 different characters; each stands for its byte."""
    assert len(set(byte_chars())) == 256
    assert piece_to_bytes(byte_chars()) == bytes(range(256))
    assert piece_to_bytes("Ġ你") == b" " + "你".encode()

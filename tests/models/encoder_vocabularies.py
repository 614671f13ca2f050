"""Small vocabularies of encoders: WordPiece as BERT has it, Unigram as XLM-R has it; as tokenizer.json and as
GGUF keys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from .gguf_writer import u32

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["the", "sea", "wind", "and", "river", "sing", "hello"]
PIECES = [
    "[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS, *"0123456789.,!?'[]-",
    "##ing", "##er", *(f"##{letter}" for letter in LETTERS), "海",
]  # fmt: skip
SPACE = "\u2581"
UNIGRAM = [
    ("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0),
    *((f"{SPACE}{word}", -2.0 - i / 8) for i, word in enumerate(WORDS)), ("ing", -3.5), ("er", -3.6),
    (SPACE, -4.0), *((letter, -5.0 - i / 16) for i, letter in enumerate(LETTERS)), (".", -7.0), ("海", -8.0),
    ("<mask>", 0.0),
]  # fmt: skip


def tokens_of(unigram: bool) -> list[str]:
    return [piece for piece, _ in UNIGRAM] if unigram else PIECES


def write_encoder_tokenizer(folder: Path, unigram: bool) -> None:
    made = unigram_tokenizer() if unigram else word_piece_tokenizer()
    made.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "do_lower_case": True}
    if unigram:
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def word_piece_tokenizer(small: bool = True) -> Tokenizer:
    ids = {piece: i for i, piece in enumerate(PIECES)}
    made = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=small)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    pair = [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", pair)
    return made


def unigram_tokenizer() -> Tokenizer:
    made = Tokenizer(models.Unigram(UNIGRAM, 3, False))
    steps = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    pair = [("<s>", 0), ("</s>", 2)]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> </s> $B </s>", pair)
    return made


def gguf_vocab(unigram: bool) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes."""
    tokens = tokens_of(unigram)
    special = {"<s>", "<pad>", "</s>", "<mask>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"}
    unknown = {"<unk>", "[UNK]"}
    types = [3 if t in special else 2 if t in unknown else 1 for t in tokens]
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "t5" if unigram else "bert",
        "tokenizer.ggml.pre": "default" if unigram else "jina-v2-en",
        "tokenizer.ggml.tokens": tokens if unigram else [gguf_piece(token) for token in tokens],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(
            [s for _, s in UNIGRAM] if unigram else [0.0] * len(tokens), np.float32
        ),
        "tokenizer.ggml.unknown_token_id": u32(tokens.index("<unk>" if unigram else "[UNK]")),
        "tokenizer.ggml.padding_token_id": u32(tokens.index("<pad>" if unigram else "[PAD]")),
        "tokenizer.ggml.seperator_token_id": u32(tokens.index("</s>" if unigram else "[SEP]")),
        "tokenizer.ggml.cls_token_id": u32(tokens.index("<s>" if unigram else "[CLS]")),
        "tokenizer.ggml.bos_token_id": u32(tokens.index("<s>" if unigram else "[CLS]")),
    }
    if unigram:
        keys |= {"tokenizer.ggml.eos_token_id": u32(2)}
        keys |= {"tokenizer.ggml.add_space_prefix": True, "tokenizer.ggml.remove_extra_whitespaces": True}
        keys |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    return keys


def gguf_piece(token: str) -> str:
    """A WordPiece token as the converter writes it."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[2:] if token.startswith("##") else SPACE + token

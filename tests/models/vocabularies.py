"""This module writes small vocabularies: as the files of a tokenizer, and as the keys of a GGUF file."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from ruvmlx.models.text.byte_level import byte_chars

from .gguf_writer import f32, u32

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("a", "n"), ("an", "d"), ("Ġ", "Ġ"), ("o", "n")]
TOKENS = SPECIALS + list(byte_chars()) + ["".join(pair) for pair in MERGES]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer.json of 3 special tokens, 256 bytes and a few merges, with a ChatML template."""
    added = [
        {
            "id": i,
            "content": text,
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
        }
        for i, text in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE",
        "vocab": {t: i for i, t in enumerate(TOKENS)},
        "merges": [list(m) for m in MERGES],
    }
    body = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    body |= {"pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model}
    write_json(folder / "tokenizer.json", body)
    names = {"bos_token": SPECIALS[0], "eos_token": SPECIALS[2], "chat_template": CHAT_TEMPLATE}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def gguf_vocab_keys() -> dict[str, Any]:
    """The vocabulary of `write_tokenizer`, as GGUF keys."""
    types = np.array([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)), np.int32)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": u32(0),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def vocab_only_keys(size: int) -> dict[str, Any]:
    """The least that llama.cpp wants of a file without tensors."""
    return {
        "general.architecture": "llama",
        "llama.block_count": u32(1),
        "llama.context_length": u32(64),
        "llama.embedding_length": u32(32),
        "llama.feed_forward_length": u32(32),
        "llama.attention.head_count": u32(1),
        "llama.attention.layer_norm_rms_epsilon": f32(1e-5),
        "llama.vocab_size": u32(size),
    }


def gguf_spm_keys(add_space_prefix: bool = True) -> dict[str, Any]:
    """A tiny SentencePiece vocabulary: 3 control pieces, 256 bytes, letters, a few merged pieces."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    merged = ["\u2581t", "he", "\u2581the", "in", "an", "and", "\u2581\u2581", "on", "er", "th", "\u2581a"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *merged, *letters]
    types = np.array([2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(letters)), np.int32)
    scores = np.array([0.0] * 259 + [-float(i) for i in range(len(merged) + len(letters))], np.float32)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        "tokenizer.ggml.add_space_prefix": add_space_prefix,
    }

"""This module lists the regular expressions with which byte-level BPE tokenizers split text before the
merges.

The keys of PATTERNS are the values of GGUF's `tokenizer.ggml.pre`. Each value is a list of patterns. The
tokenizer applies the patterns one after the other, as llama.cpp does. Each match of a pattern becomes a piece
of text, and so does the text between two matches; merges happen only within a piece.
"""

from ...errors import UnsupportedModel

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"]
_DIGITS = [r"\p{N}", GPT2]

PATTERNS = {
    "default": _DEFAULT,
    "gpt-2": [GPT2],
    "mpt": [GPT2],
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "falcon3": [_LLAMA3],
    "pixtral": [_LLAMA3],
    "smaug-bpe": [_LLAMA3],  # SmolLM3
    "qwen2": [_QWEN2],
    "deepseek-r1-qwen": [_QWEN2],
    "stablelm2": [_QWEN2],
    "tekken": [_TEKKEN],
}
# The pre-tokenizers with which a piece of text that is a token of the vocabulary becomes this token, without
# merges.
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
# the pre-tokenizers with which a text begins with BOS if the file does not have the key add_bos_token
ADDS_BOS = WHOLE_WORDS


def patterns(pre: str, where: str) -> list[str]:
    """Return the patterns of a pre-tokenizer. Raises UnsupportedModel for an unknown pre-tokenizer, because a
    wrong guess would change token ids without an error."""
    if pre not in PATTERNS:
        raise UnsupportedModel(
            f"{where}: pre-tokenizer {pre[:40]!r} is not known; known are {', '.join(sorted(PATTERNS))}. "
            "Use the model's safetensors form with its tokenizer.json."
        )
    return PATTERNS[pre]

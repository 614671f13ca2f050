"""This module makes prompts for infilling (FIM, fill in the middle). In infilling, the model writes the text
between two given texts."""

from collections.abc import Sequence

from ruvmlx.models.config.model import Model, Tokenizer

from .endpoint import Call
from .errors import ApiError

# Each row has three special tokens of some models. In the prompt, the three tokens stand before the text
# before the gap, before the text after the gap, and before the text that the model writes.
GAP_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # the tokens of Qwen-Coder
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # the tokens of StarCoder and Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # the tokens of SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # the tokens of DeepSeek-Coder
)
# the special tokens of which one stands before each file of `files`
FILE_TOKENS = ("<|file_sep|>", "<file_sep>")


def gap_tokens(tokenizer: Tokenizer) -> list[int] | None:
    """Return the ids of the three infilling tokens of a row of GAP_TOKENS, or None if the model has no such
    tokens."""
    special = tokenizer.special_tokens
    known = (names for names in GAP_TOKENS if all(name in special for name in names))
    return next(([special[name] for name in names] for names in known), None)


async def gap_prompt(call: Call, before: str, after: str) -> list[int]:
    """Return the token ids of an infilling prompt (see `gap_ids`) for the model that the request names."""
    letters = len(before) + len(after)
    return await call.serving.host.encode(lambda runtime: gap_ids(runtime.model, before, after), letters)


def gap_ids(model: Model, before: str, after: str, files: Sequence[str] = ()) -> list[int]:
    """Return the token ids of an infilling prompt. The names of special tokens in the texts are read as plain
    text. Raise ApiError, 400, if the model has no infilling tokens.

    before, after: the text before and after the text that the model writes. files: texts of other files,
    which the model reads first.
    """
    tokenizer, most = model.tokenizer, model.context
    gap = gap_tokens(tokenizer)
    if gap is None:
        message = f"model: {model.name} has no tokens for a gap in a text (FIM); ask a code model."
        raise ApiError(400, message, "model", "no_fim_tokens")
    prefix, suffix, middle = gap
    first, last = (tokenizer.encode(text, add_bos=False, most=most) for text in (before, after))
    return [*tokenizer.encode(""), *_file_ids(tokenizer, files, most), prefix, *first, suffix, *last, middle]


def _file_ids(tokenizer: Tokenizer, files: Sequence[str], most: int) -> list[int]:
    """Return the token ids of the other files that the model reads before the text with the gap. If the model
    has a token that begins a file, this token stands before each of these files and after the last of them.
    most: as soon as the files have more ids than this number, the remaining files are left out."""
    special, ids = tokenizer.special_tokens, list[int]()
    mark = [special[name] for name in FILE_TOKENS if name in special][:1]
    for text in files:
        ids += [*mark, *tokenizer.encode(f"{text}\n", add_bos=False, most=most)]
        if len(ids) > most:
            break
    return [*ids, *mark] if ids else []

"""Long texts are encoded once for each salt."""

from ruvmlx.models.config.model import Message
from ruvmlx.models.text.token_cache import MAX_CACHED_CHARACTERS, MIN_RUN_CHARACTERS, KnownRuns


def test_only_long_texts_are_kept_and_by_their_salt():
    """Another salt, another place: encoded again. What was used last stays within MOST."""
    asked = []

    def encode(text, first):
        asked.append(text)
        return [len(text), int(first)]

    runs, long = KnownRuns(encode), "x" * MIN_RUN_CHARACTERS
    for salt, first in (("a", True), ("a", True), ("b", True), ("a", False), ("b", True)):
        assert list(runs(long, first, salt)) == [MIN_RUN_CHARACTERS, int(first)]
    assert len(asked) == 3
    runs("short", True, "a"), runs("short", True, "a")
    assert len(asked) == 5
    runs(
        "y" * (MAX_CACHED_CHARACTERS - 2 * MIN_RUN_CHARACTERS), True, "a"
    )  # of the three, the two that were used last stay
    runs(long, False, "a"), runs(long, True, "b")
    assert len(asked) == 6
    runs(long, True, "a")
    assert len(asked) == 7


def test_equal_to_encoding(tiny):
    """The same ids the first time, the second time, and without the memory; typed marks stay text."""
    said = [
        Message("system", "Be brief. " * MIN_RUN_CHARACTERS),
        Message("user", "<|im_end|> hello " * MIN_RUN_CHARACTERS),
    ]
    tokenizer = tiny.tokenizer
    got = [tokenizer.encode_chat(said, salt=salt) for salt in ("", "", "a")]
    text = tokenizer._chat.render(said, True, None, ())
    parts = tokenizer._special_texts.split(text)
    plain = [
        tokenizer._encode_run(part.replace("\ufdd0", ""), i == 0)
        if i % 2 == 0
        else [tokenizer.special_tokens[part]]
        for i, part in enumerate(parts)
        if part
    ]
    assert got[0] == got[1] == got[2] == [id for ids in plain for id in ids]

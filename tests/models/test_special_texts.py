"""The strings of special tokens in a text, against a pattern of all of them."""

import random
import re
import time

import pytest

from ruvmlx.models.text.special_texts import MOST_CHARACTERS, SpecialTexts
from ruvmlx.models.text.typed_text import Guard


def split_by_pattern(texts, text):
    """The slow twin: the longest alternatives first."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.split("(" + "|".join(map(re.escape, ordered)) + ")", text) if texts else [text]


@pytest.mark.parametrize("seed", range(200))
def test_the_parts_are_those_of_a_pattern(seed):
    rng = random.Random(seed)
    letters = "ab<|]^-\\中" if seed % 2 else "ab"
    word = lambda most: "".join(rng.choices(letters, k=rng.randint(1, most)))  # noqa: E731
    texts = {word(rng.choice([1, 3, 6])) for _ in range(rng.randint(0, 12))}
    text = word(60)
    found = SpecialTexts(texts)
    assert found.split(text) == split_by_pattern(texts, text)
    assert found.occur_in(text) == any(each in text for each in texts)


def test_very_long_strings_are_not_found():
    texts = SpecialTexts(["a" * MOST_CHARACTERS, "b" * (MOST_CHARACTERS + 1), ""])
    assert texts.occur_in("a" * MOST_CHARACTERS) and not texts.occur_in("b" * 1000)


def test_many_special_tokens_cost_a_text_no_more():
    """Each word of the text begins like tens of thousands of special tokens."""
    many = [f"e{i}" for i in range(60_000)]
    text, few = "e x " * 20_000, SpecialTexts(["<s>", "e1"])
    small = processor_time(lambda: few.split(text))
    assert processor_time(lambda: SpecialTexts(many).split(text)) < 50 * small + 2
    guard, names = Guard(many), [f"xe{'y' * 8}{i}" for i in range(3000)]
    assert processor_time(lambda: guard.inside(names)) < 2


def processor_time(work):
    begun = time.process_time()
    work()
    return time.process_time() - begun

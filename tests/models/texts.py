"""A thousand texts for comparing tokenizers: languages, code, digits, emoji, space, control characters."""

import random
from collections.abc import Iterable

from .strings import STRINGS

_POOLS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJabcdefghij", "0123456789", " ", " \t\n\r",
    "\u00a0\u2003\u3000\u0085\x0b",
    "'sStTlLdDmMrReEvV", ".,;:!?-/\\<|>[]{}()", "_#@$%^&*+=~`\"", "àéîõüßÅøæñ", "абвгдежзийклмн", "αβγδεζηθ",
    "你好世界今天天气", "あいうえおカキクケコ", "한국어세계안녕",
    "اهلاوسهلا", "שלוםעולם", "नमस्तेदुनिया", "สวัสดีชาวโลก",
    "😀👍🏽\u200d❤\ufe0f👩🇫🇷", "\u0300\u0301\u0489\u20dd", "٠١²Ⅷ①½",
    "\x00\x01\x1b\x7f\x80\x9f\ufeff\u200b", "İıſǅﬁ",
]  # fmt: skip
_PIECES = [
    "def f(x):\n    return x\n", "for (int i = 0; ", "    if (a != b) {\n\t\t", "</div>\n", "https://a.b/c?d=%20",
    "\n\n",
    "x = 3.14159e-10;", "I'm", "DON'T", "  \n   ", "\r\n", " the", " of", " and", "The", "ing ", "1234567",
    " 0x1F",
    "SELECT * FROM ", "// ...", "===", "->", "\u3000", "　\n", "ß", "Straße", " naïve", "\t\t\t",
]  # fmt: skip


def varied_texts(specials: Iterable[str] = (), count: int = 1000, seed: int = 7) -> list[str]:
    """STRINGS and random texts of up to 40 parts; specials: strings of special tokens, put in between."""
    rng = random.Random(seed)
    named = sorted(text for text in specials if text)
    return [*STRINGS, *(_text(rng, named) for _ in range(count - len(STRINGS)))]


def _text(rng: random.Random, specials: list[str]) -> str:
    return "".join(_part(rng, specials) for _ in range(rng.choice([2, 8, 40])))


def _part(rng: random.Random, specials: list[str]) -> str:
    kind = rng.random()
    if kind < 0.55:
        return "".join(rng.choices(rng.choice(_POOLS), k=rng.randrange(1, 9)))
    if kind < 0.75:
        return rng.choice(_PIECES)
    if kind < 0.87:
        words = rng.choice(STRINGS).split(" ")
        start = rng.randrange(len(words))
        return " " + " ".join(words[start : start + 4])
    if kind < 0.95 or not specials:
        return "".join(chr(_code_point(rng)) for _ in range(3))
    return rng.choice(specials)


def _code_point(rng: random.Random) -> int:
    """Of any plane, no surrogate, no U+FDD0, which the tokenizers keep for themselves."""
    return rng.choice(
        [rng.randrange(1, 0x3000), rng.randrange(0x3000, 0xD800), rng.randrange(0xFE00, 0x30000)]
    )

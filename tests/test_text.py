"""The sanitiser: words stay, controls go, however the stream is cut."""

import random
import re
import unicodedata

import pytest

from ruvmlx.text import Sanitizer, did_you_mean_model, one_line, sanitize

ESC, BEL, CSI8, ST8 = "\x1b", "\x07", "\x9b", "\x9c"

CASES = {
    "plain": ("Hello, world.\n\tTab stays.", "Hello, world.\n\tTab stays."),
    "colour": (f"{ESC}[1;31mred{ESC}[0m", "red"),
    "8-bit csi": (f"{CSI8}31mred", "red"),
    "clipboard": (f"a{ESC}]52;c;cm0gLXJm{BEL}b", "ab"),
    "title, ended by ST": (f"a{ESC}]0;pwned{ESC}\\b", "ab"),
    "8-bit osc": (f"a\x9d0;pwned{ST8}b", "ab"),
    "device control": (f"a{ESC}Pq#0;2;0{ESC}\\b", "ab"),
    "charset": (f"a{ESC}(0b", "ab"),
    "reset": (f"a{ESC}cb", "ab"),
    "unfinished string ends with its line": (f"a{ESC}]0;oops\nb", "a\nb"),
    "string broken by a sequence": (f"a{ESC}]0;x{ESC}[31mb", "ab"),
    "sequence broken by a newline": (f"a{ESC}[31\nb", "a\nb"),
    "sequence broken by a letter beyond ASCII": (f"a{ESC}[3éb", "aéb"),
    "backspaces": ("safe\b\b\b\bevil", "safeevil"),
    "crlf": ("a\r\nb\rc\n\rd", "a\nb\nc\n\nd"),
    "line separators": ("a\u2028b\u2029c", "a\nb\nc"),
    "direction": ("if (admin\u202e)\u2066 x\u2069", "if (admin) x"),
    "zero width": ("pass\u200bword\ufeff\u2060", "password"),
    "tags": ("hi\U000e0041\U000e0042", "hi"),
    "surrogate": ("a\ud83db", "ab"),
    "noncharacters": ("a\ufdd0\uffff\U0010fffeb", "ab"),
    "emoji": ("👩‍👩‍👧 ❤️ 👍🏽 🇫🇷", "👩‍👩‍👧 ❤️ 👍🏽 🇫🇷"),
    "scripts": ("می‌خواهم · 日本語 · Ελληνικά", "می‌خواهم · 日本語 · Ελληνικά"),
}


@pytest.mark.parametrize("name", CASES)
def test_known_texts_become_exactly_what_is_named(name):
    """Each kind of hostile or innocent text gives exactly what is named."""
    raw, safe = CASES[name]
    assert sanitize(raw) == safe


@pytest.mark.parametrize("name", CASES)
def test_any_two_pieces_give_the_same(name):
    """A sequence that is split over two chunks is caught as well."""
    raw, safe = CASES[name]
    for cut in range(len(raw) + 1):
        stream = Sanitizer()
        assert stream.feed(raw[:cut]) + stream.feed(raw[cut:]) == safe


ALPHABET = [*"ab[]0;?mc(\\^_PX \n\r\t", ESC, ESC, BEL, CSI8, ST8, "\x9d", "\x00", "\x7f", "\u202e", "\u200b"]
ALPHABET += ["é", "👍", "\u200d", "\ud800", "\uffff", "\U000e0041", "\u2028", "\x85"]


def random_text(rng, length):
    letters = (rng.choice(ALPHABET) for _ in range(length))
    return "".join(chr(rng.randrange(0x110000)) if rng.random() < 0.1 else letter for letter in letters)


def is_safe(text):
    kept = "\n\t\u200c\u200d"
    return not [
        c for c in text if c not in kept and unicodedata.category(c) in ("Cc", "Cs")
    ] and not re.search("[\u202a-\u202e\u2066-\u2069\u200b\u2028\u2029\ufdd0-\ufdef\ufffe\uffff]", text)


@pytest.mark.parametrize("seed", range(200))
def test_nothing_unsafe_goes_out_whatever_comes_in(seed):
    """Whatever comes in: nothing unsafe goes out, cuts do not matter, and a second pass changes nothing."""
    rng = random.Random(seed)
    text = random_text(rng, rng.randrange(400))
    safe = sanitize(text)
    assert is_safe(safe)
    assert sanitize(safe) == safe
    stream, rest, out = Sanitizer(), text, ""
    while rest:
        cut = rng.randrange(1, 9)
        out, rest = out + stream.feed(rest[:cut]), rest[cut:]
    assert out == safe


@pytest.mark.parametrize("opener", [f"{ESC}]", f"{ESC}[", f"{ESC}P", f"{ESC}", CSI8])
def test_an_unfinished_sequence_cannot_swallow_a_reply(opener):
    """A reply after an opener that never ends is shown at the latest after 4,096 characters."""
    assert sanitize(opener + "0" * 5000 + " the answer").endswith("the answer")


def test_titles_and_errors_stay_on_one_line():
    """Titles and errors stay on their line."""
    assert one_line(f"a\n b{ESC}[2J\r\n\tc") == "a b c"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen", "qwen2.5-0.5b-instruct-q4_k_m"),
        ("Qwen2.5", "qwen2.5-0.5b-instruct-q4_k_m"),
        ("smollm", "smollm2"),
        ("0.5b", "qwen2.5-0.5b-instruct-q4_k_m"),
        ("startr", "starter"),
        ("qw", None),
        ("llama", None),
        ("", None),
    ],
)
def test_a_part_of_a_models_name_brings_the_name(name, meant):
    """Names of models are long, so the names that users type are often a part of one."""
    known = ["starter", "smollm2", "SmolLM2-135M-Instruct.Q4_1", "qwen2.5-0.5b-instruct-q4_k_m"]
    assert did_you_mean_model(name, known) == (f" Did you mean {meant!r}?" if meant else "")

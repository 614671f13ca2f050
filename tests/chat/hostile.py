"""Hostile texts with marks in their control sequences, and a strict check of what a terminal received.

A mark is a word, or a number of six digits, that only a hostile text contains. It may arrive as plain text,
but never within an escape sequence.
"""

import random
import re
import unicodedata

ESC, BEL, ST = "\x1b", "\x07", "\x1b\\"
LONG = 100_000  # characters of the longest texts
ROW, COLUMN = 120, 200  # beyond every terminal of the tests


def word(n: int) -> str:
    """The mark of text n."""
    return f"Zq{n:05d}qZ"


def number(n: int) -> str:
    return f"9{n:05d}"


SEQUENCES = [
    # Sequences that a terminal acts on: clipboard, links, titles, colours, notifications, files
    lambda m, n: f"{ESC}]52;c;{m}{BEL}",
    lambda m, n: f"{ESC}]52;p;{m}{ST}",
    lambda m, n: f"{ESC}]8;;https://{m}.org/{ST}link{ESC}]8;;{ST}",
    lambda m, n: f"{ESC}]8;id={m};file:///etc/passwd{BEL}link{ESC}]8;;{BEL}",
    lambda m, n: f"{ESC}]0;{m}{BEL}",
    lambda m, n: f"{ESC}]2;{m}{ST}",
    lambda m, n: f"{ESC}]4;{n};rgb:00/00/00{BEL}",
    lambda m, n: f"{ESC}]9;{m}{BEL}{ESC}]777;notify;{m};{m}{BEL}",
    lambda m, n: f"{ESC}]1337;File=name={m};inline=1:AAAA{BEL}",
    lambda m, n: f"{ESC}]22;{m}{ST}",
    # Cursor, screen, modes, reports, keyboard
    lambda m, n: f"{ESC}[{n};{n}H{ESC}[{n}A{ESC}[{n}G",
    lambda m, n: f"{ESC}[2J{ESC}[3J{ESC}[{n}J",
    lambda m, n: f"{ESC}[38;5;{n}m{ESC}[{n};5;7m",
    lambda m, n: f"{ESC}[38;2;{n};0;0m",
    lambda m, n: f"{ESC}[?{n}h{ESC}[?1049l{ESC}[?1000h{ESC}[?2004l{ESC}[?25l",
    lambda m, n: f"{ESC}[6n{ESC}[>q{ESC}[c{ESC}[{n}n{ESC}[?{n}$p",
    lambda m, n: f"{ESC}[>{n}u{ESC}[{n}t{ESC}[{n};{n}r{ESC}[{n} q",
    lambda m, n: f"{ESC}[{n}@{ESC}[{n}L{ESC}[{n}X{ESC}[{n}b",
    # Strings for devices and programs, and unknown ones
    lambda m, n: f"{ESC}P{n}q#0;2;{m}{ST}",
    lambda m, n: f"{ESC}P$q{m}{ST}{ESC}P+q{m}{ST}",
    lambda m, n: f"{ESC}_G{m};AAAA{ST}",
    lambda m, n: f"{ESC}^{m}{ST}{ESC}X{m}{ST}",
    lambda m, n: f"{ESC}Ptmux;{ESC}{ESC}]52;c;{m}{BEL}{ST}",
    # Single control characters, and those of 8 bits
    lambda m, n: f"{ESC}c{ESC}7{ESC}8{ESC}M{ESC}D{ESC}(0{ESC}#8{ESC}=",
    lambda m, n: f"\x9b{n}m\x9b{n};{n}H",
    lambda m, n: f"\x9d52;c;{m}\x9c\x9d0;{m}\x07",
    lambda m, n: f"\x90{m}\x9c\x98{m}\x9c\x9e{m}\x9c\x9f{m}\x9c\x84\x85\x8d\x8e",
    # Sequences in two pieces, nested, without an end, broken by other characters
    lambda m, n: f"{ESC}{ESC}]0;{m}{ESC}{BEL}",
    lambda m, n: f"{ESC}]0;{m}{ESC}[{n}m{BEL}",
    lambda m, n: f"{ESC}[{n}\n;{n}m",
    lambda m, n: f"{ESC}]52;c;{m}",
    lambda m, n: f"{ESC}[{n}",
    lambda m, n: f"{ESC}P{m}",
    lambda m, n: f"\x18{ESC}[{n}\x18m\x1a{ESC}[\x00{n}m",
    lambda m, n: f"&#27;]0;{m}&#7; &#x9b;{n}m &#x1b;[{n}m",
    lambda m, n: rf"\033]0;{m}\007 \e[{n}m \x1b]52;c;{m}\x07",
]
OTHERS = [
    # Characters that control, hide, turn or break text
    lambda m, n: "\x00\x01\x02\x05\x07\x08\x0b\x0c\x0e\x0f\x7f" + "\b" * 9,
    lambda m, n: "\r overwritten \r\n \v \f",
    lambda m, n: "\u202e desrever \u202c\u2066 isolated \u2069\u200e\u200f\u061c",
    lambda m, n: "pass\u200bword\ufeff\u2060\u00ad\u180e",
    lambda m, n: "".join(map(chr, range(0xE0020, 0xE0040))),
    lambda m, n: "Z" + "".join(map(chr, range(0x300, 0x340))) * 3 + "algo",
    lambda m, n: "\ud800 \udfff \udc80 \uffff \ufdd0 \U0010ffff",
    lambda m, n: "👩‍👩‍👧‍👦" * 9 + "\u200d" * 9 + "🏴\U000e0067\U000e0062\U000e007f",
    lambda m, n: "\u3000ｗｉｄｅ漢字" * 9,
    lambda m, n: "\u2028\u2029\x85 lines",
    # Text that looks like the widgets' markup, Markdown or templates
    lambda m, n: f"[red]red[/red] [@click=app.leave]{m}[/] [link=https://{m}]x[/link] [/nothing] [",
    lambda m, n: f"[$success on $error 50%]{m}[/] [bold italic blink]x \\[red] [[red]]",
    lambda m, n: f"[x](javascript:{m}) <a href='file:///etc/passwd'>x</a> ![i](data:{m}) <!-- {m} -->",
    lambda m, n: "```\n[red]\n" + "> " * 60 + "deep\n" + "- " * 40 + "deeper\n\n" + "#" * 80,
    lambda m, n: "| a | b |\n|---|---|\n| \x1b]0;t\x07 | `\x9b31m` |\n",
    lambda m, n: "{model} %s %(x)s $HOME `id` $(id) {0} {{}}",
]


def hostile(n: int, rng: random.Random) -> str:
    """Text number n: a few attacks between words, or one long attack of up to 100 kB."""
    mark = word(n), number(n)
    parts: list[str] = []
    for _ in range(rng.randint(1, 5)):
        parts.append(rng.choice(SEQUENCES if rng.random() < 0.7 else OTHERS)(*mark))
        parts.append(rng.choice(("", " ", " words ", "\n", "é", "漢")))
    text = "".join(parts)
    if rng.random() < 0.1:
        text = text[: rng.randrange(1, len(text) + 1)]  # a sequence may lose its end
    if n % 250 == 7:
        text += rng.choice(("x", "漢", f"{ESC}[{mark[1]}m", "a\u0301", "\n- y", "[red]")) * rng.randint(
            99, LONG
        )
        text = text[:LONG] + SEQUENCES[n % len(SEQUENCES)](*mark)
    return text


_SEQUENCE = re.compile(
    r"\x1b(?:"
    r"\[[0-?]*[ -/]*[@-~]"  # CSI
    r"|[\]P_^X][^\x07\x1b\x9c]*(?:\x07|\x1b\\)"  # OSC, DCS, APC, PM, SOS
    r"|[ -/]*[0-Z\\`-~]"  # two characters, or with intermediates
    r")"
)
# Exactly the sequences that Textual sends; \d{1,3} cannot match a mark.
_ITS_OWN = re.compile(
    r"\x1b(?:"
    r"\[(?:\d{1,3}(?:;\d{1,3})*)?m"
    r"|\[\d{1,3};\d{1,3}H|\[H"
    r"|\[\?(?:7|25|1000|1002|1003|1004|1006|1015|1016|1049|2004|2026|2031|2048)[hl]"
    r"|\[\?(?:2026|2048)\$p"
    r"|\[>\d{1,2}u|\[<u"
    r"|\]22;(?:default|text|pointer)\x07"  # the shape of the mouse
    r")"
)
_MARK = re.compile(r"Zq\d{5}|9\d{5}")


def sequences_and_text(raw: bytes) -> tuple[list[str], str]:
    """The escape sequences and the plain text that a terminal received; bytes that are not UTF-8 are an
    error."""
    text = raw.decode("utf-8")
    return [match[0] for match in _SEQUENCE.finditer(text)], _SEQUENCE.sub("", text)


def leaks(raw: bytes, its_own: re.Pattern[str] = _ITS_OWN) -> list[str]:
    """Everything that should not have reached the terminal."""
    sequences, words = sequences_and_text(raw)
    found = [s for s in sequences if not its_own.fullmatch(s) or _MARK.search(s) or _too_far(s)]
    return found + [f"U+{ord(c):04X}" for c in words if _controls(c)]


def _too_far(sequence: str) -> bool:
    place = re.fullmatch(r"\x1b\[(\d+);(\d+)H", sequence)
    return bool(place and (int(place[1]) > ROW or int(place[2]) > COLUMN))


def _controls(char: str) -> bool:
    """Is it a control, zero-width or direction character? Line ends and tabs are allowed."""
    if char in "\r\n\t":
        return False
    turns = unicodedata.bidirectional(char) in ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return turns or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in "\u200b\u200e\u200f"

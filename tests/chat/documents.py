"""Random Markdown documents of every kind that models write: complete, badly nested, and cut off."""

import random

WORDS = [
    "water",
    "the",
    "of",
    "x",
    "café",
    "naïve",
    "日本語",
    "漢字テスト",
    "Ελληνικά",
    "می‌خواهم",
    "👩‍👩‍👧",
    "❤️",
    "🇫🇷",
    "1.",
    "2)",
]
WORDS += [
    "-",
    "*",
    "_",
    "~",
    "`",
    "a_b_c",
    "2*3*4",
    "C:\\\\dir",
    "<b>",
    "</div>",
    "&amp;",
    "&#x202e;",
    "&nope;",
    "\\*",
    "#",
    "|",
]
WORDS += [
    "https://example.org/a_b?c=d&e",
    "www.example.org",
    "me@example.org",
    "e.g.",
    "...",
    "$x^2$",
    "[1]",
    "[later]",
]
STARTS = [
    "",
    "",
    "",
    "# ",
    "###### ",
    "- ",
    "* ",
    "+ ",
    "1. ",
    "7) ",
    "> ",
    ">> ",
    "    ",
    "\t",
    "- [ ] ",
    "- [x] ",
    "---",
    "| ",
]


def words(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def inline(rng: random.Random) -> str:
    """Words with emphasis, code, links, images; most of them are closed."""
    forms = (
        "**{}**",
        "*{}*",
        "_{}_",
        "***{}***",
        "~~{}~~",
        "`{}`",
        "``{} ` ``",
        "[{}](https://x.org 'a title')",
    )
    forms += (
        "![{}](i.png)",
        "<https://x.org/{}>",
        "[{}][later]",
        "**{}",
        "`{}",
        "[{}](",
        "<i>{}</i>",
        "~~{}",
        "*{}**",
    )
    return " ".join(
        rng.choice((words(rng, 5), rng.choice(forms).format(words(rng, 3)))) for _ in range(rng.randint(1, 5))
    )


def paragraph(rng: random.Random) -> str:
    ends = ("\n", "  \n", "\\\n", " ")
    return "".join(inline(rng) + rng.choice(ends) for _ in range(rng.randint(1, 4))).rstrip(" ")


def heading(rng: random.Random) -> str:
    text = inline(rng)
    return rng.choice(
        (f"{'#' * rng.randint(1, 7)} {text}", f"{text}\n===", f"{text}\n---", f"# {text} #", "#")
    )


def fence(rng: random.Random) -> str:
    """Code between backticks or tildes, which may contain shorter fences; one in five is not closed."""
    mark = rng.choice(("```", "~~~", "````", "~~~~~"))
    language = rng.choice(("", "python", "json", " js title=x", "no such language", "md"))
    inside = [
        "def f(x):",
        "    return x",
        "",
        "- no list",
        "# no heading",
        "```" if mark != "```" else "~~~",
        "\tx",
    ]
    body = "\n".join(rng.choice(inside) for _ in range(rng.randint(0, 6)))
    return f"{mark}{language}\n{body}\n{mark}" if rng.random() < 0.8 else f"{mark}{language}\n{body}"


def listing(rng: random.Random, depth: int = 0) -> str:
    """A list, loose or tight; its items may hold other blocks and lists."""
    mark, lines = rng.choice(("-", "*", "+", "1.", "3)", "10.")), []
    for _ in range(rng.randint(1, 4)):
        lines.append(f"{mark} {inline(rng)}")
        if depth < 3 and rng.random() < 0.4:
            indent = " " * rng.choice((2, 3, 4, len(mark) + 1))
            inner = rng.choice((listing, fence, paragraph, quote) if depth else (listing, paragraph))
            text = inner(rng, depth + 1) if inner is listing else inner(rng)
            lines += [indent + line for line in text.split("\n")]
        if rng.random() < 0.3:
            lines.append("")
    return "\n".join(lines)


def quote(rng: random.Random) -> str:
    """A quote, also with lazy continuation lines and with other blocks in it."""
    inner = rng.choice((paragraph, listing, fence, heading))(rng)
    return "\n".join(("> " if rng.random() < 0.9 else "") + line for line in inner.split("\n"))


def table(rng: random.Random) -> str:
    """A table; some rows are too short or too long, and sometimes the delimiter row is missing."""
    columns = rng.randint(1, 4)
    row = lambda n: "| " + " | ".join(words(rng, 3).replace("|", "") for _ in range(n)) + " |"  # noqa: E731
    rule = "|" + "|".join(rng.choice(("---", ":-:", "--:", "-")) for _ in range(columns)) + "|"
    rows = [
        row(rng.choice((columns, columns, columns + 1, max(1, columns - 1))))
        for _ in range(rng.randint(0, 4))
    ]
    return "\n".join([row(columns), *([rule] if rng.random() < 0.9 else []), *rows])


def html(rng: random.Random) -> str:
    return rng.choice(
        ("<div>\n{}\n</div>", "<!-- {} -->", "<details><summary>{}", "<p align=x>{}</p>")
    ).format(words(rng))


def definition(rng: random.Random) -> str:
    return rng.choice(
        (
            "[later]: https://example.org/later",
            "[later]:",
            "[1]: <https://x.org> 'title'",
            "[later]: /x 'no end",
        )
    )


def rule(rng: random.Random) -> str:
    return rng.choice(("---", "* * *", "___", "-----"))


def noise(rng: random.Random) -> str:
    """Lines that begin like Markdown syntax and are not finished."""
    return "\n".join(
        rng.choice(STARTS) + (words(rng, 4) if rng.random() < 0.7 else "") for _ in range(rng.randint(1, 6))
    )


BLOCKS = (paragraph, heading, fence, listing, quote, table, html, definition, rule, noise)


def document(seed: int) -> str:
    """Some blocks, most with a blank line between; one document in four is cut off somewhere."""
    rng = random.Random(seed)
    text = "".join(
        rng.choice(BLOCKS)(rng) + rng.choice(("\n\n", "\n\n", "\n\n", "\n", "\n\n\n"))
        for _ in range(rng.randint(1, 7))
    )
    return text[: rng.randrange(1, len(text))] if rng.random() < 0.25 else text

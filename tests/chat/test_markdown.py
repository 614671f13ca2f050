"""Streamed Markdown looks as if rendered in one piece, wherever the stream was cut."""

import random

import pygments.lexers
import pytest
from ruvmlx.apps.chat.markdown import ReplyMarkdown, known_language, parser
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widget import Widget

from .documents import document
from .helpers import until

DOCUMENTS = [
    "Plain words.\nA second line.\n\nA second paragraph with **bold**, *em*, `code` and ~~strike~~.",
    "1. a\n\n2. b\n\n   more of b\n\n   - inner\n   - list\n\n3. c\n\nEnd.\n",
    "- a\n- b\n\n---\n\n* other\n  * nested\n    1. deep\n\n+ third",
    "# One\n\nText\n\nSetext two\n----------\n\n### Three\n> quote\ncontinued\n> > deeper\n",
    "Code:\n\n```python\ndef f(x):\n    return x  # **not bold**\n\n\nf(1)\n```\n\nAfter.\n\n    indented\n",
    "```\nnever closed\n- a\n- b\n",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 | `4` |\n| 5 |\n\nAfter the table.\n",
    "See [later] and [site](https://example.org 'title').\n\n- item\n\n[later]: https://example.org/later\n",
    "Tags <b>stay</b> visible &amp; entities &lt;too&gt;.\n\n<div>\nblock\n</div>\n\n![alt *t*](img.png)\n",
    "Emoji 👩‍👩‍👧 and 日本語のテキスト、それから……\n\n> 引用\n\n1) first\n2) second\n",
    "a\n===\n\n\n\n\n***\n\n- \n- x\n\n  para\n\n\tcode?\n\n#no heading\n# \n",
    "".join(f"{n}. item {n}\n" for n in range(8, 13)) + "\n- a\n- b\n\n+ c\n",
    "words\n> ---\n\n- item\n\n  ***\n\n> > ---\n> ***\n",
]


class Host(App[None]):
    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield ReplyMarkdown()


def rendered_rows(widget: Widget) -> list:
    """Every descendant widget with its region and its rows of characters and styles."""
    own = (type(widget).__name__, widget.region, [widget.render_line(y) for y in range(widget.size.height)])
    return [own, *(row for child in widget.children for row in rendered_rows(child))]


async def stream_text(markdown, pilot, text, rng):
    shown = 0
    while shown < len(text):
        shown += rng.choice((1, 2, 5, 20, 60))
        await markdown.show(text[:shown])
    await markdown.show(text, final=True)
    await pilot.pause()
    return rendered_rows(markdown)


@pytest.mark.parametrize("number", range(len(DOCUMENTS)))
async def test_documents_in_random_pieces_end_as_in_one_piece(number, full):
    """200 cuts and more over all documents (--full), compared widget by widget, row by row, in each style."""
    text, rng = DOCUMENTS[number], random.Random(number)
    async with Host().run_test(size=(80, 60)) as pilot:
        markdown = pilot.app.query_one(ReplyMarkdown)
        await markdown.update(text)
        await pilot.pause()
        wanted = rendered_rows(markdown)
        assert len(wanted) > 1
        for _ in range(19 if full else 3):
            await markdown.update("")
            assert await stream_text(markdown, pilot, text, rng) == wanted


SIZES = ((80, 60), (130, 60))  # cells: the second is not a multiple of the first


async def test_random_documents_in_random_pieces_end_as_in_one_piece(full):
    """1,000 documents (--full) of every kind, cut anywhere: each ends as in one go, at two widths."""
    async with Host().run_test(size=SIZES[0]) as pilot:
        markdown = pilot.app.query_one(ReplyMarkdown)
        for seed in range(1000 if full else 6):
            text, rng, size = document(seed), random.Random(seed), SIZES[seed % 2]
            await markdown.update(text)
            wanted = [await at(pilot, size, markdown) for size in SIZES]
            await markdown.update("")
            await at(pilot, size, markdown)
            await stream_text(markdown, pilot, text, rng)
            found = [await at(pilot, size, markdown) for size in SIZES]
            assert found == wanted, f"document {seed}: {text!r}"
            await markdown.update("")


async def at(pilot, size, markdown):
    """The rendering at another size, after the layout has settled, which a scrollbar may delay."""
    await pilot.resize_terminal(*size)
    await until(pilot, lambda: size[0] - 2 <= markdown.region.width <= size[0])
    shown, before = rendered_rows(markdown), None
    while shown != before:
        await pilot.pause()
        before, shown = shown, rendered_rows(markdown)
    return shown


def test_random_documents_have_every_kind_of_block():
    """Of every block and every inline form there are some among the first few hundred."""
    kinds = {t.type for seed in range(300) for t in flat(parser().parse(document(seed)))}
    assert kinds >= {
        "heading_open", "fence", "bullet_list_open", "ordered_list_open", "blockquote_open", "table_open",
        "rule", "strong_open", "em_open", "s_open", "code_inline", "link_open", "image", "hardbreak",
        "code_block",
    }  # fmt: skip


def flat(tokens):
    for token in tokens:
        yield token
        yield from flat(token.children or [])


async def test_control_characters_in_entities_are_sanitised():
    """A direction override or a carriage return that Markdown decodes does not reach a widget."""
    async with Host().run_test() as pilot:
        markdown = pilot.app.query_one(ReplyMarkdown)
        await markdown.update("a&#x202e;b ![c&#13;d](x) `&#x202e;`\n\n```&#x202e;py\nx\n```\n")
        await pilot.pause()
        text = "".join(strip.text for _, _, strips in rendered_rows(markdown) for strip in strips)
        assert "\u202e" not in text
        assert "\r" not in text
        assert "ab" in text


async def test_html_and_line_breaks_are_kept():
    """Nothing that a model wrote vanishes: tags are text, single newlines break the line."""
    async with Host().run_test() as pilot:
        markdown = pilot.app.query_one(ReplyMarkdown)
        await markdown.update("Use <div> here\nnot <span>\n\n<p>block</p>")
        await pilot.pause()
        rows = [strip.text.strip() for _, _, strips in rendered_rows(markdown) for strip in strips]
        assert "Use <div> here" in rows
        assert "not <span>" in rows
        assert "<p>block</p>" in rows


async def test_the_language_of_code_is_not_guessed(monkeypatch):
    """Code without a language, or of one that nobody knows, is shown as it is, at once."""
    monkeypatch.setattr(pygments.lexers, "guess_lexer", lambda *_: pytest.fail("it guesses"))
    async with Host().run_test() as pilot:
        markdown = pilot.app.query_one(ReplyMarkdown)
        await markdown.update("```\nx = 1\n```\n\n    y = 2\n\n~~~klingon\nz = 3\n~~~")
        await pilot.pause()
        shown = "".join(strip.text for _, _, strips in rendered_rows(markdown) for strip in strips)
        assert all(code in shown for code in ("x = 1", "y = 2", "z = 3"))


@pytest.mark.parametrize(
    ("info", "language"), [("python", "python"), ("JS title=x", "js"), ("", "text"), ("klingon", "text")]
)
def test_a_known_language_of_a_code_block_is_found(info, language):
    assert known_language(info) == language

"""`@paper.pdf` puts the text of a PDF's pages into a message."""

import importlib.util
from pathlib import Path

import pytest
from ruvmlx.apps.chat import pdf_text
from ruvmlx.apps.chat.mentions import with_files, without_files
from ruvmlx.apps.chat.user_files import HERE

from ruvmlx.errors import UsageError

needs_pypdf = pytest.mark.skipif(
    importlib.util.find_spec("pypdf") is None, reason="the extra `pdf` (pypdf) is not installed"
)


def pdf(*pages: str) -> bytes:
    """A PDF whose pages have one line of text each; "" is an empty page."""
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Count {len(pages)} /Kids [{kids}] >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, words in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 700 Td ({words}) Tj ET" if words else ""
        objects.append(
            "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            f"/Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * n} 0 R >>"
        )
        objects.append(f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"trailer << /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}{end}".encode()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def put(text):
    return with_files(text, HERE, lambda body: len(body.split()))


@needs_pypdf
def test_the_pages_stand_below_the_message_with_their_size():
    Path("paper.PDF").write_bytes(pdf("Snow falls.", "", "It melts again."))
    found = put("Sum up @paper.PDF, please")
    _, (file,) = without_files(found.text)
    assert file.name == "paper.PDF" and file.text == "[page 1]\nSnow falls.\n\n[page 3]\nIt melts again."
    assert found.notes == ("paper.PDF: 9 tokens",)


@needs_pypdf
@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pdf("", ""), "its pages are pictures.* Name a text file"),
        (b"%PDF-1.4\nnothing", "cannot be read as a PDF .*Save it again"),
        (b"", "cannot be read as a PDF"),
    ],
)
def test_a_pdf_without_text_is_refused_in_one_line(data, why):
    Path("scan.pdf").write_bytes(data)
    with pytest.raises(UsageError, match=why) as refused:
        put("@scan.pdf")
    assert str(refused.value).startswith("@scan.pdf") and "\n" not in str(refused.value)


@needs_pypdf
def test_a_pdf_that_takes_too_long_is_refused(monkeypatch):
    """The child has used up its time when it has imported pypdf."""
    monkeypatch.setattr(pdf_text, "SECONDS", 0.001)
    monkeypatch.setattr(pdf_text, "OPENING", 0.0)
    Path("long.pdf").write_bytes(pdf("Snow."))
    with pytest.raises(UsageError, match=r"takes more than .* Name a smaller PDF, or a text file"):
        put("@long.pdf")


def test_a_pdf_that_is_too_large_is_not_opened(monkeypatch):
    monkeypatch.setattr(pdf_text, "MAX_PDF_BYTES", 10)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    Path("big.pdf").write_bytes(pdf("Snow."))
    with pytest.raises(UsageError, match=r"@big.pdf has \d+ B; PDFs of up to 10 B are read. Name a smaller"):
        put("@big.pdf")


def test_without_the_package_a_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    Path("paper.pdf").write_bytes(pdf("Snow."))
    with pytest.raises(UsageError, match=r"@paper.pdf is a PDF.*uv sync --inexact --extra pdf"):
        put("@paper.pdf")

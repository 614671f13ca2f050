"""This module reads the text of a PDF with the package pypdf, which the extra `pdf` installs. The module
reads a PDF in a child process with limits of time and memory, because a damaged file could take hours.

The text marks each page, so that the model's answers can name pages:

    [page 1]
    The first words ...
"""

import importlib.util
from pathlib import Path

from ruvmlx.errors import Interrupted, UsageError, extra_missing
from ruvmlx.platform.bounded_process import BoundedProcess, ProcessEnded, ProcessStopped, answer_requests
from ruvmlx.text import one_line, size

MAX_PDF_BYTES = 64 << 20  # the maximum size of a PDF in bytes; pictures take most bytes of a long PDF
SECONDS, OPENING = 20.0, 5.0  # the child's processor time in seconds: to read the PDF, and more to start
MEMORY = 1 << 30  # the memory limit of the child process in bytes
# the maximum number of characters of a PDF's text; a longer text does not fit into the context of usual
# models
MAX_CHARACTERS = 8 << 20
_OTHERS = "Name a smaller PDF, or a text file."


def pdf_text(path: Path, name: str) -> str:
    """Return the text of a PDF's pages, at most about MAX_CHARACTERS characters. Raise UsageError if the PDF
    has no text or cannot be read. name: the file name that the error shows."""
    name = f"@{one_line(name)}"
    if importlib.util.find_spec("pypdf") is None:
        raise UsageError(
            f"{name} is a PDF, and the package pypdf, which reads PDFs, is missing; {extra_missing('pdf')}."
        )
    if (nbytes := path.stat().st_size) > MAX_PDF_BYTES:
        raise UsageError(
            f"{name} has {size(nbytes)}; PDFs of up to {size(MAX_PDF_BYTES)} are read. {_OTHERS}"
        )
    child = BoundedProcess(__name__, opening=OPENING)
    try:
        pages: list[str] = child.ask(str(path.absolute()), SECONDS, MEMORY)
    except ProcessStopped:
        raise Interrupted(f"ruvmlx was stopped before {name} was read.") from None
    except ProcessEnded as ended:
        raise UsageError(_refusal(name, str(ended))) from None
    finally:
        child.close()
    if not any(pages):
        raise UsageError(f"{name} has no text: its pages are pictures, perhaps a scan. Name a text file.")
    return "\n\n".join(f"[page {number}]\n{page}" for number, page in enumerate(pages, 1) if page)


def _refusal(name: str, why: str) -> str:
    """Return a sentence that says why a PDF cannot be read. why: the error of pypdf, or "" if a limit of time
    or memory ended the child process."""
    if not why:
        return f"{name} takes more than {SECONDS:.0f} seconds of work or {size(MEMORY)} to read. {_OTHERS}"
    return f"{name} cannot be read as a PDF ({one_line(why)[:120]}). Save it again, or name a text file."


# Functions of the child process -------------------------------------------------------------------


def _pages(path: str) -> list[str]:
    """Return a list with the text of each page of the PDF."""
    from pypdf import PdfReader

    reader, pages, room = PdfReader(path), list[str](), MAX_CHARACTERS
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it has a password")
    for page in reader.pages:
        pages.append(page.extract_text().strip()[: max(0, room)])
        room -= len(pages[-1])
    return pages


if __name__ == "__main__":
    answer_requests(_pages)

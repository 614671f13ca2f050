"""Long real texts that come with every Python, and needles to find in them. Nothing of them is kept here.

Prose is the language reference (what `help("class")` shows) and the docstrings and comments of the standard
library; code is a module's source.
"""

import ast
import importlib.util
import io
import tokenize
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from ruvmlx.models.config.model import Message, Tokenizer

# name: (kind, what of it)
TEXTS = {
    "statements": (
        "topics",
        "assert assignment async augassign class compound del for function global if import raise return try "
        "while with yield exprlists naming",
    ),
    "numbers": ("docstrings", "decimal _pydecimal fractions statistics random numbers"),
    "code": ("source", "argparse"),
    "data model": (
        "topics",
        "types objects specialnames attribute-access sequence-types numeric-types callable-types "
        "context-managers",
    ),
    "network": ("docstrings", "smtplib ftplib imaplib http.client http.cookiejar urllib.request ssl"),
    "testing": ("docstrings", "unittest.case unittest.mock doctest unittest.loader trace"),
    "strings": ("topics", "formatstrings strings typesseq string-methods bytes typesmapping typesmethods"),
    "concurrency": (
        "docstrings",
        "threading asyncio.tasks asyncio.events multiprocessing.pool concurrent.futures._base queue",
    ),
}


def contexts(tokenizer: Tokenizer, n_tokens: int) -> dict[str, list[int]]:
    """Different texts by name, each of exactly n_tokens tokens; what is too short here is left out."""
    encoded = {name: tokenizer.encode(read(name)[: 8 * n_tokens])[:n_tokens] for name in TEXTS}
    return {name: ids for name, ids in encoded.items() if len(ids) == n_tokens}


def read(name: str) -> str:
    kind, what = TEXTS[name]
    if kind == "topics":
        return _topics(what.split())
    return "\n\n".join(map(_source if kind == "source" else _docstrings, what.split()))


def needle(tokenizer: Tokenizer, n_tokens: int, depth: float, key: str) -> tuple[list[int], str]:
    """A chat of about n_tokens tokens (never more) that hides "The secret number of <key> is ...".

    `depth` is where in the filler the sentence stands: 0 at its start, 1 at its end. Returns the prompt up to
    where the reply begins, and the number, which a reply that found it contains.
    """
    answer = str(1000 + int(sha256(key.encode()).hexdigest(), 16) % 9000)
    fact = f"\n\nThe secret number of {key} is {answer}.\n\n"
    question = f"\n\nWhat is the secret number of {key}? Answer with the number."
    filler = read("statements").split("\n\n")

    def prompt(n: int) -> list[int]:
        at = round(depth * n)
        text = "\n\n".join(filler[:at]) + fact + "\n\n".join(filler[at:n]) + question
        return tokenizer.encode_chat([Message("user", text)])

    low, high = 0, len(filler)
    while low < high:  # the most paragraphs that fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(prompt(middle)) <= n_tokens else (low, middle - 1)
    return prompt(low), answer


def _topics(labels: Iterable[str]) -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[label] for label in labels if label in topics)


def _source(module: str) -> str:
    """Empty where a module is missing or has no source."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_text("utf-8") if spec and spec.origin and spec.has_location else ""


def _docstrings(module: str) -> str:
    """Docstrings, then blocks of comments."""
    source = _source(module)
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return "\n\n".join([*filter(None, map(ast.get_docstring, nodes)), *_comments(source)])


def _comments(source: str) -> Iterable[str]:
    """Neighbouring lines of comments as one text each."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and block:
            yield "\n".join(block)
            block = []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    if block:
        yield "\n".join(block)

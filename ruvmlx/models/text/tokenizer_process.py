"""This module runs the tokenizer of a folder in a separate process.

With a bad file, the libraries for tokenizer.json and tokenizer.model can panic, abort, search a regular
expression for hours or take all memory. To survive a bad file, ruvmlx lets a child process with limits of
time and memory open the files and encode each text (`platform/bounded_process.py`). The parent process stores
the special tokens, and the bytes of those tokens for which it has asked the child.

At its start the child encodes test texts on which bad tokenizer files run too long. If the child fails at a
test text, the program refuses to load the model.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...errors import CorruptFile, Interrupted
from ...platform.bounded_process import BoundedProcess, ProcessEnded, ProcessStopped, answer_requests
from ..files.error_text import one_line
from ..files.json_files import MAX_BYTES
from .tokenizer_base import BaseTokenizer
from .tokenizer_json import folder_tokenizer, token_ids

# the first of these files that exists has the tokenizer
READ = ("tokenizer.json", "tekken.json", "tokenizer.model")
# The child gets SECONDS + the file's bytes / BYTES_PER_SECOND of processor time (seconds) to open a file.
SECONDS, BYTES_PER_SECOND = 5.0, 4e6
# The child can use MEMORY bytes of memory and PER_BYTE more bytes for each byte of the file (a large
# vocabulary takes about 15).
MEMORY, PER_BYTE = 200_000_000, 20
# The child gets TEXT_SECONDS + the text's characters / CHARACTERS_PER_SECOND of processor time (seconds) to
# encode a text.
TEXT_SECONDS, CHARACTERS_PER_SECOND = 1.0, 2e5
PER_CHARACTER = 600  # additional bytes of memory that the child can use for each character of a text
# A text may become at most MOST_TOKENS * (the text's bytes) + BESIDES tokens.
MOST_TOKENS, BESIDES = 8, 64
BLOCK = 4096  # the number of tokens whose bytes one request to the child fetches
LONG_TEXT_CHARACTERS = 5_000  # the length of the two long test texts


class ProcessTokenizer(BaseTokenizer):
    """The tokenizer of a folder; a child process encodes the texts. Methods that ask the child raise
    CorruptFile or UnsupportedModel if the tokenizer does not work, and Interrupted if the user stops the
    program. Any thread can call the methods."""

    def __init__(self, folder: Path, eos: Iterable[Any] = ()):
        """eos: the values of eos_token_id, as in folder_tokenizer."""
        file = next((folder / name for name in READ if (folder / name).is_file()), folder)
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise CorruptFile(f"{file.name} is {size} bytes; at most {MAX_BYTES} were expected.")
        self._name, self._memory = file.name, MEMORY + PER_BYTE * size
        opening = SECONDS + size / BYTES_PER_SECOND
        self._process = BoundedProcess(__name__, str(folder.resolve()), opening=opening)
        super().__init__(**self._ask(["facts", [i for entry in eos for i in token_ids(entry)]], 0))

    def _ask(self, request: list[Any], characters: int) -> Any:
        """Send a request to the child and return the answer. characters: the length of the text to encode."""
        seconds = TEXT_SECONDS + characters / CHARACTERS_PER_SECOND
        memory = self._memory + PER_CHARACTER * characters
        try:
            return self._process.ask(request, seconds, memory)
        except ProcessStopped:
            raise Interrupted("ruvmlx was stopped before the text became tokens.") from None
        except ProcessEnded as ended:
            limits = f", or needs more than {seconds:.0f} seconds of work and {memory >> 20} MB"
            why = f": {one_line(ended)}" if str(ended) else limits
            raise CorruptFile(
                f"{self._name} breaks the library that reads it{why}. Fetch the model again."
            ) from None

    def _encode_run(self, text: str, first: bool) -> list[int]:
        ids = self._ask(["encode", text, first], len(text))
        check_ids(ids, text, self.vocab_size, self._name)
        return ids

    def _piece_bytes(self, token_id: int) -> bytes:
        start = token_id - token_id % BLOCK
        block = self._ask(["pieces", start, min(start + BLOCK, self.vocab_size)], 0)
        for i, piece in enumerate(block, start):
            self._bytes.setdefault(i, b"" if i in self._special_ids else piece.encode("latin-1"))
        return self._bytes[token_id]


def check_ids(ids: list[int], text: str, vocab: int, where: str) -> None:
    """Raise CorruptFile if `ids`, the tokens of a text, are too many for the text, or are outside the
    vocabulary."""
    most = MOST_TOKENS * len(text.encode()) + BESIDES
    if len(ids) > most:
        raise CorruptFile(f"{where}: {len(text)} characters become {len(ids)} tokens; at most {most} do.")
    if ids and not 0 <= max(array("q", ids)) < vocab:
        raise CorruptFile(f"{where}: it makes tokens beyond its {vocab}.")


# In the child -------------------------------------------------------------------------------------


def texts() -> Iterator[str]:
    """Yield ordinary texts, and texts on which careless regular expressions and replacements run too long."""
    yield from ("", " ", "a", "Hello, world! It's 2026: 12,345.67 €.\n\n\tdef f(x): return x\r\n")
    yield "é ü ﬁ 漢字 かな 한국어 🙂👩‍👩‍👧 \u200b\ufeff\x00\x7f\U0010ffff"
    for code in range(32, 127):
        yield chr(code) * 32 + "!"
        yield chr(code) * 32 + "\n"
    yield "aA" * 30 + "!"
    yield "a1 " * 30 + "\n"
    yield "a" * LONG_TEXT_CHARACTERS
    yield "word, " * (LONG_TEXT_CHARACTERS // 6)


class _Answers:
    """A callable object with which the child process answers the parent's requests. The first request opens
    the tokenizer."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._tokenizer: BaseTokenizer | None = None

    def __call__(self, request: list[Any]) -> Any:
        what, *given = request
        self._tokenizer = self._tokenizer or folder_tokenizer(self._folder)
        return getattr(self, what)(self._tokenizer, *given)

    def facts(self, tokenizer: BaseTokenizer, eos: list[int]) -> dict[str, Any]:
        where = next(name for name in READ if (self._folder / name).is_file())
        for text in texts():
            check_ids(tokenizer.encode(text, add_bos=False), text, tokenizer.vocab_size, where)
        names = "vocab_size bos_id adds_bos eos_id chat_template strips_leading_space"
        facts = {name: getattr(tokenizer, name) for name in names.split()}
        return facts | {
            "special_tokens": dict(tokenizer.special_tokens),
            "trims_before": sorted(tokenizer.trims_before),
            "trims_after": sorted(tokenizer.trims_after),
            "more_eos_ids": sorted(tokenizer.eos_ids.union(eos)),
        }

    def encode(self, tokenizer: BaseTokenizer, text: str, first: bool) -> list[int]:
        return tokenizer._encode_run(text, first)

    def pieces(self, tokenizer: BaseTokenizer, start: int, stop: int) -> list[str]:
        return [tokenizer.token_bytes(i).decode("latin-1") for i in range(start, stop)]


if __name__ == "__main__":
    answer_requests(_Answers(Path(sys.argv[1])))

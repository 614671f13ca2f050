"""The command `ruvmlx embed` turns texts into vectors (embeddings)."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ruvmlx.errors import UsageError, unreadable
from ruvmlx.text import one_line

from .options import open_for_reading, require_new_file, resolve, setting_options
from .output import json_option, log, print_json
from .path_types import NewPath
from .text_output import count, say
from .verb import Verb

if TYPE_CHECKING:
    import numpy as np

    from ruvmlx.backends.base import Backend
    from ruvmlx.models.config.model import Model
    from ruvmlx.store import Store

MAX_LINE_BYTES = 1 << 20  # the maximum number of bytes of an input line; 8,192 tokens of text are shorter


@click.command(cls=Verb)
@click.argument("texts", metavar="TEXT... | -", nargs=-1, required=True)
@click.option(
    "--out", "-o", type=NewPath(path_type=Path), help="A new .npy file: float32, one row for each text."
)
@setting_options("model", "backend", "threads")
@json_option
def embed(texts: tuple[str, ...], out: Path | None, as_json: bool, **flags: Any) -> None:
    """Print one unit vector for each TEXT, by the original model; the product of two is their similarity.

    With - each line of standard input is a text; empty lines are left out. Without --json and --out, each
    vector is a line of JSON that is printed when it is computed.
    """
    if out is not None:
        _check_new(out)
    given = _lines() if texts == ("-",) else ((f"text {n}", text) for n, text in enumerate(texts, 1))
    with open_for_reading(resolve(flags)) as (store, model, backend):
        vectors = (_vector(store, model, backend, *one) for one in given)
        if out is not None:
            facts = _save(out, list(vectors)) | {"model": model.name}
            if as_json:
                print_json(facts)
            else:
                say(f"{out} has {count(facts['count'], 'vector')} of {facts['dimensions']} numbers.")
        elif as_json:
            rows = [vector.tolist() for vector in vectors]
            width = len(rows[0]) if rows else 0
            print_json({"embeddings": rows, "dimensions": width, "model": model.name})
        else:
            for index, vector in enumerate(vectors):
                print_json({"index": index, "embedding": vector.tolist()})


def _vector(store: "Store", model: "Model", backend: "Backend", name: str, text: str) -> "np.ndarray":
    """Return the vector of a text. Raise UsageError with the name of the text if the text is empty or too
    long."""
    from ruvmlx.sona import embedding

    try:
        [vector] = embedding.embed(store, model, backend, [text])
    except UsageError as e:
        raise UsageError(f"{name}: {e}") from None
    return vector


def _lines() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each line of standard input that is not empty. The name is for errors. At the
    end, print how many empty lines were left out."""
    if sys.stdin is None:
        raise UsageError("standard input is closed; give the texts as arguments.")
    number = empty = 0
    while line := sys.stdin.buffer.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UsageError(
                f"line {number} is over {MAX_LINE_BYTES:,} bytes, which is too long to read. Cut it."
            )
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as e:
            raise unreadable(f"line {number}", e) from e
        if text.strip():
            yield f"line {number}", text
        else:
            empty += 1
    if empty:
        log(f"note: left out {count(empty, 'empty line')}; vectors are numbered without them.")


def _check_new(out: Path) -> None:
    """Raise UsageError if the name `out` does not end in .npy, if the file exists, or if its folder does not
    exist. The verb calls this function before it opens the model."""
    if out.suffix != ".npy":
        raise UsageError(f"--out {one_line(str(out))} must end in .npy; without it, vectors are JSON lines.")
    require_new_file("--out", out)


def _save(out: Path, vectors: "Sequence[np.ndarray]") -> dict[str, Any]:
    import numpy as np

    from ruvmlx.chats.chat_file import new_file

    if not vectors:
        raise UsageError("standard input is empty; give a text on each line.")
    array = np.stack(vectors).astype(np.float32)
    with new_file(out) as file:
        np.save(file, array, allow_pickle=False)
    return {"file": str(out), "count": len(array), "dimensions": array.shape[1]}


VERBS = [embed]

"""This module removes unused definitions from a kernel's headers.

MLX builds and hashes the whole text of a kernel at every call, so each unused definition costs time in every
layer for every token. A definition stays if its name occurs in the body or in another definition that stays.
If the name of an unused definition occurs in the text by chance, the text is longer than necessary, but still
correct.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_WORD = re.compile(r"[A-Za-z_]\w*")
_MACRO = re.compile(r"#define\s+(\w+)")
_FUNCTION = re.compile(r"\b(?:FN|CONST_FN)\b.*?(\w+)\s*(?:<[^<>]*>)?\s*\(", re.S)
_TYPE = re.compile(r"\bstruct\s+(\w+)")
_CONSTANT = re.compile(r"\bCONSTANT\s+\w+\s+(\w+)")
# the maximum number of empty lines that are written out; for more lines, a #line directive is shorter
GAP = 20


@dataclass(frozen=True)
class Definition:
    """One top-level piece (a function, a macro, a type ...) of a C header. names: the names that it defines;
    a piece without names always stays."""

    file: str
    line: int
    code: str

    @property
    def names(self) -> set[str]:
        if self.code.startswith("enum"):
            return set(_WORD.findall(self.code)) - {"enum"}
        patterns = (_MACRO,) if self.code.startswith("#") else (_FUNCTION, _TYPE, _CONSTANT)
        return {found[1] for pattern in patterns if (found := pattern.search(self.code))}


def definitions(file: str, code: str, first: int = 1) -> Iterator[Definition]:
    """Yield the pieces of a header, which has no comments. first: the number of its first line."""
    piece: list[str] = []
    for number, line in enumerate(code.split("\n"), first):
        if not piece and not line.strip():
            continue
        piece.append(line)
        whole = "\n".join(piece)
        if _is_whole(whole):
            yield Definition(file, number + 1 - len(piece), whole)
            piece = []
    if piece:
        raise ValueError(f"{file} ends within a definition: {piece[0]}")


def _is_whole(piece: str) -> bool:
    if piece.startswith("#"):
        return not piece.endswith("\\")
    return piece.count("{") == piece.count("}") and piece.rstrip().endswith(("}", ";"))


def prune(pieces: Sequence[Definition], body: str) -> list[Definition]:
    """Return the pieces of the headers that a kernel's body needs, directly or through other pieces. The
    order of the pieces does not change."""
    words, kept = set(_WORD.findall(body)), set[Definition]()
    while fresh := {p for p in pieces if p not in kept and (not p.names or p.names & words)}:
        words |= {word for piece in fresh for word in _WORD.findall(piece.code)}
        kept |= fresh
    return [piece for piece in pieces if piece in kept]


def join_definitions(pieces: Sequence[Definition]) -> str:
    """Return the text of these pieces of C code. #line directives let compilers report the original files and
    lines."""
    out, file, line = "", "", 0
    for piece in pieces:
        gap = piece.line - line
        out += "\n" * gap if piece.file == file and 0 <= gap < GAP else f'#line {piece.line} "{piece.file}"\n'
        out += piece.code + "\n"
        file, line = piece.file, piece.line + piece.code.count("\n") + 1
    return out

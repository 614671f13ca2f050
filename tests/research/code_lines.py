"""Count the lines of the package's Python, all of them and those with code, at each given commit.

    python -m tests.research.code_lines [COMMIT...]

A line with code is neither empty nor only a comment or a part of a docstring.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter

PACKAGE = ("ruvmlx", "apps")
BLANK = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def main() -> None:
    for commit in sys.argv[1:] or ["HEAD"]:
        code, whole = Counter[str](), Counter[str]()
        names = _git("ls-tree", "-r", "--name-only", commit, *PACKAGE).split()
        for name in (name for name in names if name.endswith(".py")):
            source, room = _git("show", f"{commit}:{name}"), "/".join(name.split("/")[:2])
            code[room] += len(code_lines(source))
            whole[room] += source.count("\n")
        print(f"{commit}: {code.total():,} lines with code of {whole.total():,}")
        for room, count in code.most_common():
            print(f"{room:<24}{count:>8,}{whole[room]:>8,}")


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines with code."""
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {line for t in tokens if t.type not in BLANK for line in range(t.start[0], t.end[0] + 1)}
    return found - docstrings


def _git(*words: str) -> str:
    return subprocess.run(("git", *words), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()

"""What MLX gets of a kernel's files: no comments, the same tokens, the same line numbers."""

import re
import shutil
import subprocess

import pytest

from ruvmlx.backends.mlx.kernels import decode, prune, rope_append
from ruvmlx.backends.mlx.kernels.source import folder, text, without_comments

from .kernels import KERNELS

FILES = sorted(file.name for file in folder().iterdir() if file.suffix in (".h", ".metal"))


@pytest.mark.parametrize(
    "code,left",
    [
        ("int a; // one\nint b;", "int a;\nint b;"),
        ("// all of it\nint b;", "\nint b;"),
        ("int a;/* x */int b;", "int a; int b;"),
        ("a /* one\ntwo */ b", "a\nb"),
        ("if (x) {\n    int a;  \n}", "if (x) {\nint a;\n}"),
        ('f("no // comment", \'"\'); // one', 'f("no // comment", \'"\');'),
        ('f("\\" /* still text */"); /* one */', 'f("\\" /* still text */");'),
        ("f('\\'', '/'); // it's one", "f('\\'', '/');"),
        ("int n = 1'000; // it's one", "int n = 1'000;"),
        ("// goes on \\\nhere\nint b;", "\n\nint b;"),
        ("a / b; // one\n#pragma X", "a / b;\n#pragma X"),
        ("/**/ // one", ""),
        ('asm("{%0, //}" : "=f"(y)); // "', 'asm("{%0, //}" : "=f"(y));'),
    ],
)
def test_comments_go_and_literals_stay(code, left):
    assert without_comments(code) == left


@pytest.mark.parametrize("name", FILES)
def test_lines_keep_their_numbers(name):
    """A compiler's NAME:LINE is a line of the file in the repository."""
    line, _, code = text(name).partition("\n")
    first = int(line.split()[1]) - 1
    whole = (folder() / name).read_text().split("\n")
    assert line == f'#line {first + 1} "{name}"'
    for ours, theirs in zip(code.split("\n"), whole[first:], strict=False):
        assert theirs.lstrip().startswith(ours)
    assert "//" not in code and "/*" not in code


@pytest.mark.parametrize("name", FILES)
def test_compilers_see_the_same_tokens(name, tmp_path):
    """GCC takes the comments out by itself (-fpreprocessed leaves macros alone)."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc to compare with")

    def tokens(code: str) -> list[str]:
        file = tmp_path / "file.cpp"
        file.write_text(code)
        flags = ["-fpreprocessed", "-dD", "-E", "-P"]
        done = subprocess.run(["gcc", *flags, str(file)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    whole = tokens((folder() / name).read_text())
    assert whole == tokens(without_comments((folder() / name).read_text()))
    assert len(whole) > 20


HEADER = """\
#define FN inline
#define TWICE(x) ((x) + \\
    (x))
#define UNUSED 1

enum {
    RED = 1,
    GREEN,
};
struct Pair { int a, b; };
template <int N> FN int half_of(Pair p) {
    return p.a / N;
}
template <> FN int half_of<0>(Pair) { return GREEN; }
FN int doubled(int x) { return TWICE(x); }
CONSTANT int PAGE = 64;
"""


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("", []),
        ("x = UNUSED_NAME;", []),
        ("x = doubled(1);", [1, 2, 15]),
        ("x = half_of<2>(p);", [1, 6, 10, 11, 14]),
        ("int p[PAGE];", [16]),
        ("x = RED;", [6]),
    ],
)
def test_a_definition_stays_if_the_body_needs_it(body, kept):
    """Directly or not, with all of a template's specialisations; and every line keeps its number."""
    found = prune.prune(list(prune.definitions("h.h", HEADER)), body)
    assert [piece.line for piece in found] == kept
    text = prune.join_definitions(found)
    line = 0
    for code in text.split("\n"):
        if numbered := re.fullmatch(r'#line (\d+) "h.h"', code):
            line = int(numbered[1]) - 1
        elif code:
            assert HEADER.split("\n")[line] == code
            line += 1
        else:
            line += 1


def test_a_header_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match=r"h\.h ends within a definition: FN int f"):
        list(prune.definitions("h.h", "FN int f() {\n  return 1;\n"))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_a_kernel_s_text_has_no_definition_that_nothing_needs(kernel):
    """A name of each definition occurs at a second place of the text."""
    text = kernel.header("metal") + kernel.metal_body()
    for piece in prune.definitions("all", kernel.header("metal").strip()):
        assert not piece.names or any(len(re.findall(rf"\b{name}\b", text)) > 1 for name in piece.names)


def test_the_text_of_a_layer_is_small():
    """What MLX builds and hashes in each layer of each token, in bytes: 36,462 with whole headers."""
    layer = (rope_append.ROPE_APPEND, decode.ATTEND, decode.MERGE)
    assert sum(len(kernel.header("metal") + kernel.metal_body()) for kernel in layer) < 21_000

"""What MLX gets of a kernel's files: no comments, the same tokens, the same line numbers."""

import shutil
import subprocess

import pytest

from ruvmlx.backends.mlx.kernels.source import folder, text, without_comments

from .kernels import KERNELS

FILES = sorted(file.name for file in folder().iterdir() if file.suffix in (".h", ".metal"))


@pytest.mark.parametrize(
    "code,left",
    [
        ("int a; // one\nint b;", "int a;\nint b;"),
        ("// all of it\nint b;", "\nint b;"),
        ("int a;/* x */int b;", "int a; int b;"),
        ("a /* one\ntwo */ b", "a\n b"),
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
        assert theirs.startswith(ours)
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


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_it_is_shorter(kernel):
    files = [f"{kernel.name}.metal", "dialect_metal.h", *kernel.headers]
    whole = sum(len((folder() / name).read_text()) for name in files)
    assert len(kernel.body() + kernel.header("metal")) < 0.85 * whole

"""Builds that all tests, processes and runs share: each is made once for what it is made of.

They lie in build/tests/, which git ignores; delete that folder to make everything again.
"""

import ast
import fcntl
import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILDS = ROOT / "build" / "tests"
UNUSED = 14 * 24 * 3600  # seconds after which a build that nobody took is deleted


def digest(*parts: object) -> str:
    """A name for these values. Each has its length in front, so that no two lists of values look alike."""
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(b"%d:" % len(data) + data)
    return found.hexdigest()[:24]


@cache
def contents(*places: Path) -> str:
    """A name for what these files and folders hold, when the process asks first."""
    return _name_of(places, Path.read_bytes)


@cache
def code(*places: Path) -> str:
    """The same name, but comments, layout and docstrings of Python and C files do not count. The docstring
    of a module counts if the module reads it.
    """
    return _name_of(places, lambda file: _CODE_OF.get(file.suffix, Path.read_bytes)(file))


def _name_of(places: Iterable[Path], read: Callable[[Path], bytes]) -> str:
    files = sorted(file for place in places for file in _files(place))
    return digest(*(part for file in files for part in (file.name, read(file))))


@cache
def _code_of_python(file: Path) -> bytes:
    source = file.read_bytes()
    tree = ast.parse(source)
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if b"__doc__" not in source:
        documented += (ast.Module,)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree).encode()


@cache
def _code_of_c(file: Path) -> bytes:
    """The file without comments, blank lines and spaces at the end of lines. Strings stay as they are."""
    text = _COMMENT_OR_STRING.sub(lambda found: found["string"] or b" ", file.read_bytes())
    return b"\n".join(line.rstrip() for line in text.splitlines() if line.strip())


_COMMENT_OR_STRING = re.compile(
    rb"/\*.*?\*/|//[^\n]*|(?P<string>\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*')", re.DOTALL
)
_CODE_OF = {".py": _code_of_python, ".c": _code_of_c, ".h": _code_of_c}


def _files(place: Path) -> Iterable[Path]:
    if place.is_file():
        return [place]
    return (file for file in place.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


@contextmanager
def build_folder(kind: str, *inputs: object) -> Iterator[Path]:
    """The folder of a build with these inputs. Other processes that want it wait until the block ends."""
    folder = BUILDS / kind / digest(*inputs)
    folder.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder.touch()
        yield folder


def built_file(kind: str, make: Callable[[Path], object], *inputs: object) -> Path:
    """The file that make(path) writes, made at most once for these inputs."""
    with build_folder(kind, *inputs) as folder:
        file, part = folder / "made", folder / "part"
        if not file.exists():
            make(part)
            part.replace(file)
        return file


def drop_unused() -> None:
    """Delete builds that no test took for long."""
    for folder in [f for f in BUILDS.glob("*/*") if f.is_dir() and time.time() - f.stat().st_mtime > UNUSED]:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".lock").unlink(missing_ok=True)

"""Words of the program's messages, by a walk through its source."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "ruvmlx").rglob("*.py"), *(ROOT / "apps").rglob("*.py")])
BINARY = ("KiB", "MiB", "GiB")


def texts(path):
    """Literals of a file that a user may see: all but docstrings."""
    tree = ast.parse(path.read_text("utf-8"))
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


@pytest.mark.parametrize("folder", ["ruvmlx", "apps"])
def test_sizes_have_decimal_units(folder):
    """As files and disks are sold, and as the model list has them: one unit beside another misleads."""
    found = {
        str(path.relative_to(ROOT)): text
        for path in FILES
        for text in texts(path)
        if path.is_relative_to(ROOT / folder) and any(unit in text for unit in BINARY)
    }
    assert not found


def test_one_spelling():
    """American and British forms do not stand beside each other."""
    found = [(path.name, text) for path in FILES for text in texts(path) if "learnt" in text.lower()]
    assert not found

"""No function, class, constant or field of the package is without a caller (dead code)."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ("ruvmlx", "apps")
# Names that a library calls: textual's actions, events and watchers, jinja2's visitors, Python's own.
CALLED_BY_A_LIBRARY = re.compile(r"__\w+__|(action|watch|visit|on|_on|render|compose|validate)_\w+")
# Methods that a library's class also has, so that the library calls ours in their place.
OVERRIDES = {
    "_fatal_error", "check_action", "disable_input", "get_selection", "run_input_thread",
    "stop_application_mode", "unhandled_token",  # textual
    "format_epilog", "format_options", "get_error_hint",  # click
    "send_400_response",  # uvicorn
}  # fmt: skip


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the functions and classes without a decorator, and of the module's constants. A
    decorated function has a caller: its decorator hands it on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not node.decorator_list:
                yield node.name
        elif isinstance(node, ast.Assign) and node in tree.body:
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (name.id for name in names if isinstance(name, ast.Name))


def names_without_caller(sources: list[str], others: list[str]) -> set[str]:
    """Return the names that `sources` define, and that neither `sources` nor `others` mention once more."""
    defined = Counter(name for source in sources for name in definitions(ast.parse(source)))
    mentioned = Counter(word for source in sources + others for word in re.findall(r"\w+", source))
    return {name for name, count in defined.items() if mentioned[name] <= count}


def texts(*folders: str) -> list[str]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path.read_text("utf-8") for path in files if path != Path(__file__)]


def test_every_name_has_a_caller():
    found = names_without_caller(texts(*PACKAGE), texts("tests", ".ci"))
    assert {name for name in found if not CALLED_BY_A_LIBRARY.fullmatch(name)} == OVERRIDES


@pytest.mark.parametrize(
    ("planted", "found"),
    [("def helper(): ...", {"helper"}), ("A, B = 1, 2\nprint(A)", {"B"}), ("class Old: ...", {"Old"}),
     ("@register\ndef verb(): ...", set()), ("def f(): ...\nf()", set())],
)  # fmt: skip
def test_a_planted_name_without_a_caller_is_found(planted, found):
    assert names_without_caller([planted], []) == found

"""Limits on names and sizes that hold in the whole tree: ruvmlx/ and apps/.

Each exception below is a debt. A test also fails when an exception is no longer needed, so the lists only get
shorter.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_METHODS, MOST_LINES, LONGEST_CHAIN = 30, 400, 2

# Functions whose name is one participle, which says neither what they do nor return. Each has a reason: the
# public API has `learned`, the store has a column `thought`, and other replies have a field `finished`.
PARTICIPLE_FUNCTIONS = 4
# Constants whose name is one superlative, which does not say of what. Fewer each time.
SUPERLATIVE_CONSTANTS = 0

# Class names that are defined more than once.
SHARED_NAMES: set[str] = set()
# Classes with more than MOST_METHODS methods.
BIG_CLASSES: set[str] = set()
# Classes at the end of a chain of more than LONGEST_CHAIN classes of our own.
LONG_CHAINS: set[str] = set()
# Modules of more than MOST_LINES lines.
LONG_MODULES: set[str] = set()


@cache
def modules() -> dict[str, str]:
    """Source by path, relative to the repository."""
    files = [file for folder in ("ruvmlx", "apps") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """(path, definition) of every class, nested ones too."""
    trees = {path: ast.parse(source) for path, source in modules().items()}
    return [
        (path, node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]


def base_names(node: ast.ClassDef) -> list[str]:
    """Last part of each base's name: `widgets.Card[T]` is "Card"."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    return [ast.unparse(base).rpartition(".")[2] for base in bases]


@cache
def ancestors() -> dict[str, set[str]]:
    """Names of our own classes, and of their bases among them."""
    own = {node.name for _, node in classes()}
    found: dict[str, set[str]] = {name: set() for name in own}
    for _, node in classes():
        found[node.name] |= own & set(base_names(node)) - {node.name}
    return found


@cache
def chain(name: str) -> int:
    """Number of our own classes from this one up to its farthest ancestor. An exception counts as one: a tree
    of errors is a list of names, not of layers."""
    return 1 if name in errors() else 1 + max(map(chain, ancestors()[name]), default=0)


@cache
def errors() -> set[str]:
    """Our exceptions: classes that end at Exception."""
    found = {"Exception"}
    while more := {n.name for _, n in classes() if found & set(base_names(n))} - found:
        found |= more
    return found


def test_a_class_name_is_defined_once():
    places = defaultdict(list)
    for path, node in classes():
        places[node.name].append(f"{path}:{node.lineno}")
    shared = {name: where for name, where in places.items() if len(where) > 1}
    assert set(shared) == SHARED_NAMES, {n: shared.get(n) for n in set(shared) ^ SHARED_NAMES}


def test_a_class_has_few_methods():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    counts = {node.name: sum(isinstance(item, functions) for item in node.body) for _, node in classes()}
    big = {name: count for name, count in counts.items() if count > MOST_METHODS}
    assert set(big) == BIG_CLASSES, big


def test_a_chain_of_bases_is_short():
    long = {node.name: chain(node.name) for _, node in classes() if chain(node.name) > LONGEST_CHAIN}
    assert set(long) == LONG_CHAINS, long


def test_a_module_is_short():
    lengths = {path: source.count("\n") for path, source in modules().items()}
    long = {path: lines for path, lines in lengths.items() if lines > MOST_LINES}
    assert set(long) == LONG_MODULES, long


IRREGULAR = {
    "begun", "beside", "bound", "broken", "chosen", "drawn", "driven", "due", "found", "frozen", "given",
    "held", "hidden", "kept", "known", "left", "lost", "made", "meant", "met", "over", "said", "seen", "sent",
    "shown", "sought", "spent", "spoken", "taken", "taught", "thought", "told", "understood", "within",
    "without", "written",
}  # fmt: skip
NO_PARTICIPLES = {"embed", "feed", "need", "red", "seed", "shed", "speed", "zed"}  # Zed is an editor
SUPERLATIVES = {
    "BEST", "BIGGEST", "ENOUGH", "FEWEST", "LARGEST", "LEAST", "LONGEST", "MANY", "MOST", "NEWEST", "RECENT",
    "SHORTEST", "SMALLEST",
}  # fmt: skip


def is_participle(name: str) -> bool:
    """Is a function's name one word that is a participle?"""
    word = name.strip("_")
    return word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in NO_PARTICIPLES)


def participle_functions() -> list[str]:
    """path:line name of each, nested ones too."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, source in modules().items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_participle(node.name)
    ]


def superlative_constants() -> list[str]:
    """path name of each constant of a module."""
    return [
        f"{path} {target.id}"
        for path, source in modules().items()
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.strip("_") in SUPERLATIVES
    ]


def test_few_functions_are_named_by_a_participle_alone():
    found = participle_functions()
    assert len(found) == PARTICIPLE_FUNCTIONS, "\n".join(["name it by a verb or a noun:", *found])


def test_few_constants_are_a_superlative_alone():
    found = superlative_constants()
    assert len(found) == SUPERLATIVE_CONSTANTS, "\n".join(["say of what:", *found])


def test_the_limits_see_what_they_forbid():
    """The tree is found, and a chain is counted through our own classes alone."""
    assert len(modules()) > 200 and len(classes()) > 200
    assert base_names(ast.parse("class A(pages.Page[int], Protocol): ...").body[0]) == ["Page", "Protocol"]
    assert chain("MLXBackend") == 2 and chain("RuvmlxError") == 1
    assert is_participle("_held") and is_participle("asked") and not is_participle("held_bytes")
    assert not is_participle("speed") and not is_participle("read")

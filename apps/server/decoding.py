"""This module decodes request bodies from JSON into structs. If a body does not fit its struct, the error
names the first wrong field."""

import re
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar
from urllib.parse import parse_qsl

import msgspec

from .errors import ApiError
from .request_fields import is_unused, reason_of, take_unused

B = TypeVar("B")
Q = TypeVar("Q", bound=msgspec.Struct)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
# the error of the library for a float in the place of an integer, with the path of that place
_FLOAT = re.compile(r"Expected `(?:[^`]* )?int(?: [^`]*)?`, got `float` - at `\$(?P<path>[^`]+)`")
_ITEM = re.compile(r"\[[^]]*\]")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[\]")
# what a field may be, if the error of the library does not say it
_HINTS = {
    "rating": "a rating is up, down, or 1 to 5",
    "tool_choice": "it is none, auto, required, or one function",
    "tool_choice.type": "it is none, auto, required, or one function; give only the allowed tools",
    "truncation": "a prompt that is too long is an error, so leave the field out",
}
_PART_TYPE = re.compile(r".*content\[\d+\](\.content\[\d+\])?(\.source)?\.type")
_IMAGES = re.compile(r"(messages\[\d+\]\.)?images")
_TOOL_TYPE = re.compile(r"tools\[\d+\](\.tools\[\d+\])?\.type")
# half of a character beyond U+FFFF: one escape of a pair without the other
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
# query fields of OpenAI's clients that change nothing; the clients write brackets after the name of a list
_UNUSED_QUERY = frozenset({"include", "include[]"})
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`", re.DOTALL)


class Decoded(NamedTuple, Generic[B]):
    """A request body as its struct. ignored: the paths of fields that the client sent but that change
    nothing."""

    body: B
    ignored: list[str]


def decode(data: bytes, kind: type[B]) -> Decoded[B]:
    """Decode a request body into its struct. Raise ApiError, 400, if the body is not JSON or does not fit the
    struct. If the body does not fit the struct, the error has the name of the first wrong field.

    Most bodies have no ignored fields, so the function first tries to decode the whole body at once. If the
    struct needs no field, an empty body is the same as an object without fields.
    """
    if not data and not needs_fields(kind):
        data = b"{}"
    try:
        try:
            return Decoded(msgspec.json.decode(data, type=kind), [])
        except msgspec.ValidationError:
            return _decoded_in_steps(data, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = _short(str(error))
        if _HALF_CHARACTER.search(data):
            reason = "a \\u escape is half of a character (a lone surrogate); send whole characters"
        raise ApiError(400, f"the body is not JSON: {reason}.", code="invalid_json") from None


def needs_fields(kind: type) -> bool:
    """Return True if a body of this struct must have a field."""
    return any(field.required for field in msgspec.structs.fields(kind))


def _decoded_in_steps(data: bytes, kind: type[B]) -> Decoded[B]:
    """Decode a body that does not fit its struct. Remove the fields that change nothing. Where the struct
    needs an integer, change a float such as 2.0 to an integer, because JSON does not distinguish the two
    types. Other floats stay, for example in the schema of a tool.

    msgspec reports one path per error. The function corrects the value at this path and tries again. All
    items of a list have the same path, so the function tries only a few times.
    """
    value = msgspec.json.decode(data)
    ignored = take_unused(value, kind)
    changed = set[str]()
    while True:
        try:
            return Decoded(msgspec.convert(value, kind), ignored)
        except msgspec.ValidationError as error:
            found = _FLOAT.fullmatch(str(error))
            path = _ITEM.sub("[]", found["path"]) if found else ""
            if not path or path in changed:
                _refuse(_error_of_types(value, kind) or str(error), kind)
        changed.add(path)
        _make_integers(value, [step["name"] for step in _STEP.finditer(path)])


def _error_of_types(value: Any, kind: type) -> str:
    """Return the library's error for a body that does not fit its struct. Return "" if the body fits. The
    library reads the fields of an object in their order, and names the first wrong field. So the function
    first moves the field `type` to the beginning of each object. Without this step, the error for an image
    could name an unknown field of the image in place of the type."""
    left = [value]
    while left:
        here = left.pop()
        if isinstance(here, dict):
            if "type" in here:
                fields = {"type": here.pop("type"), **here}
                here.clear()
                here.update(fields)
            left += here.values()
        elif isinstance(here, list):
            left += here
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def decode_query(data: bytes, kind: type[Q]) -> Q:
    """Return the query string of a URL as a struct. The function ignores the fields of _UNUSED_QUERY. Raise
    ApiError, 400, if a field is wrong or occurs twice. Only the error for a wrong field has the field's
    name."""
    pairs = parse_qsl(data.decode("latin-1"), keep_blank_values=True)
    pairs = [pair for pair in pairs if pair[0] not in _UNUSED_QUERY]
    known = {field.name for field in msgspec.structs.fields(kind)}
    names = [name for name, _ in pairs if name in known]
    if len({*names}) < len(names):
        raise ApiError(400, "the query has a field twice.", code="invalid_value")
    try:
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        _refuse(str(error), kind)


def _make_integers(value: Any, steps: list[str | None]) -> None:
    """Change the floats without a fraction at a path into integers. steps: the names of the path's fields;
    None for all items of a list or an object."""
    name, *rest = steps
    if isinstance(value, list):
        keys: list[Any] = list(range(len(value))) if name is None else []
    elif isinstance(value, dict):
        keys = [key for key in value if name in (None, key)]
    else:
        return
    for key in keys:
        item = value[key]
        if rest:
            _make_integers(item, rest)
        elif isinstance(item, float) and item.is_integer():
            value[key] = int(item)


def _refuse(message: str, kind: type) -> NoReturn:
    what, _, place = message.partition(" - at `")
    inside = place.rpartition(" in `")[2]  # for a wrong key, `place` is: "key` in `$.logit_bias`"
    path = inside.removesuffix("`").removeprefix("$").removeprefix(".")
    if found := _UNKNOWN.search(what):
        raise _unknown(kind, _join(path, found["field"])) from None
    if found := _MISSING.search(what):
        param = _join(path, found["field"])
        raise ApiError(
            400, f"{param}: this field is required.", param, "missing_required_parameter"
        ) from None
    reason = _short(what[:1].lower() + what[1:])
    if _TOOL_TYPE.fullmatch(path):
        reason += "; only functions that the client runs are supported, so leave this tool out"
    if reason.endswith(r"regex '\\S'"):
        reason = "this text is empty"
    if hint := _HINTS.get(path):
        reason += f"; {hint}"
    if path in ("input", "input[0]") and kind.__name__ == "EmbeddingBody" and "got `" in reason:
        reason += "; token ids of another tokenizer mean nothing here (langchain-openai: "
        reason += "check_embedding_ctx_length=False)"
    if _PART_TYPE.fullmatch(path) or _IMAGES.fullmatch(path):
        reason += "; the server reads text alone: no images, sound or files"
    raise ApiError(400, f"{path or 'the body'}: {reason}.", path or None, "invalid_value") from None


def _unknown(kind: type, param: str) -> ApiError:
    reason = reason_of(kind, param)
    why = f": {reason}" if reason else ""
    if is_unused(kind, param):  # the server knows the field, but the value has a wrong type
        return ApiError(400, f"{param}: this value is not supported{why}.", param, "invalid_value")
    message = f"{param}: this server does not support this field{why}."
    return ApiError(400, message, param, "unsupported_parameter")


def _join(path: str, field: str) -> str:
    return _short(f"{path}.{field}" if path else field)


def _short(text: str) -> str:
    """Return the text in a short and printable form for the error, because a client can send any text as a
    field's name."""
    text = "".join(c if c.isprintable() else "?" for c in text.rstrip("."))
    return text if len(text) <= 200 else f"{text[:200]}..."

"""Arguments of calls have no undeclared properties, unless the schema asks; combined ones stay possible."""

import json

import jsonschema
import numpy as np
import pytest

from ruvmlx.engine.closed_schemas import close_schema
from ruvmlx.engine.constraint import matcher_for
from ruvmlx.engine.grammar import Constraint
from ruvmlx.engine.tools import prepare
from ruvmlx.models.config.model import Message

PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}}
# schema, arguments that stay possible, arguments that are no longer possible
CASES = {
    "flat": (PATH, [{}, {"path": "a"}], [{"required": ["path"]}, {"path": "a", "maxLength": 3}]),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    "nothing is said": ({"type": "object"}, [{}, {"a": 1}], []),
    "the schema asks": (PATH | {"additionalProperties": True}, [{"path": "a", "b": 1}], []),
    "a kind of others": (
        PATH | {"additionalProperties": NAME},
        [{"path": "a", "b": {"name": "c"}}],
        [{"b": {"name": "c", "d": 1}}],
    ),
    "patterns": (PATH | {"patternProperties": {"^x": {}}}, [{"path": "a", "x1": 1}], []),
    "nested": (
        {"type": "object", "properties": {"edits": {"type": "array", "items": PATH}}},
        [{"edits": [{"path": "a"}]}],
        [{"edits": [{"path": "a", "type": "string"}]}],
    ),
    "a property named properties": (
        {"type": "object", "properties": {"properties": {"type": "object"}}},
        [{"properties": {"a": 1}}],
        [{"a": 1}],
    ),
    "one of two": ({"anyOf": [PATH, NAME]}, [{"path": "a"}, {"name": "a"}], [{"path": "a", "b": 1}]),
    "all of two": ({"allOf": [PATH, NAME]}, [{"path": "a", "name": "b"}], []),
    "more by a branch": (PATH | {"anyOf": [NAME, {}]}, [{"path": "a", "name": "b"}], []),
    "a definition": (
        {"type": "object", "properties": {"at": {"$ref": "#/$defs/path"}}, "$defs": {"path": PATH}},
        [{"at": {"path": "a"}}],
        [{"at": {"path": "a", "b": 1}}],
    ),
    "a combined definition": (
        {"allOf": [{"$ref": "#/$defs/path"}, NAME], "$defs": {"path": PATH}},
        [{"path": "a", "name": "b"}],
        [],
    ),
    "a definition named as a property": (
        {"type": "object", "properties": {"path": PATH},
         "$defs": {"path": {"allOf": [{"$ref": "#/$defs/path"}]}}},
        [{"path": {"path": "a"}}],
        [{"path": {"b": 1}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_objects_are_closed(case):
    schema, possible, impossible = CASES[case]
    before = json.dumps(schema)
    found = close_schema(schema)
    assert json.dumps(schema) == before
    for value in possible:
        jsonschema.validate(value, found)
    for value in impossible:
        jsonschema.validate(value, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, found)


def _allows(model, constraint, text):
    """Can a reply be this text, and end there?"""
    matcher = matcher_for(model, constraint)
    for token in model.tokenizer.encode(text, add_bos=False):
        logits = np.zeros(model.shape.vocab_size, np.float32)
        matcher.restrict(logits)
        if logits[token] < 0:
            return False
        matcher.take(token)
    return matcher.is_complete


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("case", ["flat", "nested", "the schema asks", "one of two"])
def test_a_required_call_has_no_other_arguments(tiny, case, strict):
    """Whether it is strict or not; what the schema allows stays possible."""
    schema, possible, impossible = CASES[case]
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
    prepared = prepare(tiny, [Message("user", "hello")], [tool], "required", parallel=False)
    assert isinstance(prepared.constraint, Constraint)
    for arguments in possible + impossible:
        call = f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        assert _allows(tiny, prepared.constraint, call) == (arguments in possible), arguments

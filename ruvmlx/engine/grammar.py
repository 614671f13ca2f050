"""What a reply must fit: a JSON schema, a grammar or a regex, and its compilation by llguidance.

    Constraint.json_schema({"type": "object", ...})     Constraint.json_object()
    Constraint.lark("start: ...")                       Constraint.regex(r"\\d+")

Some hundred bytes of a schema can take hours or all memory to compile. So a child with limits
compiles each one first, for a vocabulary of bytes (`platform/bounded_process.py`). Only what it can compile
is compiled here, for the model's vocabulary: that takes about as long, and other threads go on meanwhile.

What does not fit is refused by name, never left out: a keyword of JSON Schema that llguidance does not know
is a UsageError.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from queue import LifoQueue
from typing import Any

from ..errors import Interrupted, UsageError
from ..platform.bounded_process import BoundedProcess, ProcessEnded, ProcessStopped, answer_requests
from ..text import one_line

SECONDS, OPENING = 2.0, 1.0  # of processor time, for a schema and for the child's start
MEMORY = 256 << 20  # bytes
AT_ONCE = 2  # children
KNOWN = 1024  # refusals that are remembered
MOST_CHARACTERS = 1 << 19  # of a schema or a grammar
_KINDS = {
    "json": "the JSON schema",
    "loose json": "the JSON schema",
    "lark": "the grammar",
    "regex": "the regular expression",
}
# Endless space is JSON, too, and small models fall for it: 40 characters are an indent of 20 levels.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
# As json.dumps and the filter tojson write it: so the next turn begins with what the cache has.
_AS_TEMPLATES = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# Of llguidance: 20 ms for the regexes of a grammar, 15 ms for a mask, about 60 MB for the lexer's states.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 40_000,
}


@dataclass(frozen=True)
class Constraint:
    """A description of the replies that are allowed. kind: "json" | "loose json" | "lark" | "regex"; source:
    its text."""

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, loose: bool = False) -> "Constraint":
        """JSON that fits the schema (draft 4 to 2020-12). References must stay within it. loose: keywords
        that are not known count as no restriction; else they are an error."""
        if not isinstance(schema, Mapping | bool):
            raise UsageError(
                f"the JSON schema is {one_line(str(schema))[:40]}; it must be an object, true or false."
            )
        try:
            return cls("loose json" if loose else "json", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema is not JSON: {one_line(str(error))[:200]}.") from None

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls("json", '{"type": "object"}')

    @classmethod
    def lark(cls, grammar: str) -> "Constraint":
        """A text of the grammar, in llguidance's form of Lark; `start` is its first rule."""
        return cls("lark", grammar)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """A text that the whole pattern matches."""
        return cls("regex", pattern)

    @property
    def name(self) -> str:
        """In words for people."""
        return _KINDS[self.kind]

    def json_rule(self) -> str:
        """Of a JSON schema that is an object: a part of a Lark grammar."""
        return json_rule(json.loads(self.source), self.kind == "loose json")


def json_rule(schema: Mapping[str, Any], loose: bool = False, as_templates: bool = False) -> str:
    """JSON that fits the schema, as a part of a Lark grammar; loose: as in `Constraint.json_schema`.
    as_templates: with space only where chat templates write it."""
    options = {**_json_options(loose), **(_AS_TEMPLATES if as_templates else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _json_options(loose: bool) -> dict[str, Any]:
    return {**_JSON, "lenient": loose, "coerce_one_of": loose}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Of a model. tokens: an LLTokenizer of `size` tokens; special: those that a grammar may name."""

    tokens: Any
    size: int
    special: Mapping[str, int]


@lru_cache(maxsize=32)
def compiled_matcher(vocabulary: Vocabulary, constraint: Constraint) -> Any:
    """An LLMatcher at the beginning of a reply; `deep_copy` it. UsageError if the
    constraint is not sound, or takes too much to compile."""
    size = len(constraint.source)
    if size > MOST_CHARACTERS:
        raise UsageError(f"{constraint.name} has {size} characters; at most {MOST_CHARACTERS} are allowed.")
    _check(vocabulary, constraint)
    return _compile_matcher(vocabulary.tokens, constraint)


def _compile_matcher(tokens: Any, constraint: Constraint) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS, verbose_errors=False)
    try:
        made = LLMatcher(tokens, _grammar(constraint), log_level=0, limits=limits)
    except ValueError as error:
        raise _refusal(constraint, str(error)) from None
    if made.is_error():
        raise _refusal(constraint, made.get_error())
    return made


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind in ("json", "loose json"):
        options: Any = _json_options(constraint.kind == "loose json")
        return LLMatcher.grammar_from_json_schema(constraint.source, overrides=options)
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    return LLMatcher.grammar_from_lark(constraint.source)


def _refusal(constraint: Constraint, why: str) -> UsageError:
    return UsageError(f"{constraint.name} cannot be used: {one_line(why)[:200]}.")


# In a child ---------------------------------------------------------------------------------------

_refusals: OrderedDict[str, str] = OrderedDict()  # by a hash of the constraint: why it cannot be used
_children: LifoQueue[BoundedProcess] = LifoQueue()
for _ in range(AT_ONCE):
    _children.put(BoundedProcess(__name__, opening=OPENING))


def _check(vocabulary: Vocabulary, constraint: Constraint) -> None:
    """UsageError if a child with limits cannot compile the constraint."""
    request = [constraint.kind, constraint.source, vocabulary.size, dict(vocabulary.special)]
    key = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    if why := _refusals.get(key):
        raise UsageError(why)
    child = _children.get()
    try:
        child.ask(request, SECONDS, MEMORY)
    except ProcessStopped:
        raise Interrupted(f"ruvmlx was stopped before {constraint.name} was compiled.") from None
    except ProcessEnded:
        limits = f"{SECONDS:.0f} seconds of work and {MEMORY >> 20} MB"
        why = f"{constraint.name} takes more than {limits} to compile. Make it simpler."
        raise _remember_refusal(key, why) from None
    except UsageError as error:
        raise _remember_refusal(key, str(error)) from None
    finally:
        _children.put(child)


def _remember_refusal(key: str, why: str) -> UsageError:
    _refusals[key] = why
    while len(_refusals) > KNOWN:
        _refusals.popitem(last=False)
    return UsageError(why)


class _Bytes:
    """The smallest vocabulary with a model's special tokens: 256 bytes have other ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, size: int, special: Mapping[str, int]):
        special = {text: i for text, i in special.items() if i < size}
        self.eos_token_id = size
        self.special_token_ids = [*special.values(), size]
        self.tokens = [b""] * size + [b"\xff<end>"]
        taken = set(special.values())
        free = (i for i in range(size) if i not in taken)
        for byte, i in zip(range(256), free, strict=False):
            self.tokens[i] = bytes([byte])
        for text, i in special.items():
            self.tokens[i] = b"\xff" + text.encode("utf-8", "replace")

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def _answer(request: list[Any]) -> None:
    from llguidance import LLTokenizer

    kind, source, size, special = request
    tokens: Any = _Bytes(size, special)
    _compile_matcher(LLTokenizer(tokens, slices=LLTokenizer.json_slices()), Constraint(kind, source))


if __name__ == "__main__":
    answer_requests(_answer)

"""This module holds constraints on a reply (JSON schema, grammar or regex). The library llguidance compiles
the constraints.

    Constraint.json_schema({"type": "object", ...})     Constraint.json_object()
    Constraint.lark("start: ...")                       Constraint.regex(r"\\d+")

A schema of some hundred bytes can take hours, or all memory, to compile. Because of such schemas, a child
process with limits of time and memory compiles each constraint first, for a vocabulary of single bytes
(`platform/bounded_process.py`). If the child succeeds, this process compiles the constraint for the model's
vocabulary. The second compilation takes about as long as the first one. The program's other threads continue
during both compilations.

If llguidance cannot apply a part of a constraint, the module refuses the whole constraint, except that the
kind "loose json" ignores the keywords of JSON Schema that llguidance does not know. With the kind "json",
such a keyword raises UsageError.
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

# SECONDS: the processor time (seconds) that one constraint can use; OPENING: the processor time for the start
# of a child process
SECONDS, OPENING = 2.0, 1.0
MEMORY = 256 << 20  # bytes: the memory limit of a child process
AT_ONCE = 2  # the maximum number of child processes that compile at the same time
KNOWN = 1024  # the maximum number of refused constraints that are remembered
MOST_CHARACTERS = 1 << 19  # the maximum number of characters of a schema or a grammar
_KINDS = {
    "json": "the JSON schema",
    "loose json": "the JSON schema",
    "lark": "the grammar",
    "regex": "the regular expression",
}
# JSON allows endless white space, and small models can write white space for ever. 40 characters are enough
# for an indent of 20 levels.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
# Write JSON as json.dumps and the template filter tojson do, so that the prompt of the next turn begins with
# the tokens that the cache has.
_AS_TEMPLATES = {
    "whitespace_pattern": None,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# llguidance counts these limits in its own units. The limits allow about 20 ms for the regexes of a grammar,
# about 15 ms for the set of allowed next tokens, and about 60 MB for the lexer.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 40_000,
}


@dataclass(frozen=True)
class Constraint:
    """A constraint describes which replies are allowed. kind: "json" | "loose json" | "lark" | "regex";
    source: the text of the schema, grammar or pattern."""

    kind: str
    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, loose: bool = False) -> "Constraint":
        """Return a constraint: the reply must be JSON that fits the schema (draft 4 to 2020-12). References
        must stay within the schema. loose: True: keywords that llguidance does not know are ignored; False: a
        keyword that llguidance does not know is an error."""
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
        """Return a constraint: the reply must be a JSON object."""
        return cls("json", '{"type": "object"}')

    @classmethod
    def lark(cls, grammar: str) -> "Constraint":
        """Return a constraint: the reply must be a text that the grammar allows (llguidance's Lark; rule
        `start`)."""
        return cls("lark", grammar)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Return a constraint: the regular expression must match the whole reply."""
        return cls("regex", pattern)

    @property
    def name(self) -> str:
        """Return the kind of the constraint in words for an error message."""
        return _KINDS[self.kind]

    def json_rule(self) -> str:
        """Return a part of a Lark grammar for this constraint, whose source must be a JSON schema in the form
        of an object."""
        return json_rule(json.loads(self.source), self.kind == "loose json")


def json_rule(schema: Mapping[str, Any], loose: bool = False, as_templates: bool = False) -> str:
    """Return a part of a Lark grammar that allows JSON that fits the schema. loose: True: ignore the keywords
    of the schema that llguidance does not know. as_templates: True: allow white space only where chat
    templates write white space."""
    options = {**_json_options(loose), **(_AS_TEMPLATES if as_templates else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _json_options(loose: bool) -> dict[str, Any]:
    return {**_JSON, "lenient": loose, "coerce_one_of": loose}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The vocabulary of a model. tokens: an LLTokenizer with `size` tokens; special: the special tokens that
    a grammar can name, with their ids."""

    tokens: Any
    size: int
    special: Mapping[str, int]


@lru_cache(maxsize=32)
def compiled_matcher(vocabulary: Vocabulary, constraint: Constraint) -> Any:
    """Return an LLMatcher at the beginning of a reply. Use only a `deep_copy` of the matcher, because later
    calls return the same matcher object. Raise UsageError if the constraint is not valid, or if its
    compilation takes too much time or memory."""
    size = len(constraint.source)
    if size > MOST_CHARACTERS:
        raise UsageError(f"{constraint.name} has {size} characters; at most {MOST_CHARACTERS} are allowed.")
    _check(vocabulary, constraint)
    return _compile_matcher(vocabulary.tokens, constraint)


def recompiled_matcher(vocabulary: Vocabulary, constraint: Constraint) -> Any:
    """Return a new LLMatcher, which shares nothing with the LLMatchers of earlier replies, for a constraint
    that `compiled_matcher` has compiled. Later calls of `compiled_matcher` also return new objects."""
    compiled_matcher.cache_clear()
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

# hash of a constraint and of the vocabulary's size and special tokens -> the reason why the constraint cannot
# be used
_refusals: OrderedDict[str, str] = OrderedDict()
_children: LifoQueue[BoundedProcess] = LifoQueue()
for _ in range(AT_ONCE):
    _children.put(BoundedProcess(__name__, opening=OPENING))


def _check(vocabulary: Vocabulary, constraint: Constraint) -> None:
    """Raise UsageError if a child process with limits of time and memory cannot compile the constraint, and
    Interrupted if the program stops the child."""
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
    """A vocabulary with the size and the special tokens of a model. Of the token ids that are not special,
    256 stand for the single bytes, and the remaining ids have no text."""

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

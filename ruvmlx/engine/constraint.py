"""Constraints: which token may come next, so that a finished reply fits a JSON schema, a grammar or a regex.

    Constraint.json_schema({"type": "object", ...})     Constraint.json_object()
    Constraint.lark("start: ...")                       Constraint.regex(r"\\d+")

`matcher_for` compiles one for a model; `Matcher` then follows one reply token by token and sets the logits of
all tokens that may not come to -inf. llguidance does the work: an Earley parser over the vocabulary's bytes.

What does not fit is refused by name, never left out: a keyword of JSON Schema that llguidance does not know
is a UsageError. A reply that is cut at max_new_tokens is a beginning of what the constraint describes. In a
thought that the prompt has opened, any token may come; the constraint begins behind it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..errors import RuvmlxError, UsageError
from ..models.messages import one_line
from ..models.model import Model, Tokenizer
from ..models.thinking import ThoughtCounter

MOST_CHARACTERS = 1 << 19  # of a schema or a grammar
_KINDS = {
    "json": "the JSON schema",
    "loose json": "the JSON schema",
    "lark": "the grammar",
    "regex": "the regular expression",
}
# Endless space is JSON, too, and small models fall for it: 40 characters are an indent of 20 levels.
_JSON = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
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
                f"the JSON schema is {one_line(schema, 40)}; it must be an object, true or false."
            )
        try:
            return cls("loose json" if loose else "json", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"the JSON schema is not JSON: {one_line(error)}.") from None

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


def json_rule(schema: Mapping[str, Any], loose: bool = False) -> str:
    """JSON that fits the schema, as a part of a Lark grammar; loose: as in `Constraint.json_schema`."""
    return f"%json {json.dumps({**schema, 'x-guidance': _json_options(loose)})}"


def _json_options(loose: bool) -> dict[str, Any]:
    return {**_JSON, "lenient": loose, "coerce_one_of": loose}


class Matcher:
    """Follows one reply and says which tokens may come next. Implements sampling.TokenRule."""

    def __init__(self, compiled: Any, vocab: int, thought: ThoughtCounter | None = None):
        """compiled: an LLMatcher of this reply alone. thought: of a reply that begins inside one."""
        self._matcher, self._thought = compiled, thought
        self._bits = np.zeros((vocab + 32) // 32, np.uint32)  # one bit for each token, one for `_NoEnd`

    @property
    def over(self) -> bool:
        """Nothing may follow, except the end token."""
        return self._begun and self._matcher.is_stopped()

    @property
    def _begun(self) -> bool:
        return self._thought is None or not self._thought.in_thought

    def restrict(self, logits: np.ndarray) -> None:
        if not self._begun:
            return
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if self._matcher.is_error():
            raise self._failed("has no next token")
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=logits.size)
        np.copyto(logits, -np.inf, where=allowed == 0)

    def take(self, token: int) -> None:
        if not self._begun and self._thought is not None:
            self._thought.add(token)
        elif not self._matcher.consume_token(token):
            raise self._failed(f"does not allow token {token}")

    def _failed(self, what: str) -> RuvmlxError:
        why = one_line(self._matcher.get_error())
        return RuvmlxError(f"the constraint on the reply {what}: {why}. Make the schema or grammar simpler.")


def matcher_for(model: Model, constraint: Constraint, opening: str = "") -> Matcher:
    """A matcher for one reply. opening: the tag of a thought that the prompt ends with, else "".

    UsageError if the constraint is not sound, or too large."""
    vocab = model.shape.vocab_size
    thought = ThoughtCounter(model.tokenizer, opening) if opening else None
    return Matcher(_compiled(_vocabulary(model.tokenizer, vocab), constraint).deep_copy(), vocab, thought)


@lru_cache(maxsize=32)
def _compiled(vocabulary: Any, constraint: Constraint) -> Any:
    """An LLMatcher at the beginning of a reply; `deep_copy` it."""
    from llguidance import LLMatcher, LLParserLimits

    size = len(constraint.source)
    if size > MOST_CHARACTERS:
        raise UsageError(f"{constraint.name} has {size} characters; at most {MOST_CHARACTERS} are allowed.")
    limits = LLParserLimits(**_LIMITS, verbose_errors=False)
    try:
        made = LLMatcher(vocabulary, _grammar(constraint), log_level=0, limits=limits)
    except ValueError as error:
        raise _refused(constraint, str(error)) from None
    if made.is_error():
        raise _refused(constraint, made.get_error())
    return made


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    if constraint.kind in ("json", "loose json"):
        options: Any = _json_options(constraint.kind == "loose json")
        return LLMatcher.grammar_from_json_schema(constraint.source, overrides=options)
    if constraint.kind == "regex":
        return LLMatcher.grammar_from_regex(constraint.source)
    return LLMatcher.grammar_from_lark(constraint.source)


def _refused(constraint: Constraint, why: str) -> UsageError:
    return UsageError(f"{constraint.name} cannot be used: {one_line(why, 200)}.")


# The vocabulary ----------------------------------------------------------------------------------


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of its tokens, the special ones marked with 0xFF.

    A vocabulary without an end token gets one behind its last token, which is never drawn: a reply ends as
    soon as nothing else may follow.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        special = {i: text for text, i in tokenizer.special_tokens.items()}
        self._tokenizer = tokenizer
        self.end_ids = sorted(i for i in tokenizer.eos_ids if i < vocab) or [vocab]
        self.eos_token_id = self.end_ids[0]
        self.special_token_ids = sorted({*(i for i in special if i < vocab), *self.end_ids})
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab + 1)]
        for i in self.special_token_ids:
            self.tokens[i] = b"\xff" + special.get(i, f"<end {i}>").encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a stretch inside a text, as the model itself would write it."""
        data = text if isinstance(text, bytes) else text.encode()
        words = data.decode("utf-8", "replace")
        ids = self._tokenizer.encode(words, add_bos=False)
        if self._spells(ids, data):
            return ids
        after = self._tokenizer.encode("\n" + words, add_bos=False)  # a space is put before a text's start
        return next((after[k:] for k in range(len(after)) if self._spells(after[k:], data)), [])

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        return b"".join(self.tokens[i] for i in ids) == data


_known: WeakKeyDictionary[Tokenizer, Any] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer, vocab: int) -> Any:
    """The LLTokenizer of a tokenizer; it is made once: 0.2 s for 49,152 tokens."""
    if tokenizer not in _known:
        from llguidance import LLTokenizer

        made: Any = _Vocabulary(tokenizer, vocab)
        _known[tokenizer] = LLTokenizer(
            made, n_vocab=vocab + 1, eos_token=made.end_ids, slices=LLTokenizer.json_slices()
        )
    return _known[tokenizer]

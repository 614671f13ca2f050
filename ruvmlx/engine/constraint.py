"""This module decides which tokens are allowed next, so that a finished reply fits a constraint
(`grammar.py`).

`matcher_for` compiles a constraint for a model. A `Matcher` then follows one reply token by token and sets
the logits of all forbidden tokens to -inf. The library llguidance does the work: it is an Earley parser over
the bytes of the vocabulary.

If a reply ends because of max_new_tokens, the reply can be only the start of a text that fits the constraint.
If the prompt ends with the tag that opens the model's thinking, every token is allowed in the thinking. The
constraint applies to the text after the thinking.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import numpy as np

from ..errors import UsageError
from ..models.config.model import Model, Tokenizer
from ..models.files.error_text import one_line
from ..models.text.thinking import ThoughtCounter
from .grammar import Constraint, Vocabulary, compiled_matcher, recompiled_matcher


class Matcher:
    """A matcher follows one reply and decides which tokens are allowed next. It implements
    sampling.TokenRule."""

    def __init__(self, compiled: Any, new: Callable[[], Any], vocab: int, thought: ThoughtCounter | None):
        """compiled: an LLMatcher that only this reply uses. new: a function that compiles the constraint
        again. thought: an object that follows the model's thinking, if the reply starts inside the
        thinking."""
        self._matcher, self._new, self._thought = compiled, new, thought
        self._taken: list[int] = []  # the tokens that the LLMatcher has read
        # the set of the allowed next tokens: one bit for each token, and one bit for the end token that
        # `_Vocabulary` adds
        self._bits = np.zeros((vocab + 32) // 32, np.uint32)

    @property
    def is_complete(self) -> bool:
        """Return True if the reply is complete, so that only the end token is allowed next."""
        return self._has_begun and self._matcher.is_stopped()

    @property
    def _has_begun(self) -> bool:
        return self._thought is None or not self._thought.in_thought

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, in order. The list is empty if several texts are
        allowed, or while the reply is still in the thinking."""
        return list(self._matcher.compute_ff_tokens()) if self._has_begun else []

    def restrict(self, logits: np.ndarray) -> None:
        if not self._has_begun:
            return
        if forced := self.forced_tokens():
            # Several sequences of tokens can spell the text that must come next. Choose the sequence that the
            # next turn's prompt will have for the same text, so that the next turn can use the KV cache.
            kept = logits[forced[0]]
            logits[:] = -np.inf
            logits[forced[0]] = kept
            return
        if not self._compute_bits() and not (self._start_anew() and self._compute_bits()):
            raise self._error("has no next token")
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little", count=logits.size)
        np.copyto(logits, -np.inf, where=allowed == 0)

    def take(self, token: int) -> None:
        if not self._has_begun and self._thought is not None:
            self._thought.add(token)
            return
        if not self._matcher.consume_token(token) and not (
            self._start_anew() and self._matcher.consume_token(token)
        ):
            raise self._error(f"does not allow token {token}")
        self._taken.append(token)

    def _compute_bits(self) -> bool:
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        return not self._matcher.is_error()

    def _start_anew(self) -> bool:
        """Replace the failed LLMatcher by a new one that has read the same tokens. All replies with one
        constraint share the states of one lexer. So the states of earlier replies can exceed the limit.
        Return False if the new LLMatcher fails, too."""
        self._matcher = self._new()
        return all(map(self._matcher.consume_token, self._taken))

    def _error(self, what: str) -> UsageError:
        why = one_line(self._matcher.get_error())
        return UsageError(f"the constraint on the reply {what}: {why}. Make the schema or grammar simpler.")


def matcher_for(model: Model, constraint: Constraint, opening: str = "") -> Matcher:
    """Return a matcher for one reply. Raises UsageError if the constraint is wrong, or needs too much time or
    memory to compile.

    opening: the tag at the end of the prompt that opens the model's thinking; "": no tag
    """
    vocab = model.shape.vocab_size
    thought = ThoughtCounter(model.tokenizer, opening) if opening else None
    vocabulary = _vocabulary(model.tokenizer, vocab)
    compiled = compiled_matcher(vocabulary, constraint).deep_copy()
    return Matcher(compiled, partial(recompiled_matcher, vocabulary, constraint), vocab, thought)


# The vocabulary ----------------------------------------------------------------------------------


class _Vocabulary:
    """This class gives llguidance the bytes of each token of a tokenizer. The bytes of a special token begin
    with 0xFF.

    If a vocabulary has no end token, this class adds an end token after the last token. The added end token
    is never drawn, because the logits have no entry for it; the reply ends as soon as only this end token is
    allowed.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int):
        special = {i: text for text, i in tokenizer.special_tokens.items()}
        # The LLTokenizer has a reference to this object. The garbage collector cannot see this reference. A
        # strong reference to the tokenizer would thus keep the tokenizer of a closed model in memory.
        self._tokenizer = ref(tokenizer)
        self.end_ids = sorted(i for i in tokenizer.eos_ids if i < vocab) or [vocab]
        self.eos_token_id = self.end_ids[0]
        self.special_token_ids = sorted({*(i for i in special if i < vocab), *self.end_ids})
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab + 1)]
        for i in self.special_token_ids:
            self.tokens[i] = b"\xff" + special.get(i, f"<end {i}>").encode()

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids with which the tokenizer encodes this text in the middle of a reply. Return []
        if the tokens do not spell exactly this text, or if the model was closed."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return []
        data = text if isinstance(text, bytes) else text.encode()
        words = data.decode("utf-8", "replace")
        ids = tokenizer.encode(words, add_bos=False)
        if self._spells(ids, data):
            return ids
        # Some tokenizers put a space before the first word of a text. A line break before the first word
        # prevents this space.
        after = tokenizer.encode("\n" + words, add_bos=False)
        return next((after[k:] for k in range(len(after)) if self._spells(after[k:], data)), [])

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        return b"".join(self.tokens[i] for i in ids) == data


_known: WeakKeyDictionary[Tokenizer, Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Tokenizer, vocab: int) -> Vocabulary:
    """Return the vocabulary for llguidance. The vocabulary of a tokenizer is made once and kept, because its
    construction takes 0.2 s for 49,152 tokens. The compiled constraints refer to the vocabulary, so they are
    dropped with the tokenizer."""
    if tokenizer not in _known:
        from llguidance import LLTokenizer

        made: Any = _Vocabulary(tokenizer, vocab)
        tokens = LLTokenizer(
            made, n_vocab=vocab + 1, eos_token=made.end_ids, slices=LLTokenizer.json_slices()
        )
        _known[tokenizer] = Vocabulary(tokens, vocab, tokenizer.special_tokens)
        finalize(tokenizer, compiled_matcher.cache_clear).atexit = False
    return _known[tokenizer]

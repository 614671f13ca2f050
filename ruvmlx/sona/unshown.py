"""This module lets the model write unshown replies: other replies to a rated reply's question, which no user
sees. The taste model (taste.py) compares the rated reply with the unshown replies.

If a user gives three stars to a reply of 80 words, perhaps the user wants short replies, or perhaps any reply
to this question has 80 words. The measures of a few other replies to the question tell which of the two
explanations is true. The original model writes these replies in idle time. Only their measures
(taste_measures.py) are stored.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..backends.base import Backend, original_model
from ..errors import NotFound
from ..models.config.model import Model
from ..models.text import thinking
from ..pausing import Pause
from ..store import Store
from .sampled_replies import BegunReply, begin_replies, sampled_replies, sampling_of
from .taste_measures import MEASURES, measure_text

REPLIES = 4  # the number of unshown replies to each question
MAX_REPLY_TOKENS = 96  # the maximum number of tokens in a reply
MAX_PROMPT_TOKENS = 2048  # no unshown replies to prompts with more tokens; these take too long to read
# the maximum number of rated replies with stored measures; the newest rated replies are kept
MAX_QUESTIONS = 1000
# This is the maximum number of questions whose unshown replies are written at the same time. A step for many
# replies reads the weights once.
TOGETHER = 5
SAVE_AFTER = 2 * TOGETHER  # the number of questions from one save of the measures to the next


class UnshownReplies:
    """The measures of one model's unshown replies in the store."""

    def __init__(self, store: Store, fingerprint: str):
        self._store, self._fingerprint = store, fingerprint

    def load(self) -> dict[str, np.ndarray]:
        """Return {id of a rated reply: measures [REPLIES, M] of unshown replies to its question}; {} if the
        stored data is missing or damaged."""
        found = self._store.unshown.load(self._fingerprint)
        return {id_: rows for id_, rows in found.items() if rows.shape == (REPLIES, len(MEASURES))}

    def usual(self) -> dict[str, np.ndarray]:
        """Return {id of a rated reply: mean measures [M] of the unshown replies to its question}. The means
        are rows of one array, so that they do not split the free memory of a server."""
        found = self.load()
        means = np.mean([*found.values()] or np.zeros((0, REPLIES, len(MEASURES))), axis=1)
        return dict(zip(found, means, strict=True))

    def complete(self, model: Model, backend: Backend, rated: Sequence[str], pause: Pause) -> int:
        """Let the model write unshown replies for the rated replies that have none, and store their measures.
        Prompts that were deleted, or that are longer than MAX_PROMPT_TOKENS, are left out. Replies whose
        unshown replies would be thoughts are left out, too. Return the number of rated replies for which
        unshown replies were written now. A small model needs about half a second for each rated reply, so
        call this function in idle time. Only the backend's thread can call this function.

        rated: the ids of the rated replies
        pause: a function that can raise an exception to stop; the finished part is stored
        """
        found, done, saved = self.load(), 0, 0
        groups = self._groups(model, [id_ for id_ in rated if id_ not in found])
        try:
            for some in groups:
                measured = _measure(model, backend, [*some.values()], pause)
                new = {id_: rows for id_, rows in zip(some, measured, strict=True) if rows is not None}
                found |= new
                done += len(new)
                if done - saved >= SAVE_AFTER:
                    self._save(found)
                    saved = done
        finally:
            if done > saved:
                self._save(found)
        return done

    def _groups(self, model: Model, rated: Sequence[str]) -> Iterator[dict[str, list[int]]]:
        """Yield groups {id of a rated reply: its prompt} of the prompts to which unshown replies can be
        written. A group has at most TOGETHER prompts, which together have at most MAX_PROMPT_TOKENS tokens.
        So a group takes little memory, and a stop loses little work."""
        group: dict[str, list[int]] = {}
        for id_ in rated:
            prompt = self._prompt(id_)
            if not 0 < len(prompt) <= MAX_PROMPT_TOKENS or thinking.opened_by(model.tokenizer, prompt):
                continue
            tokens = sum(map(len, group.values())) + len(prompt)
            if group and (len(group) == TOGETHER or tokens > MAX_PROMPT_TOKENS):
                yield group
                group = {}
            group[id_] = prompt
        if group:
            yield group

    def _prompt(self, reply_id: str) -> list[int]:
        """Return the tokens of a reply's prompt and thought; [] if another process has deleted the reply."""
        try:
            return self._store.replies.get(reply_id).context_ids
        except NotFound:
            return []

    def add(self, measures: Mapping[str, np.ndarray]) -> None:
        """Add {id of a rated reply: measures [REPLIES, M] of unshown replies} to the stored measures."""
        self._save(self.load() | dict(measures))

    def _save(self, found: Mapping[str, np.ndarray]) -> None:
        newest = [*found][-MAX_QUESTIONS:]
        self._store.unshown.put(self._fingerprint, {id_: found[id_] for id_ in newest})


def _measure(
    model: Model, backend: Backend, prompts: Sequence[list[int]], pause: Pause
) -> list[np.ndarray | None]:
    """Return the measures [REPLIES, M] of sampled replies to each prompt; None for a prompt if one of its
    replies ends before the answer begins."""
    begun, generators = list[BegunReply](), list[np.random.Generator]()
    with original_model(backend):
        for prompt, first in zip(prompts, begin_replies(backend, prompts, pause), strict=True):
            begun += [first, *(first.fork() for _ in range(REPLIES - 1))]
            generators += [np.random.default_rng([37, *prompt])] * REPLIES
        replies = sampled_replies(
            backend, model.tokenizer, begun, generators, MAX_REPLY_TOKENS, sampling_of(model), pause
        )
    texts = [(model.tokenizer.decode(ids), ended) for ids, ended in replies]
    groups = [texts[i : i + REPLIES] for i in range(0, len(texts), REPLIES)]
    return [
        None if any(thinking.split(text).is_open for text, _ in group) else measures_of(group)
        for group in groups
    ]


def measures_of(replies: Sequence[tuple[str, bool]]) -> np.ndarray:
    """Return the M measures of the answers of U replies: [U, M]. replies: (text, True if the reply ended by
    itself) of each reply."""
    return np.stack([measure_text(thinking.split(text).answer, ended) for text, ended in replies])

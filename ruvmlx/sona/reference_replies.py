"""This module lets the model write replies to everyday questions (reference_questions.json). The calibration
(calibration.py) uses the hidden states of these replies.

The replies show how the hidden states of replies differ from the hidden states of other prose. The answers of
the reference text (reference_text.py) do not show this difference well, because the model did not write these
answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..backends.base import Backend, KVCache, Step
from ..models.config.model import Message, Tokenizer
from ..pausing import Pause
from . import reference_text

MAX_TOKENS = 48  # the maximum number of tokens of a reply
TOGETHER = 8  # the number of replies in one batch


@dataclass
class _Reply:
    """A reply in progress. last: the model's output after the reply's newest token. left: the maximum number
    of tokens that the reply can still get."""

    cache: KVCache
    last: Step
    left: int


@dataclass
class ReferenceReplies:
    """A writer of the replies to the everyday questions. Decoding is greedy. The work can be stopped between
    two steps and continued.

    states: the hidden states that predict the tokens of the replies, [D] each (D: hidden size)
    done: the number of questions with a finished reply
    """

    backend: Backend
    tokenizer: Tokenizer
    max_context: int
    states: list[np.ndarray] = field(default_factory=list)
    done: int = 0
    _begun: int = 0
    _writing: list[_Reply] = field(default_factory=list)

    def write(self, pause: Pause, note: Callable[[int], object], is_enough: Callable[[], bool]) -> None:
        """Let the backend's model, with its current LoRA, write the replies that are still missing.

        pause: a function that is called before each step; it can raise an exception to stop
        note: a function that gets the number of replies that ended in a step
        is_enough: a function that is called before each step; if it returns True, the work ends
        """
        asked = reference_text.questions()
        while (self._writing or self._begun < len(asked)) and not is_enough():
            pause()
            if self._begun < len(asked) and self._begun - self.done < TOGETHER:
                self._begin(asked[self._begun])
                self._begun += 1
            else:
                self._step()
            ended = self._begun - len(self._writing) - self.done
            self.done += ended
            note(ended)

    def _begin(self, question: str) -> None:
        prompt = self.tokenizer.encode_chat([Message("user", question)])
        left = min(MAX_TOKENS, self.max_context - len(prompt))
        if left > 0:
            cache = self.backend.new_cache()
            self._writing.append(_Reply(cache, self.backend.prefill(prompt, cache), left))

    def _step(self) -> None:
        """Append one token to each reply in progress."""
        self.states += [reply.last.hidden for reply in self._writing]
        tokens = [int(reply.last.logits.argmax()) for reply in self._writing]
        for reply, token in zip(self._writing, tokens, strict=True):
            reply.left = 0 if token in self.tokenizer.eos_ids else reply.left - 1
        going = [(reply, token) for reply, token in zip(self._writing, tokens, strict=True) if reply.left]
        self._writing = [reply for reply, _ in going]
        if going:
            steps = self.backend.decode_batch([token for _, token in going], [r.cache for r, _ in going])
            for (reply, _), step in zip(going, steps, strict=True):
                reply.last = step

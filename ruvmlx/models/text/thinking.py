"""This module separates the thought of a reply (the model's reasoning) from its answer. A thought is the text
between <think> and </think> (R1, Qwen3, SmolLM3) or between [THINK] and [/THINK] (Magistral).

Some templates write the opening tag at the end of the prompt. If the prompt ends with the opening tag, ruvmlx
puts the same tag at the start of the reply's text. The tags in the text of a reply therefore show which part
is the thought and which part is the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..config.model import Tokenizer
from .typed_text import THOUGHT_TAGS as TAGS

_TAIL = 8  # the number of tokens at a prompt's end in which `opened_by` searches for the opening tag


@dataclass(frozen=True)
class Thought:
    """A reply in two parts. is_open: True if the thought has not ended, so that there is no answer yet."""

    thought: str
    answer: str
    is_open: bool = False


def split(text: str) -> Thought:
    """Split a reply's text into its thought and its answer. If there is no thought, the whole text is the
    answer."""
    begun = text.lstrip()
    for begin, end in TAGS.items():
        if begun.startswith(begin):
            thought, ended, answer = begun.removeprefix(begin).partition(end)
            return Thought(thought.strip(), answer.lstrip(), not ended)
    return Thought("", text)


def tag_of(template: str | None) -> str | None:
    """Return the tag that begins a thought in the model's replies: the tag that the chat template contains,
    or whose closing tag it contains. Return None if the template contains no such tag."""
    return next(
        (tag for tag, end in TAGS.items() if tag in (template or "") or end in (template or "")), None
    )


def join_thought(thought: str, answer: str, tag: str) -> str:
    """Join a thought and an answer into the text of a reply. `split` does the reverse."""
    return f"{tag}\n{thought}\n{TAGS[tag]}\n\n{answer}"


def opened_by(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """If the prompt ends with the tag that begins a thought, return this tag and the spaces after it; else
    return ""."""
    tail = tokenizer.decode(prompt_ids[-_TAIL:])
    bare = tail.rstrip()
    return next((begin + tail[len(bare) :] for begin in TAGS if bare.endswith(begin)), "")


class ThoughtCounter:
    """A counter of the sampled tokens of a reply that belong to the thought.

    tokens: the number of sampled tokens in the thought so far, with its tags
    is_decided: False while the text so far can still become an opening tag
    """

    def __init__(self, tokenizer: Tokenizer, begun: str = ""):
        """begun: the text of the reply before its first sampled token: the opening tag if the prompt ends
        with it, else ""."""
        self._tokenizer, self._text = tokenizer, begun
        self._end = ""  # the closing tag of the current thought; "" outside of a thought
        self.tokens = self._seen = 0
        self.is_decided = False
        self._look()

    @property
    def in_thought(self) -> bool:
        return bool(self._end)

    def add(self, token: int) -> None:
        self._seen += 1
        if self.is_decided and not self._end:
            return
        self._text += self._tokenizer.token_bytes(token).decode("utf-8", "replace")
        self._look()

    def _look(self) -> None:
        if not self.is_decided:
            self._decide()
        if self._end:
            self.tokens = self._seen
            if self._end in self._text:
                self._end = ""
            else:
                # keep the text's end, where the closing tag can begin
                self._text = self._text[1 - len(self._end) :]

    def _decide(self) -> None:
        text = self._text.lstrip()
        found = next((begin for begin in TAGS if text.startswith(begin)), "")
        if found:
            self._end, self._text = TAGS[found], text.removeprefix(found)
        self.is_decided = bool(found) or (bool(text) and not any(b.startswith(text) for b in TAGS))


class AnswerFilter:
    """A filter that removes the thought from a reply's text that arrives in pieces."""

    def __init__(self) -> None:
        self._text = ""  # the reply's text before the answer begins
        self._answering = False

    @property
    def is_thinking(self) -> bool:
        return not self._answering and split(self._text).is_open

    def feed(self, text: str) -> str:
        """Add the next text of the reply and return the text that now belongs to the answer. The filter holds
        back text that can become an opening tag, until a later call decides."""
        if self._answering:
            return text
        self._text += text
        begun = self._text.lstrip()
        if any(tag.startswith(begun) and tag != begun for tag in TAGS):
            return ""
        return self.flush()

    def flush(self) -> str:
        """Return the answer's text that the filter has held back."""
        if self._answering:
            return ""
        answer = split(self._text).answer
        self._answering = bool(answer)
        return answer

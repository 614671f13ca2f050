"""Thoughts: a reply's beginning in <think> (R1, Qwen3, SmolLM3) or [THINK] (Magistral) and the closing tag.

Some templates open the block in the prompt; the reply's text then begins with the same tag, so that its text
alone always tells thought from answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .model import Tokenizer
from .typed_text import THOUGHT_TAGS as TAGS

_TAIL = 8  # tokens at the end of a prompt that hold the tag and the space behind it


@dataclass(frozen=True)
class Thought:
    """A reply in two parts. is_open: the thought has not ended, so there is no answer yet."""

    thought: str
    answer: str
    is_open: bool = False


def split(text: str) -> Thought:
    """A reply's text -> its thought and its answer; without a thought all of it is the answer."""
    begun = text.lstrip()
    for begin, end in TAGS.items():
        if begun.startswith(begin):
            thought, ended, answer = begun.removeprefix(begin).partition(end)
            return Thought(thought.strip(), answer.lstrip(), not ended)
    return Thought("", text)


def tag_of(template: str | None) -> str | None:
    """The tag that begins a thought, if a chat template knows one; None: its model does not think first."""
    return next(
        (tag for tag, end in TAGS.items() if tag in (template or "") or end in (template or "")), None
    )


def join_thought(thought: str, answer: str, tag: str) -> str:
    """A reply's text from its two parts: what `split` takes apart."""
    return f"{tag}\n{thought}\n{TAGS[tag]}\n\n{answer}"


def opened_by(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> str:
    """The tag, with the space behind it, with which a prompt ends; else ""."""
    tail = tokenizer.decode(prompt_ids[-_TAIL:])
    bare = tail.rstrip()
    return next((begin + tail[len(bare) :] for begin in TAGS if bare.endswith(begin)), "")


class ThoughtCounter:
    """Tells, token by token, which sampled tokens are the thought.

    tokens: sampled tokens of the thought so far, its tags included. is_decided: False as long as the text may
    still become the beginning of a tag.
    """

    def __init__(self, tokenizer: Tokenizer, begun: str = ""):
        """begun: text of the reply before its first sampled token."""
        self._tokenizer, self._text = tokenizer, begun
        self._end = ""  # the tag that ends the thought; "" outside of one
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
                self._text = self._text[1 - len(self._end) :]  # all that the end tag may have begun in

    def _decide(self) -> None:
        text = self._text.lstrip()
        found = next((begin for begin in TAGS if text.startswith(begin)), "")
        if found:
            self._end, self._text = TAGS[found], text.removeprefix(found)
        self.is_decided = bool(found) or (bool(text) and not any(b.startswith(text) for b in TAGS))


class AnswerFilter:
    """Cuts the thought out of a stream of text."""

    def __init__(self) -> None:
        self._text = ""  # all of it until the answer begins
        self._answering = False

    @property
    def is_thinking(self) -> bool:
        return not self._answering and split(self._text).is_open

    def feed(self, text: str) -> str:
        """Add text of the reply; returns the answer's part of it. Text that may become a tag is held back."""
        if self._answering:
            return text
        self._text += text
        begun = self._text.lstrip()
        if any(tag.startswith(begun) and tag != begun for tag in TAGS):
            return ""
        return self.flush()

    def flush(self) -> str:
        """The stream ended: return the text that was held back."""
        if self._answering:
            return ""
        answer = split(self._text).answer
        self._answering = bool(answer)
        return answer

"""This module splits a stream of text, piece by piece, into the thought (the model's reasoning) and the
answer."""

from ruvmlx.models.text.thinking import TAGS


class ThoughtStream:
    """A class that splits a stream as `ruvmlx.models.text.thinking.split` splits a whole text: the joined
    pieces are equal to the result of `split`."""

    def __init__(self, split: bool = True):
        """split: False if the whole text is the answer."""
        # text of which the stream cannot say yet whether it belongs to the thought, to a tag or to the answer
        self._held = ""
        # The tag that ends the thought. "": the stream has not decided yet whether the reply has a thought.
        # None: the answer has begun.
        self._end: str | None = "" if split else None
        self._begun = not split  # True if the spaces before the thought or the answer have been cut

    def feed(self, text: str) -> tuple[str, str]:
        """Add a piece of the reply's text. Return the new text of the thought and the new text of the
        answer."""
        self._held += text
        if self._end == "":
            self._decide()
        thought = self._take_thought() if self._end else ""
        return thought, self._answer() if self._end is None else ""

    def flush(self) -> tuple[str, str]:
        """End the stream. Return the text that was held back, as text of the thought and of the answer."""
        held, self._held = self._held, ""
        thought = held.rstrip() if self._begun else held.strip()
        return (thought, "") if self._end else ("", held)

    def _decide(self) -> None:
        begun = self._held.lstrip()
        tag = next((tag for tag in TAGS if begun.startswith(tag)), None)
        if tag is not None:
            self._end, self._held = TAGS[tag], begun.removeprefix(tag)
        elif begun and not any(tag.startswith(begun) for tag in TAGS):
            self._end, self._begun = None, True

    def _take_thought(self) -> str:
        """Return the new text of the thought. Hold back spaces at the end of this text, and text that can be
        the beginning of the tag that ends the thought."""
        end = self._end or ""
        thought, ended, rest = self._held.partition(end)
        if not self._begun:
            thought = thought.lstrip()
        if ended:
            self._end, self._held, self._begun = None, rest, False
            return thought.rstrip()
        sure = thought[: len(thought) - _overlap(thought, end)].rstrip()
        self._held = thought[len(sure) :]
        self._begun = self._begun or bool(sure)
        return sure

    def _answer(self) -> str:
        text, self._held = self._held if self._begun else self._held.lstrip(), ""
        self._begun = self._begun or bool(text)
        return text


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)

"""This module marks users' text, so that the text cannot become a special token in a rendered chat."""

import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from .special_texts import SpecialTexts

GUARD = "\ufdd0"  # the mark (a noncharacter) in users' text in rendered chats; the tokenizer removes the mark
# Python writes GUARD in this way in the text of a list or a mapping, for example in {{ tool | string }}.
ESCAPED_GUARD = "\\ufdd0"

# {tag that begins a thought: tag that ends it}. The tags are ordinary text, even if the model's file marks
# them as special tokens.
THOUGHT_TAGS = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_WORD = re.compile(r"[\w.-]*")
_NEAR = 256  # the number of characters at the beginning of a text that `_completes` checks


class Guard:
    """A function that puts marks (U+FDD0) into a user's text. The marked text contains no special token's
    string. A guard also makes sure that the end of the template's text before a user's text and the beginning
    of the user's text do not together form a special token.

    Thought tags get no mark, because chat templates search for these tags to remove the thoughts of old
    replies.
    """

    def __init__(self, specials: Sequence[str]):
        self._specials = SpecialTexts(specials)
        self._first = _firsts(specials)
        # The reversed strings of the special tokens without their first character: in reversed strings, a
        # search for an end is a search for a prefix.
        self._tails = sorted(text[:0:-1] for text in specials)
        self._inside = "\0".join(text[1:] for text in specials)
        self._longest = max(map(len, specials), default=0)

    def __call__(self, content: str) -> str:
        content = content.replace(GUARD, "").replace(ESCAPED_GUARD, f"\\{GUARD}{ESCAPED_GUARD[1:]}")
        if not self._first or not content:
            return content
        marked = self._first.sub("\\1" + GUARD, content)
        if not self._completes(content.strip()):
            return marked
        head = len(content) - len(content.lstrip())
        return marked[:head] + GUARD + marked[head:]

    def inside(self, value: Any) -> Any:
        """Return nested JSON (tools, tool calls) with marks in its texts. Templates compare words in the
        definitions of tools ("function", "string") and look up keys, so a single word that contains no
        special token gets no mark."""
        if isinstance(value, str):
            innocent = _WORD.fullmatch(value) and not self._specials.occur_in(value)
            return value if innocent else self(value)
        if isinstance(value, Mapping):
            return {self.inside(key): self.inside(part) for key, part in value.items()}
        return [self.inside(part) for part in value] if isinstance(value, list | tuple) else value

    def _completes(self, text: str) -> bool:
        """Return True if the end of the template's text and the start of `text` can together form a special
        token."""
        near = text[:_NEAR]
        if any(self._ends_one(near[:k]) for k in range(1, min(self._longest, len(near) + 1))):
            return True
        # if the first _NEAR characters of a text are inside a special token, the text can be a middle part of
        # this token
        if len(text) > _NEAR and near in self._inside:
            return True
        return 0 < len(text) < self._longest and text in self._inside

    def _ends_one(self, text: str) -> bool:
        """Return True if `text` is the end of a longer special token."""
        backwards = text[::-1]
        at = bisect_left(self._tails, backwards)
        return at < len(self._tails) and self._tails[at].startswith(backwards)


def _firsts(specials: Sequence[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches a character that begins a special token, except at a thought tag; None
    without special tokens."""
    firsts = "".join(map(re.escape, sorted({text[0] for text in specials})))
    tags = [*THOUGHT_TAGS, *THOUGHT_TAGS.values()]
    free = "|".join(re.escape(tag) for tag in tags if not any(text.startswith(tag) for text in specials))
    return re.compile(f"(?!{free})([{firsts}])" if free else f"([{firsts}])") if firsts else None

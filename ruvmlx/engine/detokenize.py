"""This module turns a stream of tokens into text. The text has only complete UTF-8 characters, and the text
ends before the first stop string."""

import codecs
from bisect import bisect_left
from collections.abc import Mapping

from ..models.config.model import Tokenizer
from .types import Begun


class StreamDecoder:
    """A stream decoder joins the bytes of tokens and returns complete characters only. If a reply ends within
    a character, the text of the reply ends before this character."""

    def __init__(
        self, tokenizer: Tokenizer, shown: Mapping[int, str] | None = None, is_at_start: bool = True
    ):
        """shown: the special tokens whose text is part of the reply. is_at_start: True if the first token is
        the start of the reply."""
        self._tokenizer, self._shown = tokenizer, shown or {}
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = is_at_start and tokenizer.strips_leading_space

    def add(self, token: int) -> str:
        data = self._tokenizer.token_bytes(token) or self._shown.get(token, "").encode()
        return self._strip_first_space(self._utf8.decode(data))

    def go_on(self, begun: Begun) -> str:
        """Continue the unfinished reply `begun`. Returns the text of `begun`. The bytes of an incomplete last
        character wait for the next token."""
        for token in begun.tail:
            self.add(token)
        return begun.text

    def _strip_first_space(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """StopStrings ends a stream at the first stop string. Text that can be the start of a stop string is held
    back until the next tokens show whether a stop string follows.

    hit: the stop string that ended the stream
    """

    def __init__(self, stops: tuple[str, ...]):
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self._starts: list[
            int
        ] = []  # the place in the whole text where the text of each call of `add` begins
        self._shown = 0  # the number of characters that `add` has returned
        self._has_ended = False  # True after `flush`
        self.hit: str | None = None

    def add(self, text: str) -> str:
        """Add text. Returns the part of the text that no stop string can contain any more, without the parts
        that earlier calls returned."""
        if not self._stops:
            return text
        self._starts.append(self._shown + len(self._held))
        self._held += text
        found = [(self._held.find(s), s) for s in self._stops if s in self._held]
        if found:
            at, self.hit = min(found, key=lambda each: each[0])
            shown, self._held = self._held[:at], ""
            self._shown += len(shown)
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._shown += len(shown)
        return shown

    @property
    def shown_count(self) -> int | None:
        """The number of calls of `add` whose text begins in the text returned so far; None: all calls. Before
        the stream ends, the newest calls without text do not count. Such a call can have the first bytes of a
        character, and a stop string can begin with this character."""
        return bisect_left(self._starts, self._shown) if self._stops and not self._has_ended else None

    def flush(self) -> str:
        """End the stream. Returns the text that `add` held back because the text could be the start of a stop
        string."""
        shown, self._held = self._held, ""
        self._has_ended = True
        return shown

    def _possible_start(self) -> int:
        """Return the length of the longest end of the held-back text that is the start of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stops):
                return size
        return 0

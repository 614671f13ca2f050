"""Streams tokens as text: only complete UTF-8 characters, never a part of a stop string."""

import codecs

from ..models.model import Tokenizer
from .types import Begun


class StreamDecoder:
    """Joins the bytes of tokens and emits complete characters only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def add(self, token: int) -> str:
        return self._released(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def go_on(self, begun: Begun) -> str:
        """Continue a reply: returns its text, without the U+FFFD of an incomplete last character."""
        for token in begun.tail:
            self.add(token)
        unfinished = self._utf8.getstate()[0]
        return begun.text.removesuffix("\ufffd") if unfinished else begun.text

    def flush(self) -> str:
        """U+FFFD for a character that was never completed, else ""."""
        return self._released(self._utf8.decode(b"", final=True))

    def _released(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Ends a stream at the first stop string. Text that may be the start of a stop string is held back."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Add text; returns the text that is safe to show."""
        if not self._stops:
            return text
        self._held += text
        found = [at for at in (self._held.find(s) for s in self._stops) if at >= 0]
        if found:
            self.hit = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._possible_start()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """End the stream: returns the text that was held back."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest suffix that is a prefix of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stops):
                return size
        return 0

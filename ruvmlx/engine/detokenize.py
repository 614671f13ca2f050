"""Tokens -> text as it streams: no broken UTF-8, no half of a stop string."""

import codecs

from ..models.model import Tokenizer
from .types import Begun


class StreamDecoder:
    """Joins the bytes of tokens and releases whole characters only."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def add(self, token: int) -> str:
        return self._released(self._utf8.decode(self._tokenizer.token_bytes(token)))

    def go_on(self, begun: Begun) -> str:
        """Take up a reply where it ended; its words, without the U+FFFD of a character that was cut."""
        for token in begun.tail:
            self.add(token)
        unfinished = self._utf8.getstate()[0]
        return begun.text.removesuffix("\ufffd") if unfinished else begun.text

    def flush(self) -> str:
        """What an unfinished character leaves behind: U+FFFD."""
        return self._released(self._utf8.decode(b"", final=True))

    def _released(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


class StopStrings:
    """Cuts a stream before the first stop string; text that may still become one is held back."""

    def __init__(self, stops: tuple[str, ...]):
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Text in -> text that is safe to show."""
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
        """The stream ended: what was held back is text after all."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest tail that is a beginning of a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._stops):
                return size
        return 0

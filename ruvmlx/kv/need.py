"""How many bytes the sequences of a request hold at most, known before its prompt is read.

Three moments count: the last chunk of the prompt is read (its pages are still in f16), the reply is at its
end, and in both a demotion is going on (the page and its lower page are there at the same time). Several
replies to one prompt share the prompt's pages. Replies that have ended keep the pages as they were at their
ends, so a shared page may be there once in each tier that it passes.

tests/kv/test_need.py compares this with caches that grow, page by page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..tiers import HOT, PAGE
from .cache import SLACK
from .policy import F16, TierPolicy


@dataclass(frozen=True)
class Growth:
    """The sizes that decide how much cache a request needs.

    prompt: its tokens. end: tokens of the prompt and of the longest reply together. replies: how many replies
    continue from the prompt. chunk: the most prompt tokens that are read at a time.
    """

    prompt: int
    end: int
    replies: int = 1
    chunk: int = 512


@dataclass(frozen=True)
class CacheShape:
    """The caches of a model under a policy. sizes: bytes of a page, by tier. window: tokens that a query sees
    at most, 0 for all. shares: forks share their pages."""

    policy: TierPolicy
    sizes: tuple[int, ...]
    window: int = 0
    shares: bool = True

    def peak(self, growth: Growth) -> int:
        """Most bytes that one request holds at any moment."""
        shared = growth.prompt // PAGE if self.shares and growth.replies > 1 else 0
        writing = self._shared(growth, shared) + growth.replies * self._reply_bytes(growth, shared)
        return max(self._read(growth), writing)

    def together(self, growths: Sequence[Growth]) -> int:
        """Most bytes of requests with the same prompt, which is read once: `peak` of a single one. The others
        start from the pages of the first, and read the end of the prompt again (PagedCache.trim)."""
        first = growths[0]
        if len(growths) == 1 or not self.shares:
            return sum(map(self.peak, growths))
        again = 0 if self.policy == F16 else self.policy.lengths[0] + PAGE
        shared = max(0, first.prompt - 1 - again) // PAGE
        longest = max(growths, key=lambda growth: growth.end)
        own = [max(self._read(g, shared), g.replies * self._reply_bytes(g, shared)) for g in growths]
        return self._shared(longest, shared) + sum(own)

    def _read(self, growth: Growth, start: int = 0) -> int:
        """Bytes of the pages from `start` on while the last chunk of the prompt is read."""
        chunk = min(growth.chunk, growth.prompt)
        return self._held(growth.prompt - chunk, growth.prompt, start) + self._demoting

    def _reply_bytes(self, growth: Growth, start: int) -> int:
        """Bytes of one reply's pages from `start` on, at its end."""
        return self._held(growth.end, growth.end + 1, start) + self._demoting

    def _shared(self, growth: Growth, end: int) -> int:
        """Bytes of the prompt's pages [0, end), each in all tiers that it has while replies are written."""
        first = self._first(growth.prompt)
        before = (0, *self.policy.counts(growth.prompt))
        after = (*self.policy.counts(growth.end), end)
        spans = zip(before, after, self.sizes, strict=True)
        return sum(max(0, min(stop, end) - max(start, first)) * size for start, stop, size in spans)

    def _held(self, offset: int, tokens: int, start: int) -> int:
        """Bytes of the pages from `start` on that `tokens` tokens take, with those demoted that are due
        before `offset`. The last token of a page demotes one before a page is made for the next: not counted
        yet."""
        offset -= offset % PAGE == PAGE - 1
        start = max(start, self._first(offset))
        ends = (0, *self.policy.counts(offset), -(-tokens // PAGE))
        spans = zip(ends, ends[1:], self.sizes, strict=False)
        return sum(max(0, stop - max(begin, start)) * size for begin, stop, size in spans)

    def _first(self, offset: int) -> int:
        """The first page that is not dropped behind the sliding window."""
        return max(0, offset - PAGE - self.window - SLACK) // PAGE if self.window else 0

    @property
    def _demoting(self) -> int:
        """Bytes of pages that are being made by demotions. Near the budget that is one of each lower tier."""
        return sum(self.sizes[:HOT]) if self.policy != F16 else 0

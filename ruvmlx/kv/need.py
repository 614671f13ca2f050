"""Before a request's prompt is read, this module computes the peak number of bytes that the request's KV
caches will take.

The peak is at one of two moments: when the last chunk of the prompt is read (the chunk's pages are still
f16), or at the end of the reply. At both moments a demotion (the change of a page to a lower precision) can
be in progress, so the old and the new version of the page exist together. If the backend's forks share pages,
several replies to one prompt share the prompt's pages. A reply that has ended, while others continue, keeps
its pages in the tiers (precisions) of its last moment. A page that several replies share can therefore exist
once in each tier through which it passes.

tests/kv/test_need.py compares the computed peaks with caches that grow page by page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..tiers import HOT, PAGE
from .cache import SLACK
from .policy import F16, TierPolicy


@dataclass(frozen=True)
class Growth:
    """The lengths in tokens, and the number of replies, that decide the size of a request's caches.

    prompt: the number of prompt tokens
    end: the number of tokens of the prompt and the longest reply together
    replies: the number of replies to the prompt
    chunk: the maximum number of prompt tokens in one step of prefill
    """

    prompt: int
    end: int
    replies: int = 1
    chunk: int = 512


@dataclass(frozen=True)
class CacheShape:
    """The properties of a model and a backend that decide the size of caches.

    sizes: the number of bytes of a page in each tier
    window: the number of tokens that a query sees; 0: all tokens
    shares: True if forks share their pages
    """

    policy: TierPolicy
    sizes: tuple[int, ...]
    window: int = 0
    shares: bool = True

    def peak(self, growth: Growth) -> int:
        """Return the maximum number of bytes that the caches of one request take at any moment."""
        shared = growth.prompt // PAGE if self.shares and growth.replies > 1 else 0
        writing = self._prompt_bytes(growth, shared) + growth.replies * self._reply_bytes(growth, shared)
        return max(self._read(growth), writing)

    def together(self, growths: Sequence[Growth]) -> int:
        """Return the maximum number of bytes that the caches of several requests with the same prompt take.
        The first request reads the whole prompt. If forks share pages, the other requests start from the
        pages of the first request, and compute only the end of the prompt again (PagedCache.trim)."""
        first = growths[0]
        if len(growths) == 1 or not self.shares:
            return sum(map(self.peak, growths))
        again = 0 if self.policy == F16 else self.policy.lengths[0] + PAGE
        shared = max(0, first.prompt - 1 - again) // PAGE
        longest = max(growths, key=lambda growth: growth.end)
        own = [max(self._read(g, shared), g.replies * self._reply_bytes(g, shared)) for g in growths]
        return self._prompt_bytes(longest, shared) + sum(own)

    def _read(self, growth: Growth, start: int = 0) -> int:
        """Return the bytes of the pages from index `start` on, at the moment when the last chunk of the
        prompt is read."""
        chunk = min(growth.chunk, growth.prompt)
        return self._page_bytes(growth.prompt - chunk, growth.prompt, start) + self._demoting

    def _reply_bytes(self, growth: Growth, start: int) -> int:
        """Return the bytes of one reply's pages from index `start` on, at the reply's end."""
        return self._page_bytes(growth.end, growth.end + 1, start) + self._demoting

    def _prompt_bytes(self, growth: Growth, end: int) -> int:
        """Return the bytes of the prompt's pages [0, end). The bytes of a page are added once for each tier
        that the page has while the replies are written."""
        first = self._first(growth.prompt)
        before = (0, *self.policy.counts(growth.prompt))
        after = (*self.policy.counts(growth.end), end)
        spans = zip(before, after, self.sizes, strict=True)
        return sum(max(0, min(stop, end) - max(start, first)) * size for start, stop, size in spans)

    def _page_bytes(self, offset: int, tokens: int, start: int) -> int:
        """Return the bytes of the pages that hold `tokens` tokens, without the pages before index `start` and
        without the pages that a sliding window dropped. The tier of each page is the tier that the policy
        asks for at `offset` tokens. If token `offset` is the last token of a page, the tiers are those of one
        token earlier, so that a page that is demoted at this moment is counted in its higher tier."""
        offset -= offset % PAGE == PAGE - 1
        start = max(start, self._first(offset))
        ends = (0, *self.policy.counts(offset), -(-tokens // PAGE))
        spans = zip(ends, ends[1:], self.sizes, strict=False)
        return sum(max(0, stop - max(begin, start)) * size for begin, stop, size in spans)

    def _first(self, offset: int) -> int:
        """Return the smallest index that the first page of a cache with `offset` tokens can have; with a
        sliding window, the cache has dropped the older pages."""
        return max(0, offset - PAGE - self.window - SLACK) // PAGE if self.window else 0

    @property
    def _demoting(self) -> int:
        """Return the bytes of the new pages that demotions in progress make. Near the budget, demotions make
        at most one page of each tier below hot at a time."""
        return sum(self.sizes[:HOT]) if self.policy != F16 else 0

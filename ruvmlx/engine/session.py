"""This module describes a session: one sequence of tokens that is kept with its KV cache, and the names
(hashes) of the cache's KV pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..backends.base import KVCache
from ..kv.chain import Chain, extend, shared_pages
from ..kv.policy import TierPolicy
from ..lora.base_lora import BaseLoRA
from ..tiers import PAGE


@dataclass(eq=False)
class Session:
    """A KV cache with its policy, its base LoRA and its token ids.

    owner: the session id of the request that read the tokens; REQUESTS (kv/owners.py): a request without a
        session whose cache can go to disk; None: another request
    chain: the names of the pages of `tokens` (kv/chain.py); the names of the newest pages can be missing
    branching: True if two longer sequences both begin with this sequence; in this case, the longer sequences
        do not replace this sequence
    """

    cache: KVCache
    policy: TierPolicy | None
    base: BaseLoRA | None
    tokens: list[int] = field(default_factory=list)
    chain: Chain = field(default_factory=list)
    owner: str | None = None
    branching: bool = False

    def fork(self) -> "Session":
        """Return a second session with the same tokens. The backend decides how much of the cache the two
        sessions share."""
        other = replace(self, cache=self.cache.fork(), branching=False)
        other.tokens, other.chain = list(self.tokens), list(self.chain)
        return other

    def cut(self, n: int) -> bool:
        """Keep the first n tokens, or fewer tokens if the cache cannot be cut at exactly n tokens. Returns
        False if the cache cannot drop its newest tokens."""
        extra = self.cache.offset - n
        if extra and not self.cache.trim(extra):
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Drop the tokens that are no longer in the cache, and the names of their pages."""
        del self.tokens[self.cache.offset :]
        del self.chain[1 + len(self.tokens) // PAGE :]

    def shares(self, prompt: Sequence[int], names: Chain) -> int:
        """Return the number of leading prompt tokens that the cache holds. names: the page names of the
        prompt."""
        pages = shared_pages(extend(self.chain, self.tokens), names)
        if pages < 0:
            return 0
        last = slice(PAGE * pages, PAGE * (pages + 1))
        n = PAGE * pages + common_prefix(self.tokens[last], prompt[last])
        return min(n, self.cache.offset)

    def shared_tokens(self, prompt: Sequence[int]) -> int:
        """Return the number of leading prompt tokens that the cache holds. This method compares only tokens,
        so the key (`CacheKeys.key`) and the salt of the prompt must be those of this session."""
        return self.shares(prompt, extend(self.chain[:1], prompt))

    def begins(self, other: "Session") -> bool:
        """Return True if this session is a prefix of the other session."""
        n = len(self.tokens)
        last = self.chain[:1] == other.chain[:1] and self.tokens[-1:] == other.tokens[:n][-1:]
        return last and self.tokens == other.tokens[:n]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of equal ids at the start of both sequences."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))

"""One cached sequence: its cache, the tokens in it, and the names of their pages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..backends.base import KVCache
from ..kv.chain import Chain, extend, shared_pages
from ..kv.policy import TierPolicy
from ..lora.base_lora import BaseLoRA
from ..tiers import PAGE


@dataclass(eq=False)
class Session:
    """A cache with its policy, its base LoRA and the token ids that it holds, in order.

    owner: the session id that it was read for. chain: names of the pages of `tokens` (kv/chain.py); it may
    lag behind. branching: two sequences part here, so it stays beside those that contain it.
    """

    cache: KVCache
    policy: TierPolicy | None = None
    base: BaseLoRA | None = None
    tokens: list[int] = field(default_factory=list)
    chain: Chain = field(default_factory=list)
    owner: str | None = None
    branching: bool = False

    def fork(self) -> "Session":
        """A second session with the same tokens; the backend decides how much of the cache both share."""
        other = replace(self, cache=self.cache.fork(), branching=False)
        other.tokens, other.chain = list(self.tokens), list(self.chain)
        return other

    def cut(self, n: int) -> bool:
        """Keep the first n tokens, or fewer if the cache must go back further; False if it cannot."""
        extra = self.cache.offset - n
        if extra and not self.cache.trim(extra):
            return False
        self.settle()
        return True

    def settle(self) -> None:
        """Keep the tokens that are in the cache, and the names of their pages."""
        del self.tokens[self.cache.offset :]
        del self.chain[1 + len(self.tokens) // PAGE :]

    def shares(self, prompt: Sequence[int], names: Chain) -> int:
        """Number of leading tokens of the prompt that the cache holds. names: the prompt's chain."""
        pages = shared_pages(extend(self.chain, self.tokens), names)
        if pages < 0:
            return 0
        last = slice(PAGE * pages, PAGE * (pages + 1))
        n = PAGE * pages + common_prefix(self.tokens[last], prompt[last])
        return min(n, self.cache.offset)

    def begins(self, other: "Session") -> bool:
        """Is this one a prefix of the other?"""
        n = len(self.tokens)
        last = self.chain[:1] == other.chain[:1] and self.tokens[-1:] == other.tokens[:n][-1:]
        return last and self.tokens == other.tokens[:n]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of equal leading ids."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))

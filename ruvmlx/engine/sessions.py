"""KV caches that outlive a request, so that turn N prefills only what is new."""

from collections import OrderedDict
from dataclasses import dataclass, field

from ..backends.base import Backend, KVCache
from ..kv.policy import TierPolicy
from ..lora.base import BaseLoRA


@dataclass
class Session:
    """A cache, the policy that it was made with, the token ids that it holds, in order, and the base under
    which they were read."""

    cache: KVCache
    policy: TierPolicy | None = None
    base: BaseLoRA | None = None
    tokens: list[int] = field(default_factory=list)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of leading ids that both share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class SessionManager:
    """Keeps the caches of the `capacity` sessions used last. policy: of caches made from now on."""

    def __init__(self, backend: Backend, policy: TierPolicy | None = None, capacity: int = 4):
        self._backend, self.policy = backend, policy
        self._capacity = capacity
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def get_or_create(self, session_id: str | None) -> Session:
        """The session's cache; a request without a session gets one of its own, which nobody keeps."""
        if session_id is None:
            return self._new()
        session = self._sessions.pop(session_id, None) or self._new()
        self._sessions[session_id] = session
        while len(self._sessions) > self._capacity:
            self._sessions.popitem(last=False)
        return session

    def rewind(self, session: Session, prompt: list[int]) -> int:
        """Cut the cache back to what it shares with the prompt; return how many tokens that is.

        Under another base than before, nothing of it is of use.
        At least one prompt token is always left to prefill: its logits start the reply.
        """
        if session.base is not self._backend.lora:
            self._renew(session)
            session.tokens = []
        keep = min(common_prefix(session.tokens, prompt), len(prompt) - 1)
        extra = len(session.tokens) - keep
        if extra and not session.cache.trim(extra):
            self._renew(session)
        del session.tokens[session.cache.offset :]
        return len(session.tokens)

    def _new(self) -> Session:
        return Session(self._backend.new_cache(self.policy), self.policy, self._backend.lora)

    def _renew(self, session: Session) -> None:
        new = self._new()
        session.cache, session.policy, session.base = new.cache, new.policy, new.base

    def policy_of(self, session_id: str | None) -> TierPolicy | None:
        """The policy that a session's cache was made with; one that nobody keeps has the newest."""
        session = self._sessions.get(session_id) if session_id is not None else None
        return session.policy if session else self.policy

    def drop(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def clear(self) -> None:
        self._sessions.clear()

"""KV caches of sessions, kept between requests, so that a turn prefills only its new tokens. If a folder is
given, they are also kept on disk between processes."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..backends.base import Backend, KVCache
from ..kv.disk import ENOUGH, LONGEST, CacheFolder, Key
from ..kv.policy import TierPolicy
from ..lora.base_lora import BaseLoRA


@dataclass
class Session:
    """A cache with its policy, its base LoRA and the token ids that it holds, in order. kept: the token ids
    in its file on disk."""

    cache: KVCache
    policy: TierPolicy | None = None
    base: BaseLoRA | None = None
    tokens: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)

    def fork(self) -> "Session":
        """A second session with the same tokens; the backend decides how much of the cache both share."""
        return replace(self, cache=self.cache.fork(), tokens=list(self.tokens), kept=list(self.kept))


def common_prefix(a: list[int], b: list[int]) -> int:
    """Number of equal leading ids."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class SessionManager:
    """Keeps the caches of the `capacity` most recently used sessions. policy: for new caches.

    folder: for evicted caches, and for all caches at the end. model: fingerprint of the model.
    """

    def __init__(
        self,
        backend: Backend,
        policy: TierPolicy | None = None,
        capacity: int = 4,
        folder: CacheFolder | None = None,
        model: str = "",
    ):
        self._backend, self.policy = backend, policy
        self._capacity = capacity
        self._folder, self._model = folder, model
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def get_or_create(self, session_id: str | None, prompt: Sequence[int] = ()) -> Session:
        """The session, from memory or disk, or a new one. session_id None: a new one that is not kept.

        prompt: the ids to be read next; a cache on disk is loaded only if it starts with the same ids.
        """
        if session_id is None:
            return self._new()
        session = self._sessions.pop(session_id, None) or self._resumed(session_id, prompt) or self._new()
        self._sessions[session_id] = session
        while len(self) > self._capacity:
            self._keep(*self._sessions.popitem(last=False), time.monotonic() + LONGEST)
        return session

    def rewind(self, session: Session, prompt: list[int]) -> int:
        """Trim the cache to the prefix that it shares with the prompt; returns the prefix length in tokens.

        If the base LoRA changed, the whole cache is discarded. At least one prompt token is left to prefill,
        because the reply starts from its logits.
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
        session.cache, session.policy, session.base, session.kept = new.cache, new.policy, new.base, []

    # On disk ------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Write the caches to disk, the most recently used first. After ENOUGH seconds no file is started."""
        begun = time.monotonic()
        for session_id, session in reversed(self._sessions.items()):
            if time.monotonic() < begun + ENOUGH:
                self._keep(session_id, session, begun + LONGEST)

    def _keep(self, session_id: str, session: Session, until: float) -> None:
        tokens = session.tokens
        if self._folder is None or tokens == session.kept or len(tokens) != session.cache.offset:
            return
        key = self._key(session.policy, session.base)
        if self._folder.save(session_id, key, tokens, session.cache.dump(), until):
            session.kept = list(tokens)

    def _resumed(self, session_id: str, prompt: Sequence[int]) -> Session | None:
        if self._folder is None:
            return None
        session = self._new()
        tokens = self._folder.load(session_id, self._key(session.policy, session.base), prompt, session.cache)
        if tokens is None or len(tokens) != session.cache.offset:
            return None
        session.tokens, session.kept = tokens, list(tokens)
        return session

    def _key(self, policy: TierPolicy | None, base: BaseLoRA | None) -> Key:
        """All that keys and values depend on, except the tokens. MicroLoRA is left out: it changes only the
        output head, which comes after them."""
        return {
            "model": self._model,
            "backend": self._backend.name,
            "kernels": self._backend.kernels,
            "policy": {"name": policy.name, **policy.named()} if policy else None,
            "base": base.of_keys if base else "",
        }

    # --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str | None) -> Session | None:
        """The session, if it is kept."""
        return self._sessions.get(session_id) if session_id is not None else None

    def policy_of(self, session_id: str | None) -> TierPolicy | None:
        """The policy of the session's cache; of new caches, if there is no such session."""
        session = self.get(session_id)
        return session.policy if session else self.policy

    @property
    def nbytes(self) -> int:
        return sum(session.cache.nbytes for session in self._sessions.values())

    def put(self, session_id: str, session: Session) -> None:
        """Keep this session under an id that is in use, in place of the one there."""
        if session_id in self._sessions:
            self._sessions[session_id] = session

    def drop(self, session_id: str) -> None:
        """Remove a session and its file, because its cache cannot be trusted."""
        self._sessions.pop(session_id, None)
        if self._folder is not None:
            self._folder.remove(session_id)

    def clear(self) -> None:
        self._sessions.clear()

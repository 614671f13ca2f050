"""This module keeps KV caches between requests, so that prefill need not compute tokens that an earlier
request has read.

A prompt starts from the longest prefix that it shares with a kept sequence. The kept sequence can belong to
the same session, to another session, to a request without a session, or to a running request. The prompt's
sequence and the kept sequence share the KV pages of the prefix (`KVCache.fork`). With a cache folder, the
module also keeps caches on disk between processes.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakSet

from ..backends.base import PAUSED, Backend, TwoSided
from ..kv.cache import held_bytes
from ..kv.chain import extend
from ..kv.disk import MAX_EXIT_SECONDS, MAX_WRITE_SECONDS, CacheFolder
from ..kv.owners import REQUESTS
from ..kv.policy import TierPolicy
from ..pausing import Pause
from ..platform.cpu import total_memory
from ..tiers import HOT, PAGE
from .session import Session
from .session_disk import CacheKeys, SessionsOnDisk

CAPACITY = 64  # the maximum number of sequences in memory
BRIEF = 0.05  # seconds: the longest time to write an evicted sequence while other sequences run
SHARE = 0.1  # the share of the machine's memory for kept sequences if `kv_budget` is not set


class SessionManager:
    """A session manager keeps the caches of the most recently used sequences.

    policy: the tier policy of new caches: the precision of the KV pages by the age of their tokens
    capacity: the maximum number of sequences in memory
    folder: the folder of cache files, for evicted caches and, at the end of the process, for all caches that
        can be kept
    model: the result of `model_key`
    """

    def __init__(
        self,
        backend: Backend,
        policy: TierPolicy | None = None,
        capacity: int = CAPACITY,
        folder: CacheFolder | None = None,
        model: str = "",
    ):
        self._backend, self.policy = backend, policy
        self.capacity = capacity
        self.keys = CacheKeys(backend, model)
        self.disk = SessionsOnDisk(folder, backend, self.keys)
        # the kept sessions, by session id or by a generated name
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._running: WeakSet[Session] = WeakSet()
        self._unnamed = (f"\0{i}" for i in itertools.count())
        pool = backend.pool
        self.limit: int = (pool.budget if pool else 0) or int(SHARE * total_memory())
        if pool is not None:
            pool.reclaim = self._reclaim

    # For runs -----------------------------------------------------------------------------------

    def get_or_create(
        self,
        session_id: str | None,
        prompt: Sequence[int] = (),
        salt: str = "",
        resumable: bool = False,
    ) -> Session:
        """Return a session for this prompt: the session with the id `session_id`, or a fork of the sequence
        in memory, or the sequence on disk, that shares the longest prefix with the prompt, or a new session.
        The caller must call `rewind` before the prefill, and `done` at the end of the reply.

        salt: a text; only sequences with the same salt share pages
        resumable: True if the session can go to disk although it has no id
        """
        own = self.get(session_id)
        if own is not None and own.chain[0] != self.keys.root(own.policy, salt):
            own = None
        session = self._longest(own, prompt, salt) or own
        session = self.disk.longest(session, prompt, self.policy, salt) or session
        session = session or self._with(self.policy, self.keys.root(self.policy, salt))
        self._running.add(session)
        if session_id is not None:
            self._name(session_id, session)
        elif resumable:
            session.owner = REQUESTS
        self.make_room()
        return session

    def known_tokens(self, session_id: str | None, prompt: Sequence[int], salt: str = "") -> int:
        """Return the approximate number of leading prompt tokens that a sequence in memory has. `rewind` can
        then keep fewer tokens, because some caches cannot be cut at every token."""
        own = self.get(session_id)
        held = own.shared_tokens(prompt) if own else 0
        names = extend([self.keys.root(self.policy, salt)], prompt)
        return max([held, *(s.shares(prompt, names) for s in (*self._sessions.values(), *self._running))])

    def rewind(self, session: Session, prompt: list[int]) -> int:
        """Trim the cache to the prefix that it shares with the prompt. Returns the number of prompt tokens
        that the cache then holds.

        If the cache cannot be trimmed, the session gets a new empty cache. At least one prompt token is left
        for prefill, because the reply starts from the logits of the last prompt token.
        """
        keep = min(session.shared_tokens(prompt), len(prompt) - 1)
        if not session.cut(keep):
            self._renew(session, session.chain[0])
            session.tokens = []
        return len(session.tokens)

    def fork(self, session: Session) -> Session:
        """Return a second session that begins with the same tokens, for another run."""
        other = session.fork()
        self._running.add(other)
        return other

    def move(self, session: Session, salt: str) -> None:
        """Give the session of a running request an empty cache on the side of the backend that still works;
        the caller fills it with the session's tokens. Drop the kept sessions of the failed side."""
        is_lost = self._backend.is_lost if isinstance(self._backend, TwoSided) else lambda cache: False
        for name, kept in list(self._sessions.items()):
            if kept not in self._running and is_lost(kept.cache):
                del self._sessions[name]
        self._renew(session, self.keys.root(session.policy, salt))

    def done(self, session: Session) -> None:
        """End the run of this session and keep its cache, unless the cache is empty or lacks some of its
        tokens. Drop each kept sequence that has no session id, is not `branching`, and is a prefix of this
        session."""
        session.settle()
        if session not in self._running:
            return
        self._running.discard(session)
        if not session.tokens or len(session.tokens) != session.cache.offset:
            return
        for name, other in list(self._sessions.items()):
            if name.startswith("\0") and not other.branching and other.begins(session):
                del self._sessions[name]
        if not any(kept is session for kept in self._sessions.values()):
            self._keep_unnamed(session)
        if session.owner == REQUESTS or self.get(session.owner) is session:
            self.disk.keep_early(session)
        self.make_room()

    def forget(self, session: Session) -> None:
        """Remove a session from memory and from disk, because the content of its cache is wrong."""
        self._running.discard(session)
        self._take_out(session)
        self.disk.forget(session)

    def read_again(self, session_id: str, pause: Pause) -> int:
        """Let the model with its new base LoRA read the tokens of a kept session, so that the next reply need
        not read them. Return the number of tokens that the model read; 0 if the base LoRA is not new.

        session_id: the id of a session without a salt that does not run
        pause: a function that can raise an exception to stop; the next call reads the rest
        """
        old = self.get(session_id)
        if old is None or old.base is self._backend.lora or old in self._running:
            return 0
        tokens, session, read = old.tokens, self.get_or_create(None, old.tokens), 0
        try:
            self.rewind(session, tokens)
            while rest := tokens[session.cache.offset :]:
                part = rest[:PAUSED]
                self._backend.hidden_states(part, None, session.cache)
                session.tokens.extend(part)
                read += len(part)
                pause()
            self._name(session_id, session)
        finally:
            self.done(session)
        return read

    # Finding ------------------------------------------------------------------------------------

    def _longest(self, own: Session | None, prompt: Sequence[int], salt: str) -> Session | None:
        """Return a fork of the sequence that shares the longest prefix with the prompt, if this prefix is
        longer than the prefix of `own`. If several sequences share the same prefix, take the sequence with
        the fewest tokens after the prefix."""
        names, most = extend([self.keys.root(self.policy, salt)], prompt), len(prompt) - 1
        held = own.shared_tokens(prompt) if own else 0
        others = [*self._sessions.items(), *((None, session) for session in self._running)]
        found = [(min(s.shares(prompt, names), most), -s.cache.offset, name, s) for name, s in others]
        for n, _, name, session in sorted(found, key=lambda row: row[:2], reverse=True):
            if n <= min(held, most):
                break
            fork = session.fork()
            if fork.cut(n) and len(fork.tokens) > held and fork.tokens == list(prompt[: len(fork.tokens)]):
                self._mark_used(name, session, fork)
                return fork
        return None

    def _mark_used(self, name: str | None, source: Session, fork: Session) -> None:
        """Mark `source` as used. Later prompts can also begin with the prefix that `fork` holds and then
        differ from `source`. To serve these prompts, keep the common prefix as a separate sequence (if it and
        the rest of `source` have at least a page), before later tokens lower the precision of the prefix's
        newest pages."""
        fork.owner = None
        if name is not None:
            self._sessions.move_to_end(name)
        if source.cache.offset - fork.cache.offset > PAGE <= fork.cache.offset:
            point = fork.fork()
            point.owner, point.branching = source.owner, True
            self._keep_unnamed(point)

    def _with(self, policy: TierPolicy | None, name: bytes) -> Session:
        return Session(self._backend.new_cache(policy), policy, self._backend.lora, chain=[name])

    def _renew(self, session: Session, name: bytes) -> None:
        """Give the session an empty cache and a new chain. Do not change its `tokens`. name: the first name
        of the new chain (`CacheKeys.root`)"""
        new = self._with(session.policy, name)
        session.cache, session.base, session.chain = new.cache, new.base, new.chain

    # Limits -------------------------------------------------------------------------------------

    def _keep_unnamed(self, session: Session) -> None:
        self._sessions[next(self._unnamed)] = session

    def _take_out(self, session: Session) -> None:
        for name in [name for name, kept in self._sessions.items() if kept is session]:
            del self._sessions[name]

    def _name(self, session_id: str, session: Session) -> None:
        """Keep the session under the id `session_id`. If another session had this id, keep that session
        without an id."""
        before = self._sessions.pop(session_id, None)
        if before is not None and before is not session:
            self._keep_unnamed(before)
        self._sessions[session_id], session.owner = session, session_id

    def make_room(self) -> None:
        """Evict the least recently used sequences that do not run, until there are at most `capacity`
        sequences and all caches together have at most the bytes that `_most` returns, or until only running
        sequences are left. Write the evicted sequences to disk if there is a cache folder."""
        longest = BRIEF if self._running else MAX_WRITE_SECONDS
        while len(self) > self.capacity or self.nbytes > self._most():
            if (name := self._oldest()) is None:
                return
            self.disk.keep(name, self._sessions.pop(name), time.monotonic() + longest)

    def _most(self) -> int:
        """Return the maximum number of bytes of all caches: at most the budget of the KV page pool (if it has
        one) minus one KV page. One page stays free, because a demotion (the change of a page to a lower
        precision) first makes a new page."""
        pool = self._backend.pool
        if pool is None or not pool.budget:
            return self.limit
        return min(self.limit, pool.budget - pool.sizes[HOT - 1])

    def _oldest(self) -> str | None:
        idle = (name for name, session in self._sessions.items() if session not in self._running)
        return next(idle, None)

    def _reclaim(self) -> bool:
        """Free the least recently used sequence that does not run, because a running sequence needs the
        memory. If there is none, release the sequence that is written early. Returns False if nothing can be
        freed. The sequence does not go to disk, because a reply waits."""
        if (name := self._oldest()) is None:
            return self.disk.stop_early()
        del self._sessions[name]
        return True

    def evictable(self) -> set[int]:
        """Return the Python ids (`id`) of the caches that can be freed for a running request."""
        kept = {id(session.cache) for session in self._sessions.values() if session not in self._running}
        return kept | self.disk.early_caches()

    # On disk ------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Write the caches to disk, the most recently used first. After MAX_EXIT_SECONDS no further write
        starts."""
        begun = time.monotonic()
        self.disk.wait()
        for name, session in reversed(self._sessions.items()):
            if time.monotonic() < begun + MAX_EXIT_SECONDS:
                self.disk.keep(name, session, begun + MAX_WRITE_SECONDS)

    # --------------------------------------------------------------------------------------------

    @property
    def folder(self) -> CacheFolder | None:
        """Return the folder for caches on disk."""
        return self.disk.folder

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str | None) -> Session | None:
        """Return the session that is kept in memory under this id, or None."""
        return self._sessions.get(session_id) if session_id is not None else None

    def policy_of(self, session_id: str | None) -> TierPolicy | None:
        """Return the tier policy of the session's cache. If no session has this id, return the policy of new
        caches."""
        session = self.get(session_id)
        return session.policy if session else self.policy

    @property
    def nbytes(self) -> int:
        """Return the bytes of all KV caches, including the caches of running requests. A page that several
        caches share counts once."""
        return held_bytes({id(s): s.cache for s in (*self._sessions.values(), *self._running)}.values())

    def put(self, session_id: str, session: Session) -> None:
        """Replace the session that is kept under this id. Do nothing if no session is kept under the id."""
        if session_id in self._sessions:
            self._take_out(session)
            self._name(session_id, session)

    def drop(self, session_id: str) -> None:
        """Remove a session, its forks for other replies, and its files."""
        for name in [name for name, kept in self._sessions.items() if kept.owner == session_id]:
            del self._sessions[name]
        self.disk.remove(session_id)

    def clear(self) -> None:
        self.disk.wait()
        self._sessions.clear()

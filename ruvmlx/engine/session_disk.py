"""Sessions that go to disk and come back: what decides whether they may, and whether they are worth it."""

import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial

from ..backends.base import Backend
from ..kv.cache import PagedCache
from ..kv.chain import Key, extend, root
from ..kv.disk import CacheFolder
from ..kv.owners import REQUESTS
from ..kv.policy import TierPolicy
from .session import Session, common_prefix


class CacheKeys:
    """The keys of a backend's caches."""

    def __init__(self, backend: Backend, model: str):
        """model: its fingerprint."""
        self._backend, self._model = backend, model

    def key(self, policy: TierPolicy | None) -> Key:
        """All that keys and values depend on, except the tokens. MicroLoRA is left out: it changes only the
        output head, which comes after them."""
        base = self._backend.lora
        return {
            "model": self._model,
            "backend": self._backend.name,
            "kernels": self._backend.kernels,
            "policy": {"name": policy.name, **policy.lengths_by_name()} if policy else None,
            "base": base.of_keys if base else "",
        }

    def root(self, policy: TierPolicy | None, salt: str = "") -> bytes:
        """The name of the empty prefix (kv/chain.py)."""
        return root(self.key(policy), salt)


class SessionsOnDisk:
    """folder: None keeps none."""

    def __init__(self, folder: CacheFolder | None, backend: Backend, keys: CacheKeys):
        self.folder, self._backend, self._keys = folder, backend, keys
        self._early: EarlyWriter | None = None

    def keep_early(self, session: Session) -> None:
        """Begin to write what the next replies will not change, in another thread, so that little is left for
        the end of the process. Only where a page's memory can be read from any thread."""
        cache = session.cache
        paged = isinstance(cache, PagedCache) and cache.pool.storage.background and cache.ends[-1] > 0
        if self.folder is None or not self.folder.budget or session.owner is None or not paged:
            return
        if self._early is None:
            self._early = EarlyWriter(self.folder)
        self._early.put(session)

    def early_caches(self) -> set[int]:
        """Ids of the caches that are being written early."""
        session = self._early.session if self._early else None
        return {id(session.cache)} if session else set()

    def stop_early(self) -> bool:
        """Let go of the sequence that is being written early; False if there is none."""
        held = bool(self.early_caches())
        self.wait()
        return held

    def wait(self) -> None:
        """Stop writing early, after the page that is being written."""
        if self._early is not None:
            self._early.stop()
            self._early = None

    def keep(self, name: str, session: Session, until: float) -> None:
        """Write what belongs to a chat, or to a request that may be resumed. name: under which it is kept in
        memory."""
        owned = session.owner is not None and session.owner in (name, REQUESTS) and not session.branching
        if self.folder is None or not owned or len(session.tokens) != session.cache.offset:
            return
        names = extend(session.chain[:1], session.tokens)
        self.folder.save(session.owner or "", names, session.tokens, session.cache, until)

    def longest(
        self, held: Session | None, prompt: Sequence[int], policy: TierPolicy | None, salt: str
    ) -> Session | None:
        """The sequence on disk that shares the longest prefix with the prompt, if that is longer than the one
        held in memory."""
        if self.folder is None:
            return None
        names = extend([self._keys.root(policy, salt)], prompt)
        n = held.shares(prompt, extend(held.chain[:1], prompt)) if held else 0
        found = self.folder.load(names, prompt, partial(self._backend.new_cache, policy), n)
        if found is None or common_prefix(found[1], prompt) <= n:
            return None
        return Session(found[0], policy, self._backend.lora, found[1], names[:1])

    def migrate_session(self, session_id: str, policy: TierPolicy | None) -> Session | None:
        """A chat from its file in the format of before."""
        if self.folder is None:
            return None
        make = partial(self._backend.new_cache, policy)
        found = self.folder.migrate(session_id, self._keys.key(policy), make)
        return found and Session(found[0], policy, self._backend.lora, found[1], [self._keys.root(policy)])

    def forget(self, session: Session) -> None:
        """Remove what is on disk of a session that cannot be trusted."""
        if self.folder is not None:
            self.folder.discard(extend(session.chain[:1], session.tokens))
            self.remove(session.owner)

    def remove(self, owner: str | None) -> None:
        """Remove what only this chat uses."""
        if self.folder is not None and owner is not None and owner != REQUESTS:
            self.folder.remove(owner)


class EarlyPart:
    """A sequence to be written early. session: a fork; only the thread that made it lets go of it, because
    its pages are counted by that thread."""

    def __init__(self, session: Session):
        self.session: Session | None = session
        self.done = threading.Event()

    def write(self, folder: CacheFolder, stop: Callable[[], bool]) -> None:
        session = self.session
        assert session is not None
        names, owner = extend(session.chain[:1], session.tokens), session.owner or ""
        folder.save(owner, names, session.tokens, session.cache, math.inf, stop)


class EarlyWriter:
    """A thread that writes sequences while replies go on. It reads forks: their pages do not change."""

    def __init__(self, folder: CacheFolder):
        self._folder, self._stopped = folder, threading.Event()
        self._todo: queue.SimpleQueue[EarlyPart | None] = queue.SimpleQueue()
        self._part: EarlyPart | None = None
        self._thread = threading.Thread(target=self._run, name="ruvmlx-keep", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The one that is kept in memory to be written."""
        return self._part.session if self._part is not None else None

    def put(self, session: Session) -> None:
        """Write this sequence, unless the one before is still being written: then the next reply brings the
        rest."""
        if self._part is not None and not self._part.done.is_set():
            return
        self._let_go()
        self._part = EarlyPart(session.fork())
        self._todo.put(self._part)

    def stop(self) -> None:
        """Wait for the page that is being written."""
        self._stopped.set()
        self._todo.put(None)
        self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        if self._part is not None:
            self._part.session = None
            self._part = None

    def _run(self) -> None:
        while (part := self._todo.get()) is not None:
            try:
                part.write(self._folder, self._stopped.is_set)
            finally:
                part.done.set()

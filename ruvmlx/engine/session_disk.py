"""This module writes sessions (kept KV caches) to disk and loads them. The module decides which sessions go
to disk, and whether a stored session shares a longer prefix with a prompt than the sessions in memory do."""

import hashlib
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
from ..models.config.model import Model
from ..tiers import COLD
from .session import Session, common_prefix


def model_key(model: Model) -> str:
    """Return a text that identifies the weights of a model. The text has the fingerprint and a hash of the
    size and the modification time of each file. The fingerprint alone is not enough: it depends on few
    tensors, and two models can differ only in the other tensors. Hidden files do not count, because macOS
    writes a file .DS_Store into each folder that its user looks at."""
    files = sorted(model.path.glob("[!.]*")) if model.path.is_dir() else [model.path]
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return f"{model.fingerprint} {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


class CacheKeys:
    """CacheKeys makes the keys (data and hashes) by which the caches of a backend are found on disk."""

    def __init__(self, backend: Backend, model: str):
        """model: the result of `model_key`."""
        self._backend, self._model = backend, model

    def key(self, policy: TierPolicy | None) -> Key:
        """Return all data, except the tokens, on which the attention keys and values in a KV cache depend.
        MicroLoRA is left out, because it changes only the output head, which comes after the cache."""
        base = self._backend.lora
        tiers = {"name": policy.name, **policy.lengths_by_name()} if policy else None
        if policy and policy.lowest > COLD:  # the key of an earlier version's caches has no lowest tier
            tiers = {**(tiers or {}), "lowest": policy.lowest}
        return {
            "model": self._model,
            "backend": self._backend.name,
            "kernels": self._backend.kernels,
            "policy": tiers,
            "base": base.of_keys if base else "",
        }

    def root(self, policy: TierPolicy | None, salt: str = "") -> bytes:
        """Return the name of the empty prefix: the first name of a hash chain over KV pages (kv/chain.py)."""
        return root(self.key(policy), salt)


class SessionsOnDisk:
    """The sessions in a folder of cache files.

    folder: the folder of cache files; None: no session is stored
    """

    def __init__(self, folder: CacheFolder | None, backend: Backend, keys: CacheKeys):
        self.folder, self._backend, self._keys = folder, backend, keys
        self._early: EarlyWriter | None = None
        self._failures: list[str] = []  # the classes of the errors that ended an early write

    def keep_early(self, session: Session) -> None:
        """Start to write, in another thread, the pages that the next replies will not change, so that few
        pages are left to write at the end of the process. If only the engine's thread can read the memory of
        a page, do nothing."""
        cache = session.cache
        paged = isinstance(cache, PagedCache) and cache.pool.storage.background and cache.ends[-1] > 0
        if self.folder is None or not self.folder.budget or session.owner is None or not paged:
            return
        if self._early is None:
            self._early = EarlyWriter(self.folder, self._failures)
        self._early.put(session)

    def early_caches(self) -> set[int]:
        """Return the Python id (`id`) of the cache that `keep_early` holds, because another thread writes it
        to disk or has just written it; an empty set if there is none."""
        session = self._early.session if self._early else None
        return {id(session.cache)} if session else set()

    def take_failures(self) -> list[str]:
        """Return, once, the classes of the errors that ended a write of `keep_early`."""
        return [self._failures.pop(0) for _ in range(len(self._failures))]

    def stop_early(self) -> bool:
        """Stop the write that `keep_early` began, and release its sequence. Returns False if `keep_early`
        holds no sequence."""
        held = bool(self.early_caches())
        self.wait()
        return held

    def wait(self) -> None:
        """Stop the write that `keep_early` began, after the KV page that is being written."""
        if self._early is not None:
            self._early.stop()
            self._early = None

    def keep(self, name: str, session: Session, until: float) -> None:
        """Write a session to disk if it belongs to a chat that exists, or to a request with `resumable`; else
        do nothing. Another process, or the runtime of another model, can have erased the chat.

        name: the name of the session in memory
        until: the latest end of the write (a time of time.monotonic())
        """
        owned = session.owner is not None and session.owner in (name, REQUESTS) and not session.branching
        if self.folder is None or not owned or len(session.tokens) != session.cache.offset:
            return
        if session.owner != REQUESTS and not self.folder.exists(session.owner or ""):
            return
        names = extend(session.chain[:1], session.tokens)
        self.folder.save(session.owner or "", names, session.tokens, session.cache, until)

    def longest(
        self, held: Session | None, prompt: Sequence[int], policy: TierPolicy | None, salt: str
    ) -> Session | None:
        """Return the stored sequence that shares the longest prefix with the prompt, if that prefix is longer
        than the one that `held` shares.

        held: the session in memory that shares the longest prefix with the prompt; None: no such session
        """
        if self.folder is None:
            return None
        names = extend([self._keys.root(policy, salt)], prompt)
        n = held.shared_tokens(prompt) if held else 0
        found = self.folder.load(names, prompt, partial(self._backend.new_cache, policy), n)
        if found is None or common_prefix(found[1], prompt) <= n:
            return None
        return Session(found[0], policy, self._backend.lora, found[1], names[:1])

    def forget(self, session: Session) -> None:
        """Remove the stored pages of a session whose cache has wrong content, and the other files that only
        its chat uses."""
        if self.folder is not None:
            self.folder.discard(extend(session.chain[:1], session.tokens))
            self.remove(session.owner)

    def remove(self, owner: str | None) -> None:
        """Remove the cache files that only the chat with the session id `owner` uses. If `owner` is REQUESTS,
        only end the other thread's write: the caller removes the files through another CacheFolder."""
        if owner == REQUESTS:
            self.wait()
        if self.folder is not None and owner is not None and owner != REQUESTS:
            self.folder.remove(owner)


class EarlyPart:
    """A sequence that EarlyWriter writes.

    session: a fork of the sequence. Only the thread that made the fork can release the fork, because this
        thread counts the users of the fork's pages.
    """

    def __init__(self, session: Session):
        self.session: Session | None = session
        self.done = threading.Event()

    def write(self, folder: CacheFolder, stop: Callable[[], bool]) -> None:
        session = self.session
        assert session is not None
        names, owner = extend(session.chain[:1], session.tokens), session.owner or ""
        folder.save(owner, names, session.tokens, session.cache, math.inf, stop)


class EarlyWriter:
    """A thread that writes sequences while replies run. The thread reads forks of the sequences, because the
    pages of a fork do not change. If an error ends a write, the thread goes on with the next sequence."""

    def __init__(self, folder: CacheFolder, failures: list[str]):
        """failures: a list; the thread adds the class name of an error to the list when the error ends a
        write"""
        self._folder, self._stopped, self._failures = folder, threading.Event(), failures
        self._todo: queue.SimpleQueue[EarlyPart | None] = queue.SimpleQueue()
        self._part: EarlyPart | None = None
        self._thread = threading.Thread(target=self._run, name="ruvmlx-keep", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The fork that is written, or that was written last; it stays in memory until the next `put` or
        `stop`."""
        return self._part.session if self._part is not None else None

    def put(self, session: Session) -> None:
        """Let the thread write this sequence. If the thread still writes the previous sequence, do nothing,
        because the next reply calls `put` again."""
        if self._part is not None and not self._part.done.is_set():
            return
        self._let_go()
        self._part = EarlyPart(session.fork())
        self._todo.put(self._part)

    def stop(self) -> None:
        """Let the thread stop after the KV page that it writes now, and wait until the thread has ended."""
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
            except Exception as error:  # noqa: BLE001 - the next sequence can be written
                self._failures.append(type(error).__name__)
            finally:
                part.done.set()

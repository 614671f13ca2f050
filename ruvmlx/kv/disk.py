"""This module stores KV caches on disk, so that the model need not read the same prompt again. README.md has
the format.

Each KV page is stored in one file for each tier (precision) that it had when it was stored. The file name of
a full page consists of the page's name in the hash chain (chain.py) and the page's tier. The page's name
depends on the model, the version of ruvmlx, the policy, the salt, all tokens up to the page's end and a few
other data (chain.Key). A stored page therefore serves only prompts with the same values of these data.

The module ignores or removes a file that is damaged or belongs to another model. The module hides a disk's
read and write errors from the user, because a prompt without a stored cache only takes longer. The files hold
keys and values of the user's words, so the files are as private as the store of the chats. When a chat is
deleted, the files that only this chat used are deleted too (owners.py).
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..tiers import HOT, PAGE
from . import assembly, owners, page_file
from .assembly import SEQUENCE, SUFFIXES, TAIL
from .cache import PagedCache
from .chain import Chain, page_name
from .page_file import WHOLE, PageFile
from .storage import Bytes

# seconds: a process that ends starts the write of another cache only within this time
MAX_EXIT_SECONDS = 0.3
# seconds: the time limit `until` of a cache's write while no reply runs (at the program's end: of all writes
# together); page files that are complete at the limit stay on disk
MAX_WRITE_SECONDS = 1.0
STALE = 60.0  # seconds: `tidy` removes an unfinished file that is older than this
# seconds: pages of requests outside of chats that were unused for this time are removed when a program starts
DAY = 86400.0
_PAGE_SUFFIXES = (*SUFFIXES.values(), TAIL, SEQUENCE)
OLD = ".kv"  # an old format with one file for each chat; such files are deleted and never read


class Piece(NamedTuple):
    """A part of a sequence (a page or the whole sequence) that will be one file in the cache folder."""

    path: str  # the name of the file in the cache folder
    file: PageFile
    parts: Callable[[], Iterator[Bytes]]


class CacheFolder:
    """The folder of page files. If the files exceed the budget, the least recently used files are removed
    first.

    budget: the maximum bytes of all cache files, without the owners' lists; 0: nothing is stored
    exists: a function that returns True if there is a chat with this id; only the thread of the store calls
        it
    """

    def __init__(self, path: Path, budget: int, exists: Callable[[str], bool] = lambda owner: True):
        self.path, self.budget, self.exists = path, budget, exists
        self._lock = threading.Lock()  # `save` and `remove` hold this lock while they write or delete files
        # The owners (chats) whose files `remove` has deleted. A thread that still saves pages of one of these
        # owners must stop.
        self._removed: set[str] = set()

    @classmethod
    def of_store(
        cls, store: Path, budget: int = 0, exists: Callable[[str], bool] = lambda owner: True
    ) -> "CacheFolder":
        """Return the folder "kv" beside the store's file."""
        return cls(store.parent / "kv", budget, exists)

    # Sequences ----------------------------------------------------------------------------------

    def save(
        self,
        owner: str,
        names: Chain,
        tokens: list[int],
        cache: Any,
        until: float,
        stop: Callable[[], bool] | None = None,
    ) -> bool:
        """Write the pages of `cache` that are not on disk yet, the oldest first. Returns False if the
        sequence is shorter than a page or larger than the budget, if the owner's name is not safe in a file
        name, if the disk refuses the write, if the write takes longer than `until`, or if `stop` or `remove`
        ends the write between two files; else True, also if there is no file to write.

        names: the page names of the tokens (chain.py)
        until: the time, as time.monotonic() returns it, at which the write stops
        stop: a function that says if the write must stop; given only if another thread than the engine's
            calls `save`. With `stop`, only pages with a precision below f16 are written, because the next
            reply does not change these pages. Before each file, `save` ends if `stop` returns True or if
            `remove` was called for the owner.
        """
        if len(tokens) < PAGE or not owners.fits(owner):
            return False
        pieces = _pieces(names, tokens, cache)
        if stop is not None:
            pieces = [piece for piece in pieces if piece.file.tier < HOT]
        if sum(page_file.size(piece.file) for piece in pieces) > self.budget:
            return False
        with suppress(OSError, page_file.TooLate):
            missing = self._begin(owner, pieces, stop is None)
            for piece in missing:
                with self._lock:
                    if stop is not None and (stop() or owner in self._removed):
                        return False
                    page_file.write(self.path / piece.path, piece.file, piece.parts(), until)
            self._touch([piece.path for piece in pieces])
            with self._lock:
                return owner not in self._removed
        return False

    def _begin(self, owner: str, pieces: list[Piece], anew: bool) -> list[Piece]:
        """Add the files of `pieces` to the owner's list, and remove old files until the missing files fit
        into the budget. Returns the pieces whose files are missing on disk; an empty list if the owner was
        removed. anew: True if a removed owner is valid again."""
        with self._lock:
            if anew:
                self._removed.discard(owner)
            if owner in self._removed or not pieces:
                return []
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = set(os.listdir(self.path))
            self._own(owner, [piece.path for piece in pieces], there)
            missing = [piece for piece in pieces if piece.path not in there]
            self._touch([piece.path for piece in pieces])
            self._make_room(sum(page_file.size(piece.file) for piece in missing))
        return missing

    def load(
        self, names: Chain, prompt: Sequence[int], make: Callable[[], Any], known: int = 0
    ) -> tuple[Any, list[int]] | None:
        """Return (cache, its tokens) made of the files that share the longest prefix with the prompt. The
        cache can hold more tokens after the common prefix, which differ from the prompt. Returns None if no
        cache can be made, for example because no file has a full page of the prompt after the first `known`
        tokens. If a file is damaged, `load` removes it and searches again.

        names: the page names of the prompt
        make: a function that returns an empty cache
        known: the number of the prompt's first tokens that the caller already has in a cache in memory
        """
        unknown = {name.hex() for name in names[known // PAGE + 1 :]} | {names[0].hex()}
        useless: set[str] = set()  # names of damaged files that could not be removed
        while self.budget and len(unknown) > 1:
            there = [file for file in self._file_names() if file not in useless]
            if not any(_chain_name(file) in unknown for file in there):
                return None
            cache = make()
            look = assembly.pages if isinstance(cache, PagedCache) else assembly.sequence
            if (found := look(self.path, there, names, prompt, cache)) is None:
                return None
            try:
                tokens = found.into(cache, prompt)
            except assembly.Damaged as damaged:
                if damaged.path.name not in there:
                    return None
                useless.add(damaged.path.name)
                page_file.unlink(damaged.path)
                continue
            except MemoryError:  # the files are sound; the model reads the prompt in smaller pieces
                return None
            self._touch([path.name for path, _, _ in found.wanted])
            return cache, tokens
        return None

    def discard(self, names: Chain) -> None:
        """Remove the files of the pages whose names are in a chain, and of the partly filled pages and whole
        sequences that come after a name of the chain. The caller calls `discard` because these files hold
        wrong keys or values."""
        chain = {name.hex() for name in names}
        for name in self._file_names():
            if _chain_name(name) in chain:
                page_file.unlink(self.path / name)

    # Owners -------------------------------------------------------------------------------------

    def remove(self, owner: str) -> None:
        """Delete the files that no owner except `owner` uses. An owner is a chat, or REQUESTS for all
        requests outside of chats."""
        if owners.fits(owner):
            with self._lock:
                self._removed.add(owner)
                page_file.unlink(self.path / (owner + OLD))
                page_file.unlink(self.path / (owner + owners.USES))
                self._sweep()

    def _own(self, owner: str, names: list[str], there: Collection[str]) -> None:
        """Add the file names `names` to the owner's list. If a name is new, remove from the list the names of
        files that are not on disk (`there`)."""
        before = owners.used_by(self.path, owner)
        if not set(names) <= set(before):
            owners.put(self.path, owner, sorted({*names, *(name for name in before if name in there)}))

    def _sweep(self) -> None:
        """Remove the page files that are in no owner's list."""
        used = owners.used_files(self.path, owners.all_owners(self.path))
        for name in self._file_names():
            if name not in used:
                page_file.unlink(self.path / name)

    # All of them --------------------------------------------------------------------------------

    def tidy(self, known: Collection[str]) -> None:
        """Remove the files of deleted chats and of the old format, the files of requests outside of chats
        that were unused for a day, the unfinished files of killed processes and those older than STALE, the
        least recently used files beyond the budget, and the lists of owners without page files.

        known: the ids of all chats
        """
        now = time.time()
        for name in self._file_names((OLD, owners.USES)):
            owner, _, ending = name.rpartition(".")
            if f".{ending}" == OLD or (owner not in known and owner != owners.REQUESTS):
                page_file.unlink(self.path / name)
        for name in self._file_names((page_file.UNFINISHED,)):
            if page_file.is_abandoned(name) or now - page_file.age(self.path / name)[0] > STALE:
                page_file.unlink(self.path / name)
        outside = owners.used_by(self.path, owners.REQUESTS)
        recent = [name for name in outside if now - page_file.age(self.path / name)[0] < DAY]
        with suppress(OSError):
            if recent != outside:
                owners.put(self.path, owners.REQUESTS, recent)
        self._sweep()
        self._make_room(0)
        there = set(self._file_names())
        for owner in owners.all_owners(self.path):
            if there.isdisjoint(owners.used_by(self.path, owner)):
                page_file.unlink(self.path / (owner + owners.USES))

    def contents(self) -> tuple[int, int]:
        """Return the number of chats with files, and the number of bytes of all cache files (without the
        owners' lists)."""
        chats = {name.rpartition(".")[0] for name in self._file_names((owners.USES,))}
        sizes = [page_file.age(self.path / name)[1] for name in self._file_names()]
        return len(chats - {owners.REQUESTS}), sum(sizes)

    def _file_names(self, endings: tuple[str, ...] = _PAGE_SUFFIXES) -> list[str]:
        """Return the names of the folder's files that end with one of `endings`."""
        try:
            return [name for name in os.listdir(self.path) if name.endswith(endings)]
        except OSError:
            return []

    def _touch(self, names: Sequence[str]) -> None:
        """Set the files' times of last use to now. `names` begins with a sequence's first page; each next
        page gets a slightly older time, so that `_make_room` removes the first pages last, because the later
        pages are useless without the first pages."""
        now = time.time_ns()
        for i, name in enumerate(names):
            with suppress(OSError):
                os.utime(self.path / name, ns=(now - 1000 * i,) * 2)

    def _make_room(self, more: int) -> None:
        """Remove the least recently used files until `more` new bytes fit into the budget."""
        # The paths are strings, not Path objects, because pathlib interns each name, which adds megabytes for
        # many files.
        paths = [f"{self.path}/{name}" for name in self._file_names()]
        ages = sorted((*page_file.age(path), path) for path in paths)
        held = more + sum(nbytes for _, nbytes, _ in ages)
        for _, nbytes, path in ages:
            if held <= self.budget:
                break
            page_file.unlink(Path(path))
            held -= nbytes


def _chain_name(file: str) -> str:
    """Return the first part of a file's name, in hex: a name in the chain, of the page itself or of the
    chain's beginning before a partly filled page or a whole sequence."""
    return file.partition(".")[0].partition("-")[0]


# Written files -------------------------------------------------------------------------------------


def _pieces(names: Chain, tokens: list[int], cache: Any) -> list[Piece]:
    """Return one piece for each file that will hold a part of the sequence, the oldest tokens first."""
    if not isinstance(cache, PagedCache):
        dump = cache.dump()
        name = page_name(names[0], tokens)
        file = PageFile(name, WHOLE, {"tokens": tokens, "cache": dump.facts}, dump.nbytes)
        return [Piece(f"{names[0].hex()}-{name.hex()}{SEQUENCE}", file, lambda: dump.parts)]
    layout = cache.pool.storage.layout
    return [_piece(names, tokens, layout, *page) for page in cache.dumped_pages()]


def _piece(
    names: Chain, tokens: list[int], layout: str, i: int, tier: int, nbytes: int, page: Callable[[], Bytes]
) -> Piece:
    held = tokens[PAGE * i : PAGE * (i + 1)]
    facts: dict[str, Any] = {"layout": layout}
    if len(held) == PAGE:
        name, path = names[i + 1], names[i + 1].hex() + SUFFIXES[tier]
    else:
        name, facts = page_name(names[i], held), facts | {"tokens": held}
        path = f"{names[i].hex()}-{name.hex()}{TAIL}"
    return Piece(path, PageFile(name, tier, facts, nbytes), lambda: iter([page()]))

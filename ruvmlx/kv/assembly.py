"""This module finds the files on disk that hold the longest prefix of a prompt, and fills a KV cache from
these files.

A KV page can have several files on disk, one for each tier (precision), because chats of different lengths
stored the page. In one cache, no page has a lower tier than an older page. Of the files of one page, this
module takes the file whose tier the tier policy gives to a page of this age. If this file is missing, or if
its tier is higher than the tier of a newer page, the module takes another file whose tier is not higher than
the tier of any newer page.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..tiers import HOT, PAGE, TIERS
from . import page_file
from .cache import SLACK, PagedCache, facts_of
from .chain import Chain, page_name
from .page_file import WHOLE

SUFFIXES = {tier: f".{row.name}" for tier, row in enumerate(TIERS)}
TAIL, SEQUENCE = ".tail", ".sequence"


class Damaged(Exception):
    """This error means that a cache cannot be restored from a file, because the file is missing or damaged,
    or because its content does not match its name."""

    def __init__(self, path: Path):
        self.path = path


class Found(NamedTuple):
    """The files from which one KV cache can be restored.

    facts: the values (offset, dropped pages, tiers, layout) that `PagedCache.restore` needs in addition to
        the bytes of the pages
    wanted: (file, page name, tier) of each file, in the order in which `restore` reads the files
    tail: the tokens of the last file if this file holds a partly filled page or a whole sequence; else an
        empty list
    """

    facts: dict[str, Any]
    wanted: list[tuple[Path, bytes, int]]
    tail: list[int]

    def into(self, cache: Any, prompt: Sequence[int]) -> list[int]:
        """Fill the empty `cache` from the files and return the tokens of the filled cache. Raises Damaged if
        a file cannot be used."""
        todo = iter(self.wanted)
        path, body = Path(), memoryview(b"")

        def read(nbytes: int) -> bytes:
            """Return the next bytes. Raises ValueError if `nbytes` bytes cross the end of a file."""
            nonlocal path, body
            if nbytes and not body:
                path, name, tier = next(todo)
                body = _body(path, name, tier, cache)
            if not 0 <= nbytes <= len(body):
                raise ValueError(f"{nbytes} bytes of {len(body)}")
            data, body = bytes(body[:nbytes]), body[nbytes:]
            return data

        try:
            cache.restore(self.facts, read)
            if body or next(todo, None) is not None or (cache.offset - len(self.tail)) % PAGE:
                raise ValueError("the files hold something else than the cache")
        except (*page_file.UNUSABLE, StopIteration) as e:
            raise Damaged(path) from e
        return [*prompt[: cache.offset - len(self.tail)], *self.tail]


def _body(path: Path, name: bytes, tier: int, cache: Any) -> memoryview:
    facts, body = page_file.read(path, name, tier)
    if tier != WHOLE and facts.get("layout") != cache.pool.storage.layout:
        raise ValueError("pages of another layout")
    return body


# Pages ----------------------------------------------------------------------------------------------


def pages(
    folder: Path, there: Sequence[str], names: Chain, prompt: Sequence[int], cache: PagedCache
) -> Found | None:
    """Return the files of the longest run of consecutive pages of the prompt whose tiers can be together in
    one cache; None if no cache can be made of the files.

    there: the names of the cache folder's page files
    names: the page names of the prompt (chain.py)
    """
    files = set(there)
    held = [[t for t, ending in SUFFIXES.items() if name.hex() + ending in files] for name in names[1:]]
    end = len(held)
    while (run := _run(held[:end], cache.window)) is not None:
        first, end = run
        tail = _tail(folder, there, names[end], prompt[PAGE * end :])
        offset = PAGE * end + (len(tail[0]) if tail else 0)
        tiers = _tiers(held[first:end], first, offset, cache)
        if len(tiers) < end - first:
            # each file of this page has a higher tier than a newer page: search again without this page
            held[end - len(tiers) - 1] = []
            continue
        return _sound(folder, names, first, tiers, tail, cache)
    return None


def _run(held: Sequence[Sequence[int]], window: int) -> tuple[int, int] | None:
    """Return (first, end): the pages [first, end) are the run with the highest end among the runs of pages on
    disk from which a cache can be restored. Without a sliding window, the run begins with the first page.
    With a sliding window, the run has at least the pages of the window."""
    for end in range(len(held), 0, -1):
        needed = max(0, PAGE * end - window) // PAGE if window else 0
        if all(held[needed:end]):
            first, oldest = needed, max(0, needed - SLACK // PAGE - 2)
            while first > oldest and held[first - 1]:
                first -= 1
            return first, end
    return None


def _tiers(held: Sequence[Sequence[int]], first: int, offset: int, cache: PagedCache) -> list[int]:
    """Return the tiers in which the pages are read, the oldest page first. The function chooses from the
    newest page to the oldest; if each file of a page has a higher tier than a newer page, the list holds only
    the tiers of the newer pages."""
    wanted, cap = cache.policy.counts(offset), HOT
    tiers: list[int] = []
    for i in range(len(held) - 1, -1, -1):
        want = min(cap, sum(first + i >= end for end in wanted))
        some = [tier for tier in held[i] if tier <= cap]
        if not some:
            break
        lower = [tier for tier in some if tier <= want]
        cap = want if want in some else min(set(some) - set(lower), default=max(some))
        tiers.insert(0, cap)
    return tiers


def _sound(
    folder: Path,
    names: Chain,
    first: int,
    tiers: list[int],
    tail: tuple[list[int], Path, bytes] | None,
    cache: PagedCache,
) -> Found | None:
    """Return the page files, each in its chosen tier, that together make a usable cache. Return None if the
    files hold no whole page, or less than the sliding window. If a page of the lowest tier holds one of the
    newest `policy.lengths[0]` tokens, leave out the page with the first of these tokens and all later pages;
    the caller computes the left-out tokens again, as after `PagedCache.trim`."""
    end, wanted = first + len(tiers), []
    offset = PAGE * end + (len(tail[0]) if tail else 0)
    newest = max(0, offset - cache.policy.lengths[0]) // PAGE
    if newest < first + tiers.count(0):
        end, offset, tail = newest, PAGE * newest, None
    if end <= first or (first and offset < PAGE * first + cache.window):
        return None
    for i in range(first, end):
        tier, name = tiers[i - first], names[i + 1]
        wanted.append((folder / (name.hex() + SUFFIXES[tier]), name, tier))
    if tail:
        wanted.append((tail[1], tail[2], HOT))
    ends = [first + sum(tier <= lower for tier in tiers[: end - first]) for lower in range(HOT)]
    return Found(facts_of(cache.pool.storage.layout, offset, first, ends), wanted, tail[0] if tail else [])


def _tail(
    folder: Path, there: Sequence[str], before: bytes, rest: Sequence[int]
) -> tuple[list[int], Path, bytes] | None:
    """Return (tokens, file, page name) of the stored, partly filled page that has the longest common prefix
    with `rest`, the prompt's tokens after page `before`; None if no such page begins with the first token of
    `rest`.

    before: the name (chain.py) of the page before the partly filled page
    """
    beginning, best, most = before.hex() + "-", None, 0
    for file in there:
        if file.endswith(TAIL) and file.startswith(beginning):
            tokens = _tokens(folder / file)
            if (n := _common(tokens, rest)) > most:
                best, most = (tokens, folder / file, page_name(before, tokens)), n
    return best


# Whole sequences ------------------------------------------------------------------------------------


def sequence(
    folder: Path, there: Sequence[str], names: Chain, prompt: Sequence[int], cache: Any
) -> Found | None:
    """Return the file that holds a whole sequence (of a cache without pages) and that has the longest common
    prefix with the prompt. Return None if no common prefix has at least PAGE tokens."""
    best, most = None, PAGE - 1
    for file in there:
        if file.endswith(SEQUENCE) and file.startswith(names[0].hex() + "-"):
            facts, tokens = page_file.peek(folder / file), _tokens(folder / file)
            if (n := _common(tokens, prompt)) > most:
                wanted = [(folder / file, page_name(names[0], tokens), WHOLE)]
                best, most = Found(facts.get("cache", {}), wanted, tokens), n
    return best


def _tokens(path: Path) -> list[int]:
    tokens = page_file.peek(path).get("tokens")
    fits = isinstance(tokens, list) and all(isinstance(t, int) and 0 <= t < 1 << 32 for t in tokens)
    return tokens if fits and tokens else []


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences of token ids."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

"""What tests of caches on disk share."""

from functools import partial

import numpy as np

from ruvmlx.kv.chain import Chain, extend, root
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import TierPolicy
from ruvmlx.tiers import PAGE

FOREVER = float("inf")
SMALL = TierPolicy("tiered", (64, 128))
KEY = {"model": "m", "base": ""}


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def names_of(tokens: list[int], key=KEY, salt: str = "") -> Chain:
    return extend([root(key, salt)], tokens)


def files(folder: CacheFolder) -> list:
    """The pages on disk, by name."""
    return sorted(file for file in folder.path.glob("*") if file.suffix not in (".uses", ".new", ".kv"))


def chats_with_pages(folder: CacheFolder) -> set[str]:
    """The chats that use pages."""
    return {file.stem for file in folder.path.glob("*.uses")}


def save(folder: CacheFolder, tokens: list[int], cache, owner: str = "chat", key=KEY) -> bool:
    return folder.save(owner, names_of(tokens, key), tokens, cache, FOREVER)


def bytes_of(cache) -> list[bytes]:
    return [part.tobytes() for part in cache.dump().parts]


def read_back(folder: CacheFolder, backend, key=KEY, prompt=None, salt: str = "", of: int = 0) -> int:
    """How many tokens of the prompt are found. What is found has the bytes of the cache of tokens_of(200,
    of), which was never stored."""
    prompt = tokens_of(200, of) if prompt is None else prompt
    found = folder.load(names_of(prompt, key, salt), prompt, partial(backend.new_cache, SMALL))
    if found is None:
        assert backend.pool.pages == [0, 0, 0], "a page is lost"
        return 0
    cache, tokens = found
    whole = backend.new_cache(SMALL)
    backend.prefill(tokens_of(200, of), whole)
    full = cache.offset // PAGE
    assert bytes_of(cache)[:full] == bytes_of(whole)[:full]
    n = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), len(tokens))
    cache.clear(), whole.clear()
    return n

"""What tests of caches on disk share."""

import numpy as np

from ruvmlx.kv.chain import Chain, extend, root
from ruvmlx.kv.disk import CacheFolder
from ruvmlx.kv.policy import TierPolicy

SMALL = TierPolicy("tiered", (64, 128))
KEY = {"model": "m", "base": ""}


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, n).tolist()


def names_of(tokens: list[int], key=KEY, salt: str = "") -> Chain:
    return extend([root(key, salt)], tokens)


def files(folder: CacheFolder) -> list:
    """The pages on disk, by name."""
    return sorted(file for file in folder.path.glob("*") if file.suffix not in (".uses", ".new", ".kv"))


def kept(folder: CacheFolder) -> set[str]:
    """The chats that use pages."""
    return {file.stem for file in folder.path.glob("*.uses")}

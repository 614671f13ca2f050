import pytest

from ruvmlx.backends.native.backend import NativeBackend
from ruvmlx.kv.disk import CacheFolder

from .disk import SMALL, save, tokens_of


@pytest.fixture
def folder(tmp_path):
    """An empty folder for caches."""
    return CacheFolder(tmp_path / "kv", 1 << 30)


# What is of no use --------------------------------------------------------------------------------


@pytest.fixture
def saved_backend(tiny, folder):
    """A backend; its cache of 200 tokens is in the folder, used by "chat"."""
    backend = NativeBackend(tiny, threads=1)
    cache = backend.new_cache(SMALL)
    backend.prefill(tokens_of(200), cache)
    assert save(folder, tokens_of(200), cache)
    cache.clear()
    return backend

import pytest

from ruvmlx.kv.disk import CacheFolder


@pytest.fixture
def folder(tmp_path):
    """An empty folder for caches."""
    return CacheFolder(tmp_path / "kv", 1 << 30)

"""Reading files that may be anything."""

import tracemalloc

import pytest

from ruvmlx.platform.files import read_ordinary


def test_memory_is_that_of_the_file_not_of_the_limit(tmp_path):
    file = tmp_path / "small"
    file.write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert read_ordinary(file, 100_000_000) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [999, 1000, 1001, 5000])
def test_the_limit(tmp_path, size):
    file = tmp_path / "file"
    file.write_bytes(b"x" * size)
    if size <= 1000:
        assert read_ordinary(file, 1000) == b"x" * size
    else:
        with pytest.raises(OSError, match="more than 1000 bytes"):
            read_ordinary(file, 1000)

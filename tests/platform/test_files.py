"""Reading files that may be anything; what a folder lacks."""

import errno
import os
import tracemalloc

import pytest

from ruvmlx.platform import files
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


@pytest.mark.parametrize("refused", [False, True])
def test_on_macos_the_drives_own_cache_is_written_too(tmp_path, monkeypatch, refused):
    """fsync of macOS leaves the data in the drive; F_FULLFSYNC does not, and some file systems refuse it."""
    full, plain, fsync = [], [], os.fsync

    def control(handle, command):
        full.append(command)
        if refused:
            raise OSError("not supported")

    monkeypatch.setattr(files.fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files.fcntl, "fcntl", control)
    monkeypatch.setattr(files.os, "fsync", lambda handle: plain.append(fsync(handle)))
    with files.replacing(tmp_path / "a") as file:
        file.write(b"words")
    assert (tmp_path / "a").read_bytes() == b"words"
    assert full == [51, 51] and len(plain) == (2 if refused else 0)  # the file, and the folder with its name


def test_why_a_folder_takes_no_data(tmp_path, monkeypatch):
    assert files.folder_fault(tmp_path) is None
    assert files.folder_fault(tmp_path / "missing").errno == errno.ENOENT

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(files.fcntl, "lockf", refuse)
    assert files.folder_fault(tmp_path).errno in files.NO_LOCKS
    assert os.listdir(tmp_path) == []

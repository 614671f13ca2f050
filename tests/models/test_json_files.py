"""JSON files of strangers: few bytes can make many values."""

import json
import struct
import tracemalloc

import pytest

from ruvmlx.chats.chat_file import parse
from ruvmlx.errors import CorruptFile
from ruvmlx.models.files.json_files import parse_json, read_object
from ruvmlx.models.files.safetensors_file import read_safetensors

MANY = b"[" + b"{}," * 5_000_000 + b"{}]"  # 15 MB, which would take 360 MB


def header_of(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize("read", ["folder", "weights", "chat"])
def test_many_values_are_refused_before_they_are_read(tmp_path, read):
    """One line, and no memory for the values."""
    file = tmp_path / "config.json"
    data = b'{"messages": [{"role": "user", "content": "a", "x": ' + MANY + b"}]}"
    file.write_bytes(header_of(data) if read == "weights" else data)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile, match=r"^[^\n]*about \d+ values[^\n]*$"):
            if read == "folder":
                read_object(file)
            elif read == "weights":
                read_safetensors(file)
            else:
                parse(data, file.name)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
    finally:
        tracemalloc.stop()


def test_large_files_of_real_kinds_are_read():
    """The index of a model of many experts, a vocabulary, and a chat with long texts."""
    index = {f"model.layers.{i}.mlp.experts.{i % 384}.down_proj.weight": f"model-{i}" for i in range(200_000)}
    vocabulary = [{"rank": i, "token_bytes": "AAAA", "token_str": "a"} for i in range(150_000)]
    chat = [{"role": "user", "content": "One, two, three: a long text with commas. " * 25_000}] * 5
    for value in (index, vocabulary, chat):
        assert parse_json(json.dumps(value).encode()) == value

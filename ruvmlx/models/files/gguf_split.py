"""This module reads models that consist of several GGUF files: `name-00001-of-00003.gguf` and so on.

The first file has the metadata of the whole model. Each file has a GGUF header and the data of some of the
model's tensors. (llama.cpp's tools/gguf-split writes this format.)
"""

import re
from dataclasses import replace
from pathlib import Path

from ...errors import CorruptFile, ModelNotFound
from .gguf import GGUFFile, GGUFTensor, read_gguf

MAX_PARTS = 1 << 12
PART = re.compile(r"(?P<name>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})")


def whole_name(path: Path) -> str:
    """Return the file's name without its suffix and without the number of its part."""
    found = PART.fullmatch(path.stem)
    return found["name"] if found else path.stem


def first_part(path: Path) -> Path:
    """Return the first part file of the split model to which the file `path` belongs. If the model is not
    split, or the first part is missing, return `path`."""
    found = PART.fullmatch(path.stem)
    first = _part(path, 0, int(found["count"])) if found else path
    return first if first.is_file() else path


def read_whole(path: Path) -> GGUFFile:
    """Read a GGUF file, or all part files of a split model, into one GGUFFile. path: the file, or any of the
    part files."""
    named = read_gguf(path)
    count = _count(named)
    if count == 1:
        return named
    paths = [_part(path, i, count) for i in range(count)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing:
        raise ModelNotFound(
            f"{path.name} is one of {count} parts of a model; missing beside it: {_short_list(missing)}."
        )
    return _join_parts([read_gguf(p) for p in paths])


def _count(file: GGUFFile) -> int:
    count = file.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_PARTS:
        raise CorruptFile(
            f"{file.path.name}: split.count is {str(count)[:40]!r}; a number up to {MAX_PARTS} was expected."
        )
    if count > 1 and not PART.fullmatch(file.path.stem):
        raise CorruptFile(
            f"{file.path.name} is one of {count} parts of a model, and its name does not say which; "
            f"expected is a name like {file.path.stem[:40]}-00001-of-{count:05}.gguf."
        )
    return max(1, count)


def _part(path: Path, i: int, count: int) -> Path:
    return path.with_name(f"{whole_name(path)}-{i + 1:05}-of-{count:05}{path.suffix}")


def _short_list(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _join_parts(files: list[GGUFFile]) -> GGUFFile:
    tensors: dict[str, GGUFTensor] = {}
    for i, file in enumerate(files):
        _check_part(file, i, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                first = files[tensors[name].part].path.name
                raise CorruptFile(f"tensor {name[:60]!r} is in both {first} and {file.path.name}.")
            tensors[name] = replace(tensor, part=i)
    wanted = files[0].metadata.get("split.tensors.count", len(tensors))
    if not isinstance(wanted, int) or wanted != len(tensors):
        raise CorruptFile(
            f"{files[0].path.name}: all parts together hold {len(tensors)} tensors; "
            f"{str(wanted)[:40]} were expected. Fetch the model again."
        )
    return replace(files[0], tensors=tensors, others=tuple(f.data for f in files[1:]))


def _check_part(file: GGUFFile, i: int, count: int) -> None:
    got = file.metadata.get("split.no"), file.metadata.get("split.count")
    # A value can be an array. The comparison of an array with a number gives an array, not True or False.
    if not all(isinstance(number, int) for number in got) or got != (i, count):
        raise CorruptFile(
            f"{file.path.name} says that it is part {str(got[0])[:20]} of {str(got[1])[:20]}, from 0; "
            f"its name says {i} of {count}. Fetch the model again."
        )

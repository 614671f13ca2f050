"""Writing safetensors files, one tensor after the other: a model larger than memory can be written."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..errors import StoreError

_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32"}


@dataclass(frozen=True)
class Planned:
    """A tensor that is made when its turn has come. dtype: NumPy's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (2 if self.dtype.endswith("16") else 4)


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays that are in memory."""
    plans = [Planned(n, a.dtype.name, a.shape, lambda a=a: a) for n, a in tensors.items()]  # type: ignore[misc]
    write_planned(path, plans, metadata)


def write_planned(path: Path, plans: Sequence[Planned], metadata: Mapping[str, str]) -> None:
    """Write tensors as they are made. The file appears whole or not at all."""
    with replacing(path) as file:
        file.write(_header(plans, metadata))
        for plan in plans:
            array = np.ascontiguousarray(plan.make())
            if (array.dtype.name, array.shape) != (plan.dtype, tuple(plan.shape)):
                raise ValueError(f"{plan.name}: {array.dtype} {array.shape} was not what was planned")
            file.write(array.reshape(-1).view(np.uint8).data)


def _header(plans: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header, padded so that the data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for plan in plans:
        span = [at, at + plan.nbytes]
        header[plan.name] = {"dtype": _NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": span}
        at += plan.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file written beside its target and then renamed: a full disk leaves the old one intact."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}.") from error
    finally:
        fresh.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """An object, readable for people."""
    with replacing(path) as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n")

"""Mutants of bytes, of JSON, and of a JSON header with bytes behind it."""

import json
import random
from collections.abc import Callable
from typing import Any

from ..models.test_gguf_fuzz import mutate

Mutator = Callable[[bytes, random.Random], bytes]

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 0.5, 1e308, -1e-320, 2**31, 2**63, 2**64, 10**400, "", "a", "\0",
    "\ud800", "é\u202e\n", "a" * 3000, [], {}, [[]], [0] * 300, {"": {}}, "1", "null", "$ref", "../x",
    "/dev/zero",
]  # fmt: skip


def byte_mutant(data: bytes, rng: random.Random) -> bytes:
    """Flipped bits, extreme numbers, cuts, insertions."""
    return mutate(data or b"\0", len(data) or 1, rng)


def header_mutant(length: int) -> Mutator:
    """The same, most of it in the first `length` bytes."""
    return lambda data, rng: mutate(data or b"\0", min(length, len(data)) or 1, rng)


def json_mutant(data: bytes, rng: random.Random) -> bytes:
    """One to three changed places of a JSON value; of anything else, changed bytes."""
    try:
        value = [json.loads(data)]
    except (ValueError, RecursionError):
        return byte_mutant(data, rng)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _change(value, rng)
    try:
        return json.dumps(value[0]).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return data


def _change(value: Any, rng: random.Random) -> None:
    """Walk to a random place, and change it there."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not places:
            return
        at = rng.choice(places)
        if isinstance(value[at], dict | list) and value[at] and rng.random() < 0.75:
            value = value[at]
            continue
        kind = rng.randrange(5)
        if kind == 0 and len(places) > 1:
            del value[at]
        elif kind == 1:
            value[at] = value[rng.choice(places)]
        elif kind == 2 and isinstance(value, list):
            value.insert(at, value[at])
        elif kind == 2:
            value[rng.choice(["a", "x", "type", at + "s"])] = value[at]
        elif kind == 3:
            value[at] = [value[at]]
        else:
            value[at] = rng.choice(ODD)
        return


def frame(header: bytes, rest: bytes) -> bytes:
    """Two parts as one input: the first one's length in four bytes, then both."""
    return len(header).to_bytes(4, "big") + header + rest


def parts(data: bytes) -> tuple[bytes, bytes]:
    size = int.from_bytes(data[:4], "big")
    return data[4 : 4 + size], data[4 + size :]


def framed_mutant(data: bytes, rng: random.Random) -> bytes:
    """The first part is JSON; the second has a header of less than 600 bytes."""
    header, rest = parts(data)
    if rng.random() < 0.5:
        return frame(json_mutant(header, rng), rest)
    return frame(header, header_mutant(600)(rest, rng))

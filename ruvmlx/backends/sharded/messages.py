"""This module writes and reads the messages between rank 0 and the other ranks.

    message = length of the facts (uint32), length of the data (uint64), facts (JSON object), data (bytes)

Both lengths are in network byte order. The hash of the data is one of the facts, and the reader checks it.
"""

import hashlib
import json
import socket
import struct
from typing import Any

from ...errors import RuvmlxError
from ...models.config.fingerprint import fingerprint
from ...models.config.model import Model

LENGTHS = struct.Struct("!IQ")
LONGEST_FACTS = 1 << 24


class BadMessage(RuvmlxError):
    """A message between two ranks was damaged, or is no message of ruvmlx."""


def digest(data: bytes | bytearray | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def content_of(model: Model) -> str:
    """Return a hash of a model's configuration and of a piece of every tensor."""
    return fingerprint(model.shape, {"content": (model.content(),)}, [])


def encode(facts: dict[str, Any], data: bytes = b"") -> bytes:
    if len(data):
        facts = facts | {"hash": digest(data)}
    text = json.dumps(facts).encode()
    return b"".join((LENGTHS.pack(len(text), len(data)), text, data))


def read(sock: socket.socket) -> tuple[dict[str, Any], bytes]:
    """Return the facts and the data of the next message. Raise EOFError if the other end closed the
    connection, and BadMessage if the message is damaged."""
    n_facts, n_data = LENGTHS.unpack(_read_bytes(sock, LENGTHS.size))
    if n_facts > LONGEST_FACTS:
        raise BadMessage(
            f"a message says that it has {n_facts} bytes of facts; at most {LONGEST_FACTS} are sent"
        )
    try:
        facts = json.loads(_read_bytes(sock, n_facts))
    except ValueError:
        raise BadMessage("a message's facts are no JSON") from None
    data = _read_bytes(sock, n_data)
    if not isinstance(facts, dict) or (data and facts.get("hash") != digest(data)):
        raise BadMessage("a message's data do not have the hash that was sent with them")
    return facts, bytes(data)


def _read_bytes(sock: socket.socket, n: int) -> bytearray:
    found = bytearray(n)
    view, at = memoryview(found), 0
    while at < n:
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return found

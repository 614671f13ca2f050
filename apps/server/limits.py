"""What one client may take: of time, of memory, of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """body, header: bytes. Seconds: header_seconds until a request's header is here, body_seconds until its
    body is; reply_seconds for one answer; stall_seconds that a client may leave a stream unread.

    replies: requests that write or wait for their turn; connections: open at once; terminals: with a chat
    app, message: bytes of one message of theirs. keep_alive: seconds of silence after which a stream gets a
    comment. memory_seconds: that a request waits for memory of its KV cache; memory_waits: requests that may
    wait for it. bodies: bytes of all bodies that are being read or answered.
    """

    body: int = 4 << 20
    header: int = 32 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    reply_seconds: float = 3600.0
    stall_seconds: float = 60.0
    replies: int = 64
    connections: int = 512
    terminals: int = 16
    message: int = 1 << 20
    keep_alive: float = 5.0
    memory_seconds: float = 30.0
    memory_waits: int = 32
    bodies: int = 32 << 20

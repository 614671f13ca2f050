"""This module defines the limits for clients: limits of time, of memory and of requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """body, header: maximum bytes of a request's body and header. header_seconds, body_seconds: the time in
    which the header and the body must arrive. reply_seconds: the maximum time of one answer. stall_seconds:
    the time for which a client may leave a stream unread. replies: the maximum number of replies that are in
    progress or wait. connections, terminals: the maximum number of open connections, and of those with a chat
    app. message: maximum bytes of one message of a terminal. keep_alive: seconds of silence after which a
    stream gets a comment. memory_seconds: the time for which a request may wait for KV cache memory.
    memory_waits: the maximum number of requests that wait for it. bodies: maximum bytes of all bodies whose
    requests are not answered yet."""

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

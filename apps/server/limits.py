"""This module defines limits for the clients of the server: limits of time, of memory and of requests."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerLimits:
    """The limits for clients.

    body, header: the maximum number of bytes of a request's body and header. header_seconds, body_seconds:
    the time in which the header and the body must arrive. reply_seconds: the maximum time of one answer.
    stall_seconds: the time after which a client that does not read its stream is disconnected. replies: the
    maximum number of replies in progress or waiting. connections, terminals: the maximum number of open
    connections, and of connections with a chat app. message: the maximum number of bytes of a terminal's
    message. keep_alive: seconds without an event after which the server sends a sign of life
    (`Waiting.keep_alive`) in a stream. memory_seconds: the time for which a request can wait for KV cache
    memory. memory_waits: the maximum number of requests that wait for this memory. bodies: the maximum number
    of bytes of all bodies whose requests are not answered yet.
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

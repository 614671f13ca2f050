"""Clients written by hand, over sockets: good ones, and some that no library would let be so rude."""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
APIS = (CHAT, MESSAGES, RESPONSES)
MOMENTS = ("header", "body", "prompt", "piece", "between")  # when a client leaves
SECONDS = 300.0  # the maximum time from a request to the end of its answer
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets the connection


@dataclass
class Answer:
    """gaps: seconds between the events of a stream, its signs of life left out."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    gaps: list[float] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The JSON of a stream's events."""
        lines = [line for line in self.body.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, window: int | None = None) -> "Wire":
        """window: bytes that the system receives for a reader that does not read."""
        sock = socket.socket()
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 16))

    async def __aenter__(self) -> "Wire":
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def leave(self, reset: bool = False) -> None:
        """Close it; with a reset, what is on its way is thrown away."""
        sock = self.writer.get_extra_info("socket")
        if reset and not self.writer.is_closing():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.writer.transport.abort() if reset else self.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
        named = (line.partition(": ") for line in lines if line)
        return Answer(int(status.split()[1]), {name.lower(): value for name, _, value in named})

    async def pieces(self, answer: Answer) -> AsyncIterator[bytes]:
        """The body: one piece, or as it is streamed."""
        if "content-length" in answer.headers:
            yield await self.reader.readexactly(int(answer.headers["content-length"]))
            return
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readuntil(b"\r\n")

    async def answer(self) -> Answer:
        """All of it."""
        answer = await self.head()
        last = None
        async for piece in self.pieces(answer):
            answer.body += piece
            if piece.startswith((b":", b"event: ping")):
                continue
            now = time.monotonic()
            if last is not None:
                answer.gaps.append(now - last)
            last = now
        return answer


def request(path: str, body: Any = None, **headers: str) -> tuple[bytes, bytes]:
    """(head, body) as they are sent. headers: as in x_api_key; they replace the usual ones."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    named = {"host": "localhost", "content-type": "application/json", "content-length": str(len(data))}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{'POST' if data else 'GET'} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in named.items())]
    return "\r\n".join([*lines, "", ""]).encode(), data


def question(path: str, model: str, text: str, tokens: int, stream: bool, **more: Any) -> dict[str, Any]:
    """The body of a question to one of APIS."""
    said = [{"role": "user", "content": text}]
    own = {"input": text, "max_output_tokens": tokens} if path == RESPONSES else {}
    own = own or {"messages": said, "max_tokens": tokens}
    return {"model": model, "temperature": 0, "stream": stream, **own, **more}


async def ask(port: int, path: str, body: Any = None, **headers: str) -> Answer:
    async with asyncio.timeout(SECONDS), await Wire.open(port) as wire:
        await wire.send(b"".join(request(path, body, **headers)))
        return await wire.answer()


async def leave_early(
    port: int, path: str, body: dict[str, Any], moment: str, rng: random.Random, **headers: str
) -> float:
    """Ask, and be gone at a random point of one of MOMENTS; returns when (time.monotonic())."""
    wire = await Wire.open(port)
    head, data = request(path, body, **headers)
    whole = head + data
    if moment == "header":
        await wire.send(head[: rng.randrange(len(head))])
    elif moment == "body":
        await wire.send(whole[: rng.randrange(len(head), len(whole))])
    else:
        await wire.send(whole)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):  # it was refused, or is over
            await _read_some(wire, body["stream"], moment, rng)
    wire.leave(reset=rng.random() < 0.5)
    gone = time.monotonic()
    with contextlib.suppress(OSError):
        await wire.writer.wait_closed()
    return gone


async def _read_some(wire: Wire, stream: bool, moment: str, rng: random.Random) -> None:
    if moment == "prompt" or not stream:
        await asyncio.sleep(rng.random() * (0.02 if moment == "prompt" else 0.3))
        return
    answer = await wire.head()
    if moment == "piece":
        await wire.reader.readexactly(rng.randrange(1, 2000))
        return
    left = rng.randrange(1, 12)
    async for _ in wire.pieces(answer):
        left -= 1
        if not left:
            break
    await asyncio.sleep(rng.random() * 0.02)


# What rude clients do, and what they get.
RUDE = {
    "wrong host": 403,
    "wrong origin": 403,
    "no key": 401,
    "wrong key": 401,
    "10 MB": 413,
    "10 MB in chunks": 413,
    "half a header": 408,
    "half a body": 408,
    "too many replies": 400,
    "no such field": 400,
    "no such path": 404,
    "a long header": 431,
}


async def rude(kind: str, port: int, model: str, key: str) -> int:
    """Do one of RUDE; returns the status. key: a valid one."""
    body: Any = question(CHAT, model, "rude: hello", 20, stream=False)
    path, headers = CHAT, {"authorization": f"Bearer {key}"}
    match kind:
        case "wrong host":
            headers["host"] = "rebound.example"
        case "wrong origin":
            headers["origin"] = "https://elsewhere.example"
        case "no key":
            headers = {}
        case "wrong key":
            headers = {"x_api_key": key[::-1]}
        case "10 MB" | "10 MB in chunks":
            body = question(CHAT, model, "x" * 10_000_000, 20, stream=False)
        case "too many replies":
            path, body = "/v1/completions", {"model": model, "prompt": ["x"] * 5, "n": 16}
        case "no such field":
            body["no_such_field"] = 1
        case "no such path":
            path = "/v1/nothing"
        case "a long header":
            headers["x_long"] = "x" * 40_000
    head, data = request(path, body, **headers)
    if kind == "10 MB in chunks":
        head = head.replace(f"content-length: {len(data)}".encode(), b"transfer-encoding: chunked")
        data = b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n"
    cut = {"half a header": len(head) // 2, "half a body": len(head) + len(data) // 2}.get(kind)
    async with await Wire.open(port) as wire:
        sending = asyncio.ensure_future(wire.send((head + data)[:cut]))
        try:
            return (await wire.answer()).status
        finally:  # the server may close before it has read all
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


async def read_slowly(port: int, path: str, body: dict[str, Any], seconds: float, **headers: str) -> bool:
    """Ask for a stream, read nothing of it for some time, then all that comes; was it cut off?"""
    async with await Wire.open(port, window=4096) as wire:
        await wire.send(b"".join(request(path, body, **headers)))
        wire.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(seconds)
        wire.reader._transport.resume_reading()  # type: ignore[attr-defined]
        try:
            await wire.answer()
        except (asyncio.IncompleteReadError, ConnectionError):
            return True
        return False

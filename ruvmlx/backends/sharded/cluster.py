"""This module opens a model over all ranks: rank 0 waits for the others, checks that they have the same
version, key and model, and lets each load its shard."""

import atexit
import contextlib
import gc
import itertools
import secrets
import socket
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from ...errors import RuvmlxError
from ...models.config.model import Model, missing_features
from ...platform.mx import mx
from ...progress import QUIET, Watch
from ..base import Backend
from ..mlx.runner import default_device
from ..weight_bytes import bytes_of_weights
from . import messages
from .backend import LeaderBackend
from .forecast import Forecast, decode_speed, pretend_layers
from .peers import BEAT, PeerLink, PeerLinks, installed_versions
from .place import RankPlace, ranks
from .shard import Part

ARRIVE = 60.0  # seconds in which all ranks must have connected
HELLO = 10.0  # seconds in which a new connection must say which rank it is
reports: list[Callable[[str], None]] = []  # functions that show a line to the user, before the model loads
_handles = itertools.count(1)
# opens the first layers of a model as this machine runs it alone, or returns None: the model does not fit
OpenAlone = Callable[[Model, int], Backend | None]


class PeerRefused(RuvmlxError):
    """Another rank has another version, key or model than rank 0."""


def open_leader(
    model: Model, threads: int | None, open_alone: OpenAlone, watch: Watch = QUIET
) -> LeaderBackend:
    """Open a model over all ranks. Raises PeerRefused, PeerLost, or UnsupportedModel if the model cannot be
    divided."""
    if not model.is_own:
        raise PeerRefused(f"{model.name} cannot be divided: {missing_features(model.shape)}. Run it alone.")
    part = Part.of(model, 0, ranks())
    peers, handle = join_ranks(), next(_handles)
    facts = {"path": str(model.path), "name": model.name, "content": messages.content_of(model)}
    for link, (answer, _) in zip(
        peers.links, peers.ask({"do": "open", "model": handle} | facts), strict=True
    ):
        if answer["why"]:
            raise PeerRefused(f"{link.name} cannot run {model.name}: {answer['why'].rstrip('.')}.")
    load = partial(_load, model, part, peers, threads=threads, watch=watch)
    forecast = _measure(model, peers, handle, load, open_alone)
    for report in reports:
        report(forecast.line)
    return load(handle)


def _measure(
    model: Model, peers: PeerLinks, handle: int, load: Callable[..., LeaderBackend], open_alone: OpenAlone
) -> Forecast:
    """Measure pretend models: on this machine alone, then on all machines."""
    whole = bytes_of_weights(model.types, model.bytes, model.parameters, "mlx", default_device())
    layers, pretend = pretend_layers(model, whole, ranks()), next(_handles)
    one = open_alone(model, layers)
    alone = decode_speed(one) if one is not None else 0.0
    del one
    peers.tell({"do": "pretend", "model": pretend, "of": handle})
    together = decode_speed(load(pretend, layers))
    gc.collect()
    mx.clear_cache()
    return Forecast(ranks(), alone, together)


def _load(
    model: Model,
    part: Part,
    peers: PeerLinks,
    handle: int,
    layers: int = 0,
    *,
    threads: int | None,
    watch: Watch,
) -> LeaderBackend:
    """Load a model on all ranks. layers: as for MLXBackend."""
    from ..mlx.gpu_check import check

    peers.tell({"do": "load", "model": handle, "threads": threads, "layers": layers})
    device = default_device()
    options: dict[str, Any] = {"device": device, "threads": threads, "layers": layers}
    options |= {} if device == "cpu" else {"check": partial(check, watch=watch)}
    backend = LeaderBackend(model, part, peers, handle, **options)
    found = [link.receive()[0] for link in peers.links]
    peers.tell({"do": "wire", "model": handle, "dtype": backend.shard.wire})
    if backend.pool is not None and not all(facts["pages"] for facts in found):
        backend.go_without_pages("The KV cache has no tiers, because another machine cannot compute them.")
    return backend


@cache
def join_ranks() -> PeerLinks:
    """Return the links to all other ranks. The first call waits for the ranks."""
    place, peers = RankPlace.of_environment(), PeerLinks()
    with socket.create_server(("", place.leader[1]), backlog=place.ranks) as server:
        _accept_all(server, place, peers)
    peers.tell({"do": "ring"})
    peers.join(place)
    atexit.register(peers.close)
    return peers


def _accept_all(server: socket.socket, place: RankPlace, peers: PeerLinks) -> None:
    """Wait for all other ranks. Each rank that has come gets beats at once, because another rank can come
    more than SILENCE seconds later."""
    ends, found = time.monotonic() + ARRIVE, dict[int, PeerLink]()
    while len(found) < place.ranks - 1:
        server.settimeout(min(BEAT, max(1e-3, ends - time.monotonic())))
        try:
            sock, address = server.accept()
        except TimeoutError:
            peers.check()
            if time.monotonic() < ends:
                continue
            missing = ", ".join(f"rank {r}" for r in range(1, place.ranks) if r not in found)
            raise PeerRefused(
                f"{missing} did not come within {ARRIVE:.0f} s. Check that ruvmlx starts on each machine, "
                f"and that it reaches port {place.leader[1]} of this one."
            ) from None
        hello = _read_hello(sock)
        if hello is not None:
            rank = _checked_rank(hello, sock, place, address[0])
            found[rank] = peers.add(sock, f"rank {rank} ({hello['host']})")
    peers.links = [found[rank] for rank in sorted(found)]


def _read_hello(sock: socket.socket) -> dict[str, Any] | None:
    """Return the first message of a connection; None if the other end is no rank."""
    sock.settimeout(HELLO)
    try:
        facts, _ = messages.read(sock)
    except (OSError, EOFError, RuvmlxError):
        sock.close()
        return None
    if {"rank", "key", "version", "host"} <= facts.keys():
        return facts
    sock.close()
    return None


def _checked_rank(hello: dict[str, Any], sock: socket.socket, place: RankPlace, address: str) -> int:
    """Return the rank of a new connection. Raise PeerRefused, and tell the other end, if it must not join."""
    name = f"rank {hello['rank']} ({hello['host']}, {address})"
    if not secrets.compare_digest(str(hello["key"]), place.key):
        _refuse(
            sock, f"{name} has the key of another start. End the ruvmlx processes there, and start again."
        )
    if hello["version"] != installed_versions():
        _refuse(
            sock,
            f"{name} has {hello['version']}; rank 0 has {installed_versions()}. Install the same version.",
        )
    return int(hello["rank"])


def _refuse(sock: socket.socket, line: str) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(messages.encode({"do": "refused", "line": line}))
    sock.close()
    raise PeerRefused(line)

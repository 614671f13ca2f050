"""This module is the loop of the ranks above 0: each computes its shard of what rank 0 says."""

import contextlib
import platform
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...errors import ModelNotFound, RuvmlxError, UnsupportedModel
from ...kv.cache import PagedCache
from ...kv.policy import TierPolicy
from ...kv.storage import Bytes
from ...lora.base_lora import BaseLoRA
from ...models.config.model import Model
from ...models.load import load_model
from ...platform.mx import mx
from ..mlx.plain_cache import MLXCache
from ..mlx.runner import default_device
from .backend import Shard
from .messages import content_of, digest
from .peers import PeerLink, PeerLinks, installed_versions
from .place import RankPlace
from .shard import Part

CONNECT = 60.0  # seconds in which rank 0 must answer


class OpenShard:
    """A model that this rank has a shard of. parts: dumps whose bytes rank 0 has not yet read."""

    def __init__(self, model: Model, part: Part):
        self.model, self.part = model, part
        self.shard: Shard | None = None
        self.caches: dict[int, MLXCache | PagedCache] = {}
        self.parts: dict[int, Iterator[Bytes]] = {}


class Follower:
    """The state of a rank above 0. Each message has the name of its work and the facts for it."""

    def __init__(self, place: RankPlace, link: PeerLink, peers: PeerLinks):
        self._place, self._link, self._peers = place, link, peers
        self._models: dict[int, OpenShard] = {}
        self._works: dict[str, Callable[[dict[str, Any], bytes], None]] = {
            "ring": self._join_ring,
            "open": self._find_model,
            "pretend": self._add_pretend_model,
            "load": self._load_shard,
            "wire": self._use_wire,
            "lora": self._install_lora,
            "cache": self._make_cache,
            "step": self._compute_step,
            "trim": self._trim,
            "retract": self._retract,
            "hold": self._hold,
            "fork": self._fork,
            "dump": self._dump,
            "bytes": self._send_bytes,
            "restore": self._restore,
        }

    def run(self) -> None:
        """Do what rank 0 says, until rank 0 ends."""
        while not self._link.ended:
            facts, data = self._link.receive()
            for kind, number in facts.get("dropped", ()):
                self._drop(kind, number)
            self._works[facts["do"]](facts, data)

    def _drop(self, kind: str, number: int) -> None:
        if kind == "model":
            self._models.pop(number, None)
            mx.clear_cache()
        for held in self._models.values():
            if kind == "cache":
                held.caches.pop(number, None)
                held.parts.pop(number, None)

    def _open(self, facts: dict[str, Any]) -> tuple[OpenShard, Shard]:
        held = self._models[facts["model"]]
        assert held.shard is not None
        return held, held.shard

    def _cache_of(self, facts: dict[str, Any]) -> MLXCache | PagedCache:
        cache = self._models[facts["model"]].caches[facts["id"]]
        if isinstance(cache, PagedCache):
            cache.pool.level = cache.pool.least = facts["level"]
        return cache

    # -- models ------------------------------------------------------------------------------------

    def _join_ring(self, facts: dict[str, Any], data: bytes) -> None:
        self._peers.join(self._place)

    def _find_model(self, facts: dict[str, Any], data: bytes) -> None:
        """Find the model of rank 0, and answer why this rank cannot run it, or ""."""
        why = ""
        try:
            path = Path(facts["path"])
            model = load_model(str(path) if path.exists() else facts["name"])
            if (content := content_of(model)) != facts["content"]:
                raise UnsupportedModel(
                    f"its {facts['name']} has other weights or another config (hash {content[:12]}) than "
                    f"rank 0's ({facts['content'][:12]}). Copy the same files to both"
                )
            part = Part.of(model, self._place.rank, self._place.ranks)
            self._models[facts["model"]] = OpenShard(model, part)
        except ModelNotFound:
            why = f"it has no model {facts['name']}. Run `ruvmlx pull {facts['name']}` there"
        except RuvmlxError as error:
            why = str(error)
        self._link.send({"why": why})

    def _add_pretend_model(self, facts: dict[str, Any], data: bytes) -> None:
        """Give the model `of` the handle `model`, too, under which a part of its layers is loaded."""
        held = self._models[facts["of"]]
        self._models[facts["model"]] = OpenShard(held.model, held.part)

    def _load_shard(self, facts: dict[str, Any], data: bytes) -> None:
        from ..mlx.gpu_check import check

        assert self._peers.group is not None
        held, device = self._models[facts["model"]], default_device()
        options = {name: facts[name] for name in ("threads", "layers")} | {"device": device}
        options |= {} if device == "cpu" else {"check": check}
        held.shard = Shard(held.model, held.part, self._peers.group, **options)
        if held.shard.local.pool is not None:
            held.shard.local.pool.pressure = lambda: 0.0  # rank 0 alone decides the level
        self._link.send({"pages": held.shard.local.pool is not None, "bytes": held.shard.local.nbytes})

    def _use_wire(self, facts: dict[str, Any], data: bytes) -> None:
        self._open(facts)[1].use_wire(facts["dtype"])

    def _install_lora(self, facts: dict[str, Any], data: bytes) -> None:
        self._open(facts)[1].set_lora(BaseLoRA.from_bytes(data) if data else None)
        self._link.send({"hash": digest(data)})

    # -- steps and caches --------------------------------------------------------------------------

    def _make_cache(self, facts: dict[str, Any], data: bytes) -> None:
        held, shard = self._open(facts)
        tiers = facts["policy"]
        policy = TierPolicy(tiers["name"], tuple(tiers["lengths"]), tiers["lowest"]) if tiers else None
        held.caches[facts["id"]] = shard.local.new_cache(policy)

    def _compute_step(self, facts: dict[str, Any], data: bytes) -> None:
        held, shard = self._open(facts)
        caches, n = [held.caches[i] for i in facts["ids"]], facts["n"]
        for cache, (before, after) in zip(caches, facts["levels"], strict=False):
            assert isinstance(cache, PagedCache)
            cache.pool.level, cache.pool.least = before, after
            cache.reserve(n)
        shard.local.adapt_threads()
        tokens = mx.zeros((len(caches), n), mx.uint32)
        with self._peers.step(), mx.stream(shard.local.device), shard.local.running(caches, n) as running:
            hidden = shard.forward(tokens, running.layers)
            mx.eval(hidden, *running.arrays())
        if n > 1:
            mx.clear_cache()

    def _trim(self, facts: dict[str, Any], data: bytes) -> None:
        cache = self._cache_of(facts)
        if not cache.trim(facts["n"]) or cache.offset != facts["left"]:
            raise RuvmlxError(f"its cache has {cache.offset} tokens; rank 0's has {facts['left']}")

    def _retract(self, facts: dict[str, Any], data: bytes) -> None:
        self._cache_of(facts).retract(facts["n"])

    def _hold(self, facts: dict[str, Any], data: bytes) -> None:
        cache = self._cache_of(facts)
        assert isinstance(cache, PagedCache)
        cache.hold(facts["n"])

    def _fork(self, facts: dict[str, Any], data: bytes) -> None:
        self._models[facts["model"]].caches[facts["new"]] = self._cache_of(facts).fork()

    def _dump(self, facts: dict[str, Any], data: bytes) -> None:
        dump = self._cache_of(facts).dump()
        self._models[facts["model"]].parts[facts["id"]] = dump.parts
        self._link.send({"facts": dump.facts, "nbytes": dump.nbytes})

    def _send_bytes(self, facts: dict[str, Any], data: bytes) -> None:
        parts = self._models[facts["model"]].parts.pop(facts["id"])
        self._link.send({}, b"".join(bytes(part) for part in parts))

    def _restore(self, facts: dict[str, Any], data: bytes) -> None:
        at, why = 0, ""

        def read(n: int) -> bytes:
            nonlocal at
            at += n
            return data[at - n : at]

        try:
            self._cache_of(facts).restore(facts["facts"], read)
        except (ValueError, KeyError, TypeError) as error:
            why = str(error) or type(error).__name__
        self._link.send({"why": why})


def follow(place: RankPlace) -> None:
    """Connect to rank 0 and do what it says, until it ends. Raises RuvmlxError."""
    sock = _connect(place)
    peers = PeerLinks()
    link = peers.add(sock, f"rank 0 ({place.leader[0]})")
    hello = {"do": "hello", "rank": place.rank, "key": place.key, "version": installed_versions()}
    link.send(hello | {"host": platform.node()})
    try:
        Follower(place, link, peers).run()
    except BaseException as error:
        if not link.lost and not link.ended:
            with contextlib.suppress(RuvmlxError):
                link.send({"do": "failed", "line": " ".join(str(error).split()) or type(error).__name__})
        if not link.ended:
            raise
    finally:
        peers.close()


def _connect(place: RankPlace) -> socket.socket:
    """Connect to rank 0, which can start later than this rank."""
    ends = time.monotonic() + CONNECT
    while True:
        try:
            return socket.create_connection(place.leader, CONNECT)
        except OSError as error:
            if time.monotonic() >= ends:
                host, port = place.leader
                raise RuvmlxError(
                    f"rank {place.rank} cannot reach rank 0 at {host}:{port}: {error}. "
                    "Check the cable and the firewall."
                ) from None
            time.sleep(0.1)

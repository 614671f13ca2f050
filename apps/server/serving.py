"""This module keeps the state of a model that the server serves: the model's names, its adapters, and the
replies that it writes."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from ruvmlx.engine import grammar
from ruvmlx.engine.types import GenerationRequest
from ruvmlx.host.host import Host
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.config.model import Model
from ruvmlx.runtime import Runtime

from .body_budget import HeldBodies
from .errors import ApiError, stopping_error
from .limits import ServerLimits
from .memory_look import MemoryLook
from .metrics import Metrics
from .reply_times import ReplyTimes
from .requestlog import RequestLog
from .written_calls import WrittenCalls

NO_ADAPTER = "none"
MAX_RECENT_REQUESTS = 50
# These are the kinds of the server's idle work, which runs while no request runs. The server prepares replies
# for their ratings (computes the data that a rating needs), trains the adapter, and measures the KV cache.
IDLE_WORK = ("preparing", "training", "measuring")


class RecentRequest(Struct):
    """A request that the server has answered, without the user's text. time: the Unix time of the answer.
    status: the HTTP status, or "gone" if the client left. tokens_per_second: the decode speed of the reply,
    without the time for the prompt."""

    time: float
    method: str
    path: str
    status: str
    ms: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class ModelFacts:
    """The facts that answers show about a model. context: the maximum number of tokens of the prompt and the
    reply together. bytes: the size of the model's weights in the file. fingerprint: a digest of the model; ""
    until the model was opened once. embeds: True if the model is trained to embed texts. parameters: the
    number of parameters. quantisation: the quantisation that the file names, for example "Q4_K_M"; else the
    type of most weights; "" if neither is known."""

    name: str
    path: Path | None = None
    context: int = 0
    family: str = ""
    format: str = ""
    bytes: int = 0
    fingerprint: str = ""
    embeds: bool = False
    parameters: int = 0
    quantisation: str = ""

    @classmethod
    def of(cls, model: Model | Facts, context: int) -> "ModelFacts":
        fingerprint = model.fingerprint if isinstance(model, Model) else ""
        family = model.shape.model_type
        known = (model.name, model.path, context, family, model.format, model.bytes, fingerprint)
        most = max(model.types, key=lambda name: model.types[name], default="")
        return cls(*known, model.embeds, model.parameters, model.file_type or most)


@dataclass
class Serving:
    """The state of one model of a server. `for_model` makes the state of another model of the server, which
    shares the fields that belong to the whole server.

    host: the object that runs the model. alias: another name of the model, as the user wrote it, or None.
    max_tokens: the longest reply for a request without a limit, in tokens; None: all free tokens of the
    context. calls: the number of the server's HTTP requests in progress; only the state of the first model
    counts them. recent: the last requests with a method other than GET, each with the salt of its API key,
    the newest last. own_adapters: maps the salt of an API key to the adapter that only this key uses.
    unloaded: True if the model is closed now. last_look: the newest answer to the question for the model's
    memory use; it does not change while idle work runs. family: the states of all models. compiling: limits
    the number of schemas that compile at the same time.
    """

    host: Host
    alias: str | None = None
    max_tokens: int | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    metrics: Metrics = field(default_factory=Metrics)
    log: RequestLog = field(default_factory=RequestLog)
    stopping: bool = False
    idle_work: str = ""  # the idle work that runs now, a word of IDLE_WORK; "": no work
    calls: int = 0
    written: int = 0  # the number of this model's replies that have ended
    started: int = field(default_factory=lambda: int(time.time()))
    written_calls: WrittenCalls = field(default_factory=WrittenCalls)
    times: ReplyTimes = field(default_factory=ReplyTimes)
    recent: deque[tuple[str, RecentRequest]] = field(
        default_factory=lambda: deque(maxlen=MAX_RECENT_REQUESTS)
    )
    bodies: HeldBodies = field(init=False)
    own_adapters: Mapping[str, str] = field(default_factory=dict)
    unloaded: bool = False
    last_look: MemoryLook | None = None
    family: list["Serving"] = field(default_factory=list)
    compiling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(grammar.AT_ONCE))
    _about: ModelFacts = field(default_factory=lambda: ModelFacts(""))
    _requests: dict[str, GenerationRequest] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _reserved: int = 0  # the number of replies whose requests are being prepared

    def __post_init__(self) -> None:
        self.bodies = HeldBodies(self.limits.bodies)
        self.family.append(self)

    def for_model(self, host: Host, name: str, about: ModelFacts) -> "Serving":
        """Return the state of another model of this server, which is not open yet."""
        shared = {
            name: getattr(self, name)
            for name in ("max_tokens", "limits", "metrics", "log", "started", "written_calls", "times",
                         "recent", "own_adapters", "family", "compiling")
        }  # fmt: skip
        made = Serving(host, name, **shared, unloaded=True, _about=about)
        made.bodies = self.bodies
        return made

    @property
    def runtime(self) -> Runtime:
        """The runtime of the model. Other threads must read only facts that never change from this runtime,
        because all other work must run in the runtime's own thread. Raise ApiError, 503, while no runtime is
        open, for example while the chat app opens another model."""
        runtime = self.host.holder.runtime
        if runtime is None:
            raise ApiError(503, "another model is being opened; ask again.", code="opening")
        return runtime

    @property
    def model_name(self) -> str:
        return self.about.name

    @property
    def about(self) -> ModelFacts:
        """The facts about the model. The facts are known even while the model is closed."""
        runtime = self.host.holder.runtime
        if runtime is not None:
            self._about = ModelFacts.of(runtime.model, runtime.model.context)
        return self._about

    @contextlib.contextmanager
    def answering(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """In the `with` block, let the method `stop` cancel the requests in `requests`. The end of the block
        cancels the requests, too. Raise ApiError, 503, if the server is stopping."""
        self.refuse_if_stopping()
        self._requests |= {request.request_id: request for request in requests}
        try:
            yield
        finally:
            for request in requests:
                request.cancel.set()
                del self._requests[request.request_id]

    def refuse_if_stopping(self) -> None:
        """Raise ApiError, 503, if the server is stopping."""
        if self.stopping:
            raise stopping_error()

    def stop(self) -> None:
        """End all replies of this model, and refuse requests from now on."""
        self.stopping = True
        for request in self._requests.values():
            request.cancel.set()
        self.bodies.stop()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that writes a reply. The coroutine runs to its end, even if the client leaves."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.written += 1

    @property
    def waiting(self) -> int:
        """The number of replies of all models that are in progress or wait for their turn."""
        return sum(len(serving._tasks) + serving._reserved for serving in self.family)

    @contextlib.contextmanager
    def reserving(self) -> Iterator[None]:
        """In the `with` block, count one reply more, which begins at the end of the block."""
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    @property
    def writing(self) -> int:
        """The number of this model's replies that are in progress or wait for their turn."""
        return len(self._tasks)

    @property
    def is_writing(self) -> bool:
        return bool(self._tasks or self.host.is_writing)

    @property
    def is_busy(self) -> bool:
        """True if a request uses any model of the server, or if any model writes a reply."""
        return any(serving.calls or serving.is_writing for serving in self.family)

    async def adapters(self, salt: str) -> list[str]:
        """Return the names of the adapters that a request with this salt can use. If an API key has a
        separate adapter, only requests with this key can use this adapter, and these requests cannot use
        another adapter."""
        if salt in self.own_adapters:
            return [self.own_adapters[salt]]
        taken = {*self.own_adapters.values()}
        return [name for name in await self.host.call_between(adapter_names) if name not in taken]

    async def names(self, salt: str) -> list[str]:
        """Return all names that a request can give as its field `model`. While the model is closed, the list
        has no names of adapters."""
        adapters = [] if self.unloaded else await self.adapters(salt)
        own = self.own_names
        return [*own, *(f"{name}@{adapter}" for name in own for adapter in adapters)]

    def note_refusal(self, error: ApiError, path: str = "", request: str = "") -> None:
        """Count and log a request that did not reach an endpoint. path: the path of the request, if it is a
        path that the server knows; another path could have text of a user. request: the id of the request; ""
        for the request of a WebSocket, which has no id."""
        self.metrics.add("ruvmlx_refused_total", reason=error.code or "other")
        shown = {name: text for name, text in (("id", request), ("path", path)) if text}
        self.log.write("refused", {**shown, "status": error.status, "reason": error.code or "other"})

    @property
    def own_names(self) -> list[str]:
        """The name of the model, and its alias if the server can show the alias to clients."""
        return list(dict.fromkeys([self.model_name, *self._shown_alias()]))

    def _shown_alias(self) -> Iterator[str]:
        """Yield the alias of the model, unless the alias is a path of this machine."""
        if self.alias is not None and not Path(self.alias).expanduser().exists():
            yield self.alias

    async def adapter_of(self, model: str, adapter: str | None, salt: str) -> str | None:
        """Return the adapter that the fields `model` and `adapter` of a request name: the adapter's name, ""
        for the model without an adapter, or None for the adapter in use. If the request names no adapter,
        return the API key's own adapter, or else None.

        Raise ApiError, 404, if the server has no model or adapter of this name, and ApiError, 400, if the two
        fields name different adapters.
        """
        if not self.has_name(model):
            model = plain_name(model)
        name, at, named = (model, "", "") if self.has_name(model) else model.rpartition("@")
        if not self.has_name(name):
            message = f"model: this server has {self.model_name}; GET /v1/models lists its names."
            raise ApiError(404, message, "model", "model_not_found")
        if at and adapter is not None and adapter != named:
            raise ApiError(400, "adapter: model names another adapter.", "adapter", "invalid_combination")
        wanted = named if at else adapter
        if wanted is None:
            return self.own_adapters.get(salt)
        if wanted not in await self.adapters(salt):
            field_name = "model" if at else "adapter"
            message = f"{field_name}: this model has no adapter {wanted[:64]!r}; GET /v1/models lists them."
            raise ApiError(404, message, field_name, "adapter_not_found")
        return "" if wanted == NO_ADAPTER else wanted

    def has_name(self, name: str) -> bool:
        """Return True if `name` is the model's name or its alias."""
        return name == self.model_name or (name != "" and name == self.alias)


def plain_name(model: str) -> str:
    """Return the name of the model without `:latest`, which is ollama's tag for the newest version."""
    return model.removesuffix(":latest")


def adapter_names(runtime: Runtime) -> list[str]:
    """Return the sorted names of this model's adapters: the adapters that have learned something, and the
    adapter in use. The last name is "none", which means the model without an adapter."""
    names = {row.name for row in runtime.adapters()}
    if runtime.learner is not None:
        names.add(runtime.learner.history.name)
    return [*sorted(names), NO_ADAPTER]

"""This module keeps the open models of one server. A request can name any model on this machine, and the
server opens the model when the request needs it.

While the server runs, it closes only models that no request uses. (If the chat app switches to another model,
the replies of the first model end.) If a request needs a closed model and the memory is full, the server
closes models that no request uses. If the memory is full and requests use all open models, a request for a
closed model waits until a model is unused, and later requests wait behind this request. But an attached
terminal uses the first model for hours, so a request that needs this model's memory fails at once. The module
memory_share.py decides which models fit into the memory together.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TypeVar

from ruvmlx.errors import NotFound, RuvmlxError, error_line
from ruvmlx.host.host import Host
from ruvmlx.host.model_holder import Opener
from ruvmlx.memory.load_plan import NotEnoughMemory
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.progress import QUIET
from ruvmlx.runtime import Runtime
from ruvmlx.text import did_you_mean_model

from .errors import ApiError, InternalError, api_error
from .idle import IdleWork
from .installed import InstalledModels
from .memory_look import look_between
from .memory_share import MemoryShare, PooledModel, plan_bytes
from .serving import ModelFacts, Serving, plain_name

T = TypeVar("T")
LOOK_EVERY = 0.02  # seconds between two checks whether a model can be closed to free memory
UNLOAD_EVERY = 1.0  # seconds between two checks for models that no request has used for long
EMBEDDING = "embedding"  # this model name in a request means a model that is trained to embed texts


class ModelPool:
    """The models of one server. The pool keeps one `Serving` for each model. Only the event loop's thread can
    call the pool's methods."""

    def __init__(
        self,
        first: Serving,
        opener: Opener | None = None,
        installed: InstalledModels | None = None,
        share: MemoryShare | None = None,
        unload_after: float = 0.0,
        learns: bool = False,
    ):
        """first: the state of the model with which the server starts. opener: the object that opens models
        other than the first; installed: the object that lists these models; None: the server has only the
        first model. unload_after: the number of seconds without use after which the server closes a model
        other than the first; 0: never. learns: True if these other models train on ratings while no request
        runs."""
        self.first = PooledModel("", first)
        self.share = share or MemoryShare()
        self.end: Callable[[], None] = lambda: None  # a function that stops the server
        self._models = [self.first]
        self._opener, self._installed = opener, installed
        self._unload_after, self._learns = unload_after, learns
        self._turn = asyncio.Lock()  # only the holder of this lock opens or closes a model
        self._opening: asyncio.Task[None] | None = None
        self._at_end = AsyncExitStack()  # ends the idle work of all models but the first, and closes them
        self._closing: dict[str, asyncio.Task[None]] = {}  # the models to close, by `PooledModel.name`

    # -- the server's start and end ------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """In the `with` block, let the pool open and close models. The first model must be open before the
        block."""
        self.first.note_plan()
        await self.share.begin(self.first)
        self.first.serving.last_look = await look_between(self.first.serving.host)
        async with self._at_end:
            closing = asyncio.ensure_future(self._close_unused())
            try:
                yield
            finally:
                closing.cancel()
                await asyncio.wait([closing])

    def stop(self) -> None:
        """End all replies, stop the opening of a model, and refuse requests from now on."""
        for model in self._models:
            model.serving.stop()
            model.serving.host.stop()

    # -- names of models and adapters ----------------------------------------------------------------

    @property
    def open_models(self) -> list[PooledModel]:
        """The open models; if the server's first model is open, it is the first of the list."""
        return [model for model in self._models if model.is_open]

    async def installed_models(self) -> Mapping[str, Facts]:
        """Return by name the models on this machine, without the server's first model and the models that
        requests have named since the server's start."""
        if self._installed is None:
            return {}
        found = await asyncio.to_thread(self._installed.all)
        names = {name for model in self._models for name in model.serving.own_names}
        paths = {model.serving.about.path for model in self._models}
        return {n: facts for n, facts in found.items() if n not in names and facts.path not in paths}

    async def names(self, salt: str) -> list[str]:
        """Return all names that a request can give as `model`. The list has the adapters of open models
        only."""
        found: list[str] = []
        for model in list(self._models):
            with self._holding(model):
                found += await model.serving.names(salt)
        return list(dict.fromkeys([*found, *await self.installed_models()]))

    async def adapters(self, salt: str) -> list[str]:
        """Return the names of the adapters that a request with this salt can use. The adapters belong to the
        first open model."""
        for model in self.open_models[:1]:
            with self._holding(model):
                return await model.serving.adapters(salt)
        return []

    async def find(self, name: str, embeds: bool = False) -> PooledModel:
        """Return the model that a request names as NAME or NAME@ADAPTER. Raise ApiError, 404, if there is no
        model of this name. embeds: True if the name can also be EMBEDDING."""
        found: Mapping[str, Facts] = {}
        if embeds and plain_name(name) == EMBEDDING:
            name = _embedder_name(self._models, await self.installed_models())
        if self._known_model(name) is None:
            found = await self.installed_models()
        model = self._known_model(name)
        if model is not None:
            return model
        for wanted in _spellings(name):
            if wanted in found:
                return self._add(wanted, found[wanted])
        raise ApiError(404, self._missing_words(name, found), "model", "model_not_found")

    def is_ready(self, model: PooledModel) -> bool:
        """Return True if a request for this model can begin at once."""
        return model.is_open and not self._turn.locked()

    def _known_model(self, name: str) -> PooledModel | None:
        wanted = _spellings(name)
        models = ((spelling, model) for spelling in wanted for model in self._models)
        return next((model for spelling, model in models if model.serving.has_name(spelling)), None)

    def _missing_words(self, name: str, found: Mapping[str, Facts]) -> str:
        known = [name for model in self._models for name in model.serving.own_names]
        if len(self._models) == 1 and not found:
            similar = did_you_mean_model(name, known)
            return f"model: this server has no such model; it has {' = '.join(known)}.{similar}"
        similar = did_you_mean_model(name, [*known, *found])
        return f"model: this machine has no such model; GET /v1/models lists them.{similar}"

    def _add(self, name: str, facts: Facts) -> PooledModel:
        assert self._opener is not None and self._installed is not None, "nothing is installed without them"
        opener = Opener(self._opener.open, name, self._opener.adapter)
        first = self.first.serving
        about = ModelFacts.of(facts, self._installed.context(facts))
        serving = first.for_model(Host(opener, beside=first.host), name, about)
        model = PooledModel(name, serving, self._installed.need(facts))
        self._models.append(model)
        self._at_end.push_async_callback(serving.host.close)
        return model

    # -- requests that use a model -------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def using(self, model: PooledModel) -> AsyncIterator[Serving]:
        """In the `with` block, keep the model open. If the model is closed, open it first. Raise RuvmlxError
        if the model cannot be opened."""
        async with self._turn:
            await self._until_opening_ends()
            if not model.is_open:
                await self._open_with_room(model)
        with self._holding(model):  # no task has run since the check, so the model is open
            try:
                yield model.serving
            finally:
                model.used_at = time.monotonic()

    @contextlib.asynccontextmanager
    async def using_any(self) -> AsyncIterator[Serving]:
        """Yield a `Serving` as `using` does, but of any model: use the first open model. If no model is open,
        open the server's first model."""
        async with self.using(next(iter(self.open_models), self.first)) as serving:
            yield serving

    @contextlib.asynccontextmanager
    async def using_writer(self, reply_id: str) -> AsyncIterator[Serving]:
        """Yield a `Serving` as `using` does, of the model that wrote the reply `reply_id`. If this model is
        not on the machine any more, use the server's first model. If there is no such reply, use any
        model."""
        async with self.using_any() as serving:
            writer = await serving.host.call_between(lambda runtime: _writer(runtime, reply_id))
            if writer in (None, serving.model_name):
                yield serving
                return
        model = self.first
        with contextlib.suppress(ApiError):
            model = await self.find(str(writer))
        async with self.using(model) as serving:
            yield serving

    @contextlib.contextmanager
    def _holding(self, model: PooledModel) -> Iterator[None]:
        """In the `with` block, the pool does not close the model."""
        model.users += 1
        try:
            yield
        finally:
            model.users -= 1

    async def look(self, model: PooledModel, work: Callable[[Runtime], T]) -> T | None:
        """Call work(runtime) of an open model between two steps of its replies, and return the result. Return
        None if the model is closed. The call does not count as a use, so the server closes an unused model,
        and begins idle work, as early as without the call."""
        with self._holding(model):
            return await model.serving.host.call_between(work, is_use=False) if model.is_open else None

    async def check_adapter(self, model: PooledModel, name: str, salt: str) -> None:
        """Raise ApiError, 404, if `name` has an adapter that the open model does not have. A closed model
        passes the check, because the server does not know the adapters of a closed model."""
        with self._holding(model):
            if model.is_open:
                await model.serving.adapter_of(name, None, salt)

    def ends_at(self, model: PooledModel) -> float | None:
        """Return the Unix time at which the server will close an idle model. Return None if the server keeps
        the model open."""
        if model is self.first or not self._unload_after:
            return None
        unused = time.monotonic() - model.used_at if model.is_idle else 0.0
        return time.time() + self._unload_after - unused

    @property
    def plan_bytes(self) -> int:
        """The planned memory in bytes of the program and of all open models."""
        return plan_bytes(self.open_models)

    @contextlib.asynccontextmanager
    async def changing_first(self) -> AsyncIterator[None]:
        """In the `with` block, the chat app opens another model in place of the server's first model. Before
        the block, the pool closes all other idle models, so that there is memory."""
        async with self._turn:
            await self._until_opening_ends()
            for model in self._idle_ones():
                if model is not self.first:
                    await self._close(model, "room")
            try:
                yield
            finally:
                self.first.note_plan()
                await self.share.divide(self.open_models)

    # -- how the pool closes models ------------------------------------------------------------------

    async def close(self, model: PooledModel) -> None:
        """Close a model as soon as no request uses it. Until then, all models answer further requests."""
        while True:
            async with self._turn:
                await self._until_opening_ends()
                if model.is_open and model.is_idle:
                    await self._close(model, "asked")
                if not model.is_open:
                    return
            await asyncio.sleep(LOOK_EVERY)

    def close_later(self, model: PooledModel) -> None:
        """Close a model as `close` does, but return at once."""
        if model.name not in self._closing:
            task = self._closing[model.name] = asyncio.ensure_future(self.close(model))
            task.add_done_callback(lambda _: self._closing.pop(model.name))

    async def _close_unused(self) -> None:
        """Close each model that no request has used for `unload_after` seconds. Keep the first model open."""
        while True:
            await asyncio.sleep(UNLOAD_EVERY)
            if self._unload_after and not self._turn.locked():
                async with self._turn:
                    await self._until_opening_ends()
                    for model in self.open_models:
                        if model is not self.first and model.is_unused(self._unload_after):
                            await self._close(model, "idle")

    async def _close(self, model: PooledModel, why: str) -> None:
        """Close a model. why: the reason, for the log. The caller must hold the lock `_turn`."""
        serving = model.serving
        serving.unloaded = True
        with contextlib.suppress(RuvmlxError):
            serving.last_look = await look_between(serving.host)
        try:
            await serving.host.release()
        except RuvmlxError as error:  # for example, the store is busy; the model is closed even so
            serving.log.write("closing", {"model": serving.model_name, "failed": error_line(error)})
        except Exception as error:  # noqa: BLE001 - the task that closes unused models goes on
            InternalError.of(error).write_to(serving.log)
        serving.metrics.add("ruvmlx_model_unloads_total", model=serving.model_name, reason=why)
        serving.log.write("closed", {"model": serving.model_name, "reason": why})
        await self.share.divide(self.open_models)

    # -- how the pool opens models; the caller holds the lock `_turn` -------------------------------

    async def _until_opening_ends(self) -> None:
        """Wait until no model is being opened. An opening continues even if the client of the request that
        began it has left."""
        if self._opening is not None and not self._opening.done():
            await asyncio.wait([self._opening])

    async def _open_with_room(self, model: PooledModel) -> None:
        """Close idle models until the new model fits into the memory by the plan, then open the new model. If
        the machine still has too little memory, close idle models one by one and try again. Raise ApiError if
        attached terminals keep open a model whose memory the new model needs."""
        self.share.check(model)
        while not await self.share.has_room(self.open_models, model):
            self.share.check_beside_terminals(self.open_models, model)
            await self._make_room()
        while True:
            self._opening = asyncio.ensure_future(self._open_now(model))
            try:
                await asyncio.shield(self._opening)
                return
            except NotEnoughMemory:
                if not self._idle_ones():
                    raise
                await self._make_room()

    async def _make_room(self) -> None:
        """Close one idle model. If no model is idle, wait for LOOK_EVERY seconds."""
        idle = self._idle_ones()
        if idle:
            await self._close(idle[0], "room")
        else:
            await asyncio.sleep(LOOK_EVERY)

    def _idle_ones(self) -> list[PooledModel]:
        """Return the idle models in the order in which the pool closes them. The model that was unused for
        the longest time is first, and the server's first model is last."""
        idle = [model for model in self.open_models if model.is_idle]
        return sorted(idle, key=lambda model: (model is self.first, model.used_at))

    async def _open_now(self, model: PooledModel) -> None:
        begun, serving = time.monotonic(), model.serving
        try:
            self.first.serving.refuse_if_stopping()
            await serving.host.open(QUIET)
        except RuvmlxError as error:
            if api_error(error).status == 503:  # the client can ask for the model again
                raise
            message = f"model: {serving.model_name} cannot be opened: {error_line(error)}"
            raise ApiError(404, message, "model", "model_not_found") from None
        serving.unloaded = False
        model.note_plan()
        model.used_at = time.monotonic()
        await self.share.divide(self.open_models)
        serving.last_look = await look_between(serving.host)
        serving.metrics.add("ruvmlx_model_loads_total", model=serving.model_name)
        took = round(1e3 * (time.monotonic() - begun))
        serving.log.write("opened", {"model": serving.model_name, "ms": took})
        if model is not self.first and not model.is_tended:
            model.is_tended = True
            await self._at_end.enter_async_context(IdleWork(serving, self._learns).running())


def _spellings(name: str) -> list[str]:
    """Return all model names that the text in a request's field `model` can mean: the text itself, the text
    without ollama's tag `:latest`, and the text without `@ADAPTER`."""
    plain = plain_name(name)
    return list(
        dict.fromkeys([name, plain, *(text.rpartition("@")[0] for text in (name, plain) if "@" in text)])
    )


async def embedders(pool: ModelPool) -> set[str]:
    """Return the names of the models that are trained to embed texts."""
    installed = {name for name, facts in (await pool.installed_models()).items() if facts.embeds}
    known = (model.serving for model in pool._models if model.serving.about.embeds)
    return installed.union(*(serving.own_names for serving in known))


def _embedder_name(models: Sequence[PooledModel], installed: Mapping[str, Facts]) -> str:
    """Return the name of a model that is trained to embed texts. If no model is trained to embed texts,
    return the name of the server's first model."""
    known = [(model.serving.model_name, model.serving.about.embeds) for model in models]
    known += [(name, facts.embeds) for name, facts in installed.items()]
    return next((name for name, embeds in known if embeds), known[0][0])


def _writer(runtime: Runtime, reply_id: str) -> str | None:
    """Return the name of the model that wrote the reply `reply_id`. Return None if there is no reply with
    this id."""
    try:
        return runtime.store.replies.get(reply_id).model
    except NotFound:
        return None

"""The public API: open a model, chat with it, rate its replies. `import ruvmlx` offers all of it.

    with ruvmlx.open() as model:
        chat = model.chat(system="Answer in one sentence.")
        reply = chat.say("Why is the sky blue?")
        print(reply.text)
        reply.rate("up")

The runtime lives in a thread of its own, because MLX binds its streams to threads. Every method here may be
called from any thread; calls run one after another. Errors are those of `ruvmlx.errors`, one line each.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..engine.context_window import Turn
from ..engine.types import Chunk, GenerationRequest, GenerationResponse
from ..errors import NotFound, UsageError
from ..models.config.model import Message
from ..models.text.thinking import split
from ..sampling import NO_SAMPLING, ReplyOptions
from ..settings import SPECS, Settings, load
from .types import Preference, Rating

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..sona.adapter_history import LearnStatus

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, str]]
Begin = Callable[["Runtime", dict[str, Any]], Iterator[Chunk]]


@dataclass(frozen=True)
class Reply:
    """One reply of the model, saved under its id.

    finish_reason: "stop", "length" (max_tokens reached) or "cancelled". prompt_tps, generation_tps: tokens
    per second. ttft_ms: milliseconds to the first token. examples: ids of the liked replies in the prompt.
    adapter: name of the one that wrote it, and that learns from its rating; None: none, and then the one in
    use learns.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float
    ttft_ms: float
    examples: tuple[str, ...]
    adapter: str | None
    _model: "LocalModel" = field(repr=False, compare=False)

    @property
    def answer(self) -> str:
        """The text without the thought of a model that thinks first."""
        return split(self.text).answer

    def rate(self, rating: str | int, note: str = "") -> Rating:
        """Rate this reply "up", "down" or 1 to 5: the weights change at once. See `LocalModel.rate`."""
        return self._model.rate(self, rating, note)

    def __str__(self) -> str:
        return self.text


class ReplyStream(Iterator[str]):
    """The text of one reply, piece by piece. The model keeps writing even if nobody reads.

    `reply` is the whole reply. `stop`, the end of a `with` block, and garbage collection end the reply early;
    the text so far is kept and can be rated.
    """

    def __init__(self, model: "LocalModel", begin: Callable[["Runtime", threading.Event], Iterator[Chunk]]):
        self._model, self._chunks, self._cancel = model, SimpleQueue[Chunk | None](), threading.Event()
        self._response: GenerationResponse | None = None
        self._ended = False
        self._written = model._submit(_piped_chunks(begin, self._chunks, self._cancel))
        model._cancels.add(self._cancel)
        weakref.finalize(self, self._cancel.set)

    def __next__(self) -> str:
        while not self._ended:
            chunk = self._chunks.get()
            if chunk is None:
                self._ended = True
                self._written.result()  # raises what the runtime raised
                break
            self._response = chunk.response or self._response
            if chunk.text:
                return chunk.text
        raise StopIteration

    def stop(self) -> None:
        """End the reply early."""
        self._cancel.set()

    @property
    def reply(self) -> Reply:
        """The whole reply; waits until it is written. UsageError if an error ended it."""
        for _ in self:
            pass
        if self._response is None:
            raise UsageError("this reply was ended by an error and has no text; ask again.")
        return _reply_of(self._response, self._model)

    def __enter__(self) -> "ReplyStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class LocalModel:
    """A model in memory, the adapter that it learns with, and the user's chats. Made by `ruvmlx.open`."""

    def __init__(self, settings: Settings):
        """Load the model and its adapter, which takes seconds."""
        self.settings = settings
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ruvmlx")
        self._closed = threading.Lock()  # taken once, by the first `close`
        self._cancels = weakref.WeakSet[threading.Event]()  # of open streams
        try:
            self._runtime = self._pool.submit(_open_runtime, settings).result()
        except BaseException:
            self._pool.shutdown(wait=False)
            raise

    @property
    def name(self) -> str:
        """The model's name."""
        return self._runtime.model.name

    @property
    def adapter(self) -> str | None:
        """The adapter in use and its version, as in "default@3"; None without one."""
        return self._call(lambda runtime: runtime.adapter_label)

    def chat(self, id: str | None = None, system: str | None = None) -> "Chat":
        """A new chat, or the one whose id begins with `id` (NotFound if there is none). All are saved.

        system: the system prompt; the setting's by default.
        """
        if id is None:
            prompt = self.settings.system if system is None else system
            return Chat(self, self._call(lambda runtime: runtime.chats.new_chat(prompt)))
        found = Chat(self, self._call(lambda runtime: runtime.chats.find_chat(id)))
        if system is not None:
            self._call(lambda runtime: runtime.chats.set_system(found.id, system))
        return found

    def reply(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> Reply:
        """Answer outside of any chat. prompt: the user's words, or messages as {"role": ..., "content": ...}.

        Raises UsageError for an empty prompt, or one longer than the context.
        """
        return self.stream(prompt, **options).reply

    def stream(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> ReplyStream:
        """Like `reply`, but returns the text piece by piece."""
        messages = self._messages(prompt)
        return self._stream(
            lambda runtime, asked: runtime.generate(GenerationRequest(messages=messages, **asked)), options
        )

    def rate(
        self, reply: Reply | str, rating: str | int, note: str = "", adapter: str | None = None
    ) -> Rating:
        """Rate a reply, or its id, "up", "down" or 1 to 5; note: why. The weights change at once.

        adapter: the one that learns; None: the one that wrote the `Reply`, or the one in use for an id. A
        reply can be rated again: the newest rating counts. Raises NotFound for an unknown reply, or without
        an adapter; UsageError for another rating.
        """
        reply_id, learns = _id_of(reply), adapter or _writer_of(reply)
        return Rating.of(self._call(lambda runtime: runtime.rate(reply_id, str(rating), note, learns)))

    def prefer(self, better: Reply | str, worse: Reply | str) -> Preference:
        """Say which of two replies to one question, or their ids, is better. The weights change at once.

        Raises UsageError unless they are two replies to one question, NotFound without an adapter.
        """
        pair, learns = (_id_of(better), _id_of(worse)), _writer_of(better) or _writer_of(worse)
        return Preference.of(self._call(lambda runtime: runtime.choices.prefer(*pair, learns)))

    def edit(self, reply: Reply | str, text: str) -> Preference:
        """Rewrite a reply: your text becomes a reply beside it, in its chat, and is preferred to it.

        Raises UsageError for an empty, unchanged or too long text, NotFound without an adapter.
        """
        reply_id, learns = _id_of(reply), _writer_of(reply)
        return Preference.of(self._call(lambda runtime: runtime.choices.rewrite(reply_id, text, learns)))

    def undo(self) -> "LearnStatus":
        """Take the newest rating or preference back, bit for bit; returns the new status.

        NotFound if there is none.
        """
        return self._call(lambda runtime: runtime.undo())

    def learned(self) -> "LearnStatus":
        """Status of learning: ratings, updates, version. NotFound without an adapter."""
        return self._call(lambda runtime: runtime.status())

    def use_adapter(self, name: str | None) -> None:
        """Switch to another adapter; None: use none. A new name starts from the untouched model."""
        self._call(lambda runtime: runtime.use_adapter(name))

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """One unit vector per text; the dot product of two is the similarity of the texts.

        UsageError for an empty text, and for one of more than 8,192 tokens.
        """
        wanted = [texts] if isinstance(texts, str) else list(texts)
        return self._call(lambda runtime: [vector.tolist() for vector in runtime.embed(wanted)])

    def close(self) -> None:
        """End unfinished replies, save KV caches and free the memory. Later calls raise UsageError."""
        if self._closed.acquire(blocking=False):
            for cancel in list(self._cancels):
                cancel.set()
            closing = self._pool.submit(self._runtime.close)
            self._pool.shutdown()
            closing.result()

    def __enter__(self) -> "LocalModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _messages(self, prompt: Prompt) -> list[Message]:
        if not isinstance(prompt, str):
            return [_message(given) for given in prompt]
        system = self.settings.system
        return [*([Message("system", system)] if system else []), Message("user", prompt)]

    def _stream(self, begin: Begin, options: ReplyOptions) -> ReplyStream:
        """Stream the reply of begin(runtime, asked). asked: fields of a GenerationRequest."""
        sampling: dict[str, Any] = {name: value for name, value in options.items() if name not in NO_SAMPLING}
        if unknown := set(options) - ReplyOptions.__optional_keys__:
            known = ", ".join(ReplyOptions.__annotations__)
            raise UsageError(f"no option {min(unknown)!r}; there are: {known}.")
        limit = options.get("max_tokens", self.settings.max_tokens)
        if limit < 1:
            raise UsageError(f"max_tokens is {limit}; it must be 1 or more.")
        asked: dict[str, Any] = {"max_new_tokens": limit}
        if "adapter" in options:
            asked["adapter_id"] = "" if options["adapter"] in (None, "none") else options["adapter"]
        return ReplyStream(
            self,
            lambda runtime, cancel: begin(
                runtime, asked | {"sampling": runtime.sampling(**sampling), "cancel": cancel}
            ),
        )

    def _call(self, work: Callable[["Runtime"], T]) -> T:
        """Run work(runtime) in the runtime's thread and return its result."""
        return self._submit(work).result()

    def _submit(self, work: Callable[["Runtime"], T]) -> Future[T]:
        try:
            return self._pool.submit(work, self._runtime)
        except RuntimeError:
            raise UsageError("this model is closed; open it again.") from None


class Chat:
    """A saved conversation. Its messages form a tree: `again` and `edit` start new branches."""

    def __init__(self, model: LocalModel, id: str):
        self._model, self.id = model, id

    @property
    def messages(self) -> list[Turn]:
        """The system prompt, then the current branch, oldest first."""
        return self._model._call(lambda runtime: runtime.chats.turns(self.id))

    def say(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Send a message; returns the reply. edit: id of an earlier user message to replace, on a new branch.

        Raises UsageError for an empty message, or one longer than the context; NotFound for an unknown id.
        """
        return self.stream(text, edit=edit, **options).reply

    def stream(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> ReplyStream:
        """Like `say`, but returns the text piece by piece."""
        return self._model._stream(
            lambda runtime, asked: runtime.chats.say(self.id, text, instead_of=edit, **asked),
            options,
        )

    def again(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Another reply to the same question. message: the reply to write again; the last one by default."""
        return self._model._stream(
            lambda runtime, asked: runtime.chats.again(self.id, message=message, **asked),
            options,
        ).reply

    def continue_reply(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Continue a reply that was cut off or stopped; the returned reply has the whole text.

        UsageError if the reply is complete, or another model wrote it.
        """
        return self._model._stream(
            lambda runtime, asked: runtime.chats.continue_reply(self.id, message=message, **asked),
            options,
        ).reply

    def rate(self, rating: str | int, note: str = "") -> Rating:
        """Rate the newest reply of this chat; see `LocalModel.rate`. NotFound if there is none."""
        newest = next((turn.reply_id for turn in reversed(self.messages) if turn.reply_id), None)
        if newest is None:
            raise NotFound("there is no reply in this chat yet.")
        return self._model.rate(newest, rating, note)


def open(model: str | Path | None = None, **settings: Any) -> LocalModel:
    """Load a model and its adapter. Call `close` at the end, or use it in a `with` block.

    model: folder, .gguf file, Hugging Face repository (downloaded if needed); the starter model by default.
    settings: any of `ruvmlx config show`, by name, as in `temperature=0`; they override RUVMLX_* variables
    and files. Raises UsageError, ModelNotFound, CorruptFile, UnsupportedModel or NotEnoughMemory.
    """
    return LocalModel(_settings(model, settings))


def embed(texts: str | Sequence[str], model: str | Path | None = None) -> list[list[float]]:
    """`LocalModel.embed` with a model that is opened for this call; for several calls, keep a model open."""
    with open(model, adapter="none") as opened:
        return opened.embed(texts)


def _settings(model: str | Path | None, given: Mapping[str, Any]) -> Settings:
    if unknown := set(given) - SPECS.keys():
        raise UsageError(f"no setting {min(unknown)!r}; there are: {', '.join(SPECS)}.")
    return load({**given, "model": None if model is None else str(model)})


def _open_runtime(settings: Settings) -> "Runtime":
    from ..runtime import Runtime

    return Runtime.open(settings)


def _message(given: Mapping[str, str]) -> Message:
    if given.keys() != {"role", "content"} or not all(isinstance(text, str) for text in given.values()):
        raise UsageError(f'a message is {{"role": ..., "content": ...}}, both texts; got {dict(given)!r}.')
    return Message(given["role"], given["content"])


def _piped_chunks(
    begin: Callable[["Runtime", threading.Event], Iterator[Chunk]],
    chunks: "SimpleQueue[Chunk | None]",
    cancel: threading.Event,
) -> Callable[["Runtime"], None]:
    """A function for the runtime's thread that puts a reply's chunks into the queue, then None."""

    def write(runtime: "Runtime") -> None:
        try:
            for chunk in begin(runtime, cancel):
                chunks.put(chunk)
        finally:
            chunks.put(None)

    return write


def _id_of(reply: Reply | str) -> str:
    return reply.id if isinstance(reply, Reply) else reply


def _writer_of(reply: Reply | str) -> str | None:
    """The adapter that wrote a reply; None: none, or not known."""
    return reply.adapter if isinstance(reply, Reply) else None


def _reply_of(done: GenerationResponse, model: LocalModel) -> Reply:
    return Reply(
        done.request_id, done.text, tuple(done.token_ids), done.finish_reason, done.prompt_tokens,
        done.generation_tokens, done.prompt_tps, done.generation_tps, done.ttft_ms, done.examples,
        done.adapter, model,
    )  # fmt: skip

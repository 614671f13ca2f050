"""This module is the public API: open a model, chat, and rate the replies. `import ruvmlx` exports the names.

    with ruvmlx.open() as model:
        chat = model.chat(system="Answer in one sentence.")
        reply = chat.say("Why is the sky blue?")
        print(reply.text)
        reply.rate("up")

The runtime runs in its own thread, because MLX binds its streams to threads. Any thread can call the methods
of this module; the calls run one after another. The methods raise the errors of `ruvmlx.errors`. While the
program makes no call, the thread prepares the newest replies for their ratings.

At the end of the program, the models that are still open close.
"""

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from ..engine.context_window import Turn
from ..engine.types import Chunk, GenerationRequest
from ..errors import NotFound, UsageError
from ..models.config.model import Message
from ..progress import QUIET
from ..sampling import NO_SAMPLING, ReplyOptions
from ..settings import SPECS, Settings, load
from .arguments import NO_ADAPTER, THIS_CALL, check_adapter, check_count, check_options, check_text, kind_of
from .call_thread import CallThread
from .replies import Reply, ReplyStream, id_of, writer_of
from .types import Preference, Rating

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..sona.adapter_history import LearnStatus

T = TypeVar("T")
Prompt = str | Sequence[Mapping[str, str]]
Begin = Callable[["Runtime", dict[str, Any]], Iterator[Chunk]]


_open_models = weakref.WeakSet["LocalModel"]()


class LocalModel:
    """A model in memory, with its adapter and the user's chats. Call `ruvmlx.open` to make a LocalModel."""

    def __init__(self, settings: Settings):
        """Load the model and its adapter, which takes seconds."""
        self.settings = settings
        self._thread = CallThread()
        self._lock = threading.Lock()  # no work begins while `close` ends the replies
        self._closing: Future[None] | None = None  # None: open; else done when the runtime is closed
        self._cancels = weakref.WeakSet[threading.Event]()  # the events that end the open reply streams
        self._runtime = self._thread.submit(_open_runtime, settings).result()
        self._thread.set_idle_work(partial(_settle, self._runtime))
        _open_models.add(self)

    @property
    def name(self) -> str:
        """The model's name."""
        return self._runtime.model.name

    @property
    def adapter(self) -> str | None:
        """Return the name and version of the adapter in use, such as "default@3", or None without adapter."""
        return self._call(lambda runtime: runtime.learning.label)

    def chat(self, id: str | None = None, system: str | None = None) -> "Chat":
        """Return a new chat, or the saved chat whose id begins with `id` (NotFound if no chat matches).

        system: the system prompt; None: the setting `system` in a new chat, no change in a saved chat.
        """
        if id is not None:
            check_text(id, "the id of a chat")
        if system is not None:
            check_text(system, "a system prompt")
        if id is None:
            prompt = self.settings.system if system is None else system
            return Chat(self, self._call(lambda runtime: runtime.chats.new_chat(prompt)))
        found = Chat(self, self._call(lambda runtime: runtime.chats.find_chat(id)))
        if system is not None:
            self._call(lambda runtime: runtime.chats.set_system(found.id, system))
        return found

    def reply(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> Reply:
        """Answer outside of any chat. prompt: the user's words, or messages as {"role": ..., "content": ...}.

        Raises UsageError if the prompt is empty or longer than the context.
        """
        return self.stream(prompt, **options).reply

    def stream(self, prompt: Prompt, **options: Unpack[ReplyOptions]) -> ReplyStream:
        """Answer as `reply` does, but return the text piece by piece."""
        messages = self._messages(prompt)
        return self._stream(
            lambda runtime, asked: runtime.writer.generate(GenerationRequest(messages=messages, **asked)),
            options,
        )

    def rate(
        self, reply: Reply | str, rating: str | int, note: str = "", adapter: str | None = None
    ) -> Rating:
        """Rate a reply "up", "down" or 1 to 5. The adapter learns at once. reply: a reply or its id.

        note: the user's reason. adapter: the adapter that learns; None: the adapter that wrote the `Reply`,
        or the adapter in use for an id. A second rating of a reply replaces the first. Raises NotFound for an
        unknown reply or without an adapter, UsageError for another rating.
        """
        reply_id, learns = id_of(reply), writer_of(reply) if adapter is None else adapter
        note = "" if note is None else note
        check_text(note, "a note")
        if learns is not None:
            check_adapter(learns)
        return Rating.of(self._call(lambda runtime: runtime.rate(reply_id, str(rating), note, learns)))

    def prefer(self, better: Reply | str, worse: Reply | str) -> Preference:
        """Say which of two replies to one question is better. The adapter learns at once.

        Raises UsageError if they are not two replies to one question, NotFound without an adapter.
        """
        pair, learns = (id_of(better), id_of(worse)), writer_of(better) or writer_of(worse)
        return Preference.of(self._call(lambda runtime: runtime.choices.prefer(*pair, learns)))

    def edit(self, reply: Reply | str, text: str) -> Preference:
        """Store `text` as a second reply to the same question, and prefer this reply to the old reply.

        Raises UsageError for an empty, unchanged or too long text, NotFound without an adapter.
        """
        reply_id, learns = id_of(reply), writer_of(reply)
        check_text(text, "the new text")
        return Preference.of(self._call(lambda runtime: runtime.choices.rewrite(reply_id, text, learns)))

    def undo(self) -> "LearnStatus":
        """Remove the newest rating or preference of the adapter in use: the adapter gets exactly its earlier
        weights again. To undo a rating of another adapter, call `use_adapter` before.

        Returns the new status. Raises NotFound if there is no rating and no preference.
        """
        return self._call(lambda runtime: runtime.undo())

    def learned(self) -> "LearnStatus":
        """Return the numbers of ratings and updates and the adapter version. NotFound without an adapter."""
        return self._call(lambda runtime: runtime.status())

    def use_adapter(self, name: str | None) -> None:
        """Use the named adapter, or no adapter if the name is None or "none". If no adapter has this name, a
        new untrained adapter begins."""
        if name is not None:
            check_adapter(name)
        self._call(lambda runtime: runtime.learning.use(None if name == NO_ADAPTER else name))

    def embed(self, texts: str | Sequence[str]) -> list[list[float]]:
        """Return one unit vector for each text. The dot product of two vectors is their texts' similarity.

        Raises UsageError for an empty text and for a text of more than 8,192 tokens (or the context).
        """
        is_one = isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable)
        wanted: list[Any] = [texts] if is_one else list(texts)
        for text in wanted:
            check_text(text, "a text to embed")
        return self._call(lambda runtime: [vector.tolist() for vector in runtime.embed(wanted)])

    def close(self) -> None:
        """End unfinished replies, save KV caches and free the memory. Later calls raise UsageError."""
        self._begin_close().result()
        self._thread.join()

    def _begin_close(self) -> Future[None]:
        """End unfinished replies, and let the runtime's thread close the runtime. Return a future that is
        done when the runtime is closed."""
        with self._lock:
            if self._closing is None:
                for cancel in self._cancels:
                    cancel.set()
                self._closing = self._thread.submit(self._runtime.close)
                self._thread.end()
            return self._closing

    def _mark_closed_in_child(self) -> None:
        """Mark this model as closed in a forked child process, so that its calls raise UsageError. Otherwise,
        the calls would never return, because the runtime's thread runs only in the parent process."""
        self._lock = threading.Lock()
        self._closing = Future()
        self._closing.set_result(None)

    def __enter__(self) -> "LocalModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _messages(self, prompt: Prompt) -> list[Message]:
        if isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)):
            return [_message(given) for given in prompt]
        if not isinstance(prompt, str):
            raise UsageError(f"a prompt is a text or a list of messages; got {kind_of(prompt)}.")
        check_text(prompt, "a prompt")
        system = self.settings.system
        return [*([Message("system", system)] if system else []), Message("user", prompt)]

    def _stream(self, begin: Begin, options: ReplyOptions) -> ReplyStream:
        """Stream the reply of begin(runtime, asked). asked: fields of a GenerationRequest."""
        check_options(options)
        sampling: dict[str, Any] = {name: value for name, value in options.items() if name not in NO_SAMPLING}
        asked: dict[str, Any] = {"max_new_tokens": options.get("max_tokens", self.settings.max_tokens)}
        if "adapter" in options:
            asked["adapter_id"] = "" if options["adapter"] in (None, NO_ADAPTER) else options["adapter"]
        return ReplyStream(
            self,
            lambda runtime, cancel: begin(
                runtime, asked | {"sampling": runtime.writer.sampling(**sampling), "cancel": cancel}
            ),
        )

    def _call(self, work: Callable[["Runtime"], T]) -> T:
        """Run work(runtime) in the runtime's thread and return its result."""
        return self._submit(work).result()

    def _submit(self, work: Callable[["Runtime"], T], cancel: threading.Event | None = None) -> Future[T]:
        """Run work(runtime) in the runtime's thread. cancel: the event that ends the work; `close` sets the
        event."""
        with self._lock:
            if self._closing is not None:
                raise UsageError("this model is closed; open it again.")
            if cancel is not None:
                self._cancels.add(cancel)
            return self._thread.submit(work, self._runtime)


class Chat:
    """A saved conversation. The messages of a chat form a tree: `again` and `edit` start new branches."""

    def __init__(self, model: LocalModel, id: str):
        self._model, self.id = model, id

    @property
    def messages(self) -> list[Turn]:
        """Return the system prompt, then the messages of the current branch, the oldest message first."""
        return self._model._call(lambda runtime: runtime.chats.turns(self.id))

    def say(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Send a message. edit: the id of an earlier user message that `text` replaces, on a new branch.

        Raises UsageError if the text is empty or longer than the context, NotFound for an unknown id.
        """
        return self.stream(text, edit=edit, **options).reply

    def stream(self, text: str, *, edit: int | None = None, **options: Unpack[ReplyOptions]) -> ReplyStream:
        """Send a message as `say` does, but return the reply's text piece by piece."""
        check_text(text, "a message")
        _check_message_id(edit)
        return self._model._stream(
            lambda runtime, asked: runtime.chats.say(self.id, text, instead_of=edit, **asked),
            options,
        )

    def again(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Write and return another reply to the same question. message: the id of the earlier reply; None:
        the last reply."""
        return self._again(message, options).reply

    def _again(self, message: int | None, options: ReplyOptions) -> ReplyStream:
        _check_message_id(message)
        return self._model._stream(
            lambda runtime, asked: runtime.chats.again(self.id, message=message, **asked), options
        )

    def continue_reply(self, message: int | None = None, **options: Unpack[ReplyOptions]) -> Reply:
        """Continue a reply that reached max_tokens or was stopped. The returned reply has the whole text.

        Raises UsageError if the reply is complete or another model wrote the reply.
        """
        return self._continue(message, options).reply

    def _continue(self, message: int | None, options: ReplyOptions) -> ReplyStream:
        _check_message_id(message)
        return self._model._stream(
            lambda runtime, asked: runtime.chats.continue_reply(self.id, message=message, **asked), options
        )

    def rate(self, rating: str | int, note: str = "") -> Rating:
        """Rate the newest reply of the branch; see `LocalModel.rate`. NotFound if there is no reply."""
        newest = next((turn.reply_id for turn in reversed(self.messages) if turn.reply_id), None)
        if newest is None:
            raise NotFound("there is no reply in this chat yet.")
        return self._model.rate(newest, rating, note)


def open(model: str | Path | None = None, **settings: Any) -> LocalModel:
    """Load a model and its adapter. Call `close` of the result, or use the result in a `with` block.

    model: a folder, a .gguf file or a Hugging Face repository (it is downloaded); None: the setting `model`.
    settings: settings of `ruvmlx config show` by name, as in `temperature=0`; they override RUVMLX_*
        variables and settings files.

    Raises UsageError, ModelNotFound, CorruptFile, UnsupportedModel or NotEnoughMemory.
    """
    return LocalModel(_settings(model, settings))


def embed(texts: str | Sequence[str], model: str | Path | None = None) -> list[list[float]]:
    """Open a model, call `LocalModel.embed` and close the model. For several calls, keep a model open."""
    with open(model, adapter="none") as opened:
        return opened.embed(texts)


def _settings(model: str | Path | None, given: Mapping[str, Any]) -> Settings:
    if unknown := set(given) - SPECS.keys():
        raise UsageError(f"no setting {min(unknown)!r}; there are: {', '.join(SPECS)}.")
    return load({**given, "model": None if model is None else str(model)}, THIS_CALL)


def _open_runtime(settings: Settings) -> "Runtime":
    from ..runtime import Runtime

    return Runtime.open(settings)


def _settle(runtime: "Runtime", cancel: threading.Event) -> None:
    """Prepare the newest replies for their ratings. Ignore errors: a rating does this work itself."""
    with contextlib.suppress(Exception):
        runtime.learning.settle(cancel, QUIET)


def _check_message_id(message: Any) -> None:
    if message is not None:
        check_count(message, "the id of a message")


def _message(given: Mapping[str, str]) -> Message:
    if not isinstance(given, Mapping) or given.keys() != {"role", "content"}:
        raise UsageError(f'a message is {{"role": ..., "content": ...}}; got {kind_of(given)} {given!r:.80}.')
    check_text(given["role"], "the role of a message")
    check_text(given["content"], "the content of a message")
    return Message(given["role"], given["content"])


@atexit.register
def _close_open_models() -> None:
    """Close the models that the program did not close, so that none of them computes during the exit."""
    for model in list(_open_models):
        with contextlib.suppress(Exception):  # the program has ended; nobody can handle the error
            model.close()


def _mark_models_closed_in_child() -> None:
    for model in list(_open_models):
        model._mark_closed_in_child()


os.register_at_fork(after_in_child=_mark_models_closed_in_child)

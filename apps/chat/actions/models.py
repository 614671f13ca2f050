"""This module opens models in the app: the model of the start, and another model in the middle of a chat. The
module also shows the list of adapters (named weights that a model learned from ratings)."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

from ruvmlx.host.guest import Guest
from ruvmlx.memory.load_plan import Plan
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.resolve import REPO, STORES
from ruvmlx.progress import Progress, Watch
from ruvmlx.settings import AUTO

from .. import models
from ..context import ChatContext, call_soon
from ..errors import chat_error_line
from ..messages import Notice
from ..picker_screen import PickerScreen
from ..user_files import UserFiles
from ..view_model import Opened
from ..welcome import Welcome
from .edit import EditActions
from .fetch import FetchActions
from .library import LibraryActions
from .rate import RateActions
from .write import WriteActions

AFTER_RATING = "The model changes once the rating is stored"


class _ShownWatch(Watch):
    """An observer that passes the plan and the progress of the opening of a model to the app's thread."""

    def __init__(self, show: Callable[[Plan | Progress], None]) -> None:
        self._show, self._loop = show, asyncio.get_running_loop()

    def note_plan(self, plan: Plan) -> None:
        call_soon(self._loop, lambda: self._show(plan))

    def progress(self, progress: Progress) -> None:
        call_soon(self._loop, lambda: self._show(progress))


class ModelActions:
    """The actions that open models. use_adapter: a function that switches to the adapter of a given name."""

    def __init__(
        self,
        chat: ChatContext,
        library: LibraryActions,
        rate: RateActions,
        write: WriteActions,
        edit: EditActions,
        use_adapter: Callable[[str], Awaitable[None]],
    ) -> None:
        self._chat, self._library, self._rate = chat, library, rate
        self._write, self._edit = write, edit
        self._use_adapter = use_adapter
        self._plan: Plan | None = None  # the plan (file, memory) for the first model; None: no plan yet
        self.fetch = FetchActions(chat, self._switch, self.choose)

    # Methods that open the model with which the app starts

    async def open_first(self) -> None:
        chat = self._chat
        await chat.host.open(_ShownWatch(self._show_first))
        if chat.phase == "opening":
            await self._library.begin(chat.options)
            if chat.phase == "opening":
                chat.phase = "idle"
            chat.send_waiting()
            await self._warn()
            if chat.host.is_first_run:
                for welcome in chat.transcript.query_children(Welcome):
                    welcome.plan = self._plan
            await self.fetch.propose(await self._model_in_use())

    def _show_first(self, what: Plan | Progress) -> None:
        if isinstance(what, Plan):
            self._plan = what
        for welcome in self._chat.transcript.query_children(Welcome):
            welcome.tell(what)

    # Methods that switch models

    async def use_as_typed(self, argument: str) -> None:
        """Switch to the model that the argument names, by its name or by its number in the list of models.
        Without an argument, show the list of models."""
        if not argument:
            self.choose()
            return
        self._chat.host.interrupt()  # the first measurement of a model can take a minute
        try:
            in_use = await self._model_in_use()
            name = await asyncio.to_thread(models.find_model, argument, in_use, self._chat.options.files)
        except Exception:
            self._write.settle()
            raise
        self._chat.start(partial(self._switch, name))

    def choose(self, words: str = "") -> None:
        """Show the list of models. words: the text with which the list's filter begins."""
        self._chat.start(partial(self._choose, words))

    async def _choose(self, words: str) -> None:
        self._chat.host.interrupt()
        known = await self._chat.prepare(lambda runtime: (runtime.model, runtime.is_auto))
        if known is None:
            self._write.settle()
            return
        in_use, auto = known
        files = self._chat.options.files
        guest = isinstance(self._chat.host, Guest)
        listed = partial(models.models, in_use, proposes=not guest, auto=None if guest else auto)
        screen = PickerScreen("Models", listed, partial(_new_model, files), words)
        chosen = await self._chat.ask(screen)
        if chosen is None or self._chat.phase != "idle":
            self._write.settle()
            return
        if await asyncio.to_thread(models.is_proposal, chosen):
            self.fetch.fetch(chosen)
            self._write.settle()
        else:
            await self._switch(chosen if chosen == AUTO else files.model(chosen))

    async def _model_in_use(self) -> Model:
        return await self._chat.host.call_between(lambda runtime: runtime.model)

    async def _switch(self, name: str) -> None:
        """Switch to another model in the same chat, after the ratings in progress: the old model learns from
        these ratings. If the new model cannot be opened, the chat keeps the old model, or ends if the old
        model was closed and cannot be opened again."""
        chat = self._chat
        self._edit.leave()
        if self._rate.is_storing:
            chat.phase = "switching"
            chat.status.flash(AFTER_RATING)
            await self._rate.wait()
            if chat.phase == "closing":
                return
        chat.phase = "opening"
        chat.app.refresh_bindings()
        try:
            await chat.host.switch(name, chat.state.session, _ShownWatch(self._show_switch))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._after_failed_switch(error)
        else:
            await self._show_new_model()
            await self._remember(name)  # this fails if the settings file cannot be written
        finally:
            chat.status.background = ""
            if chat.phase == "opening":
                chat.phase = "idle"
            chat.send_waiting()

    async def _remember(self, name: str) -> None:
        """Save the model's name as the default for the next start, except in a chat on a server. If the next
        start has a flag, an environment variable or a project file that names a model, that model is used in
        place of the default."""
        if not isinstance(self._chat.host, Guest):
            await asyncio.to_thread(models.remember, name)

    def _show_switch(self, what: Plan | Progress) -> None:
        if self._chat.phase == "opening":
            self._chat.status.background = models.opening_line(what)

    async def _after_failed_switch(self, error: Exception) -> None:
        chat = self._chat
        if chat.phase == "closing":
            return
        if chat.host.is_open:
            await chat.transcript.add(Notice(chat_error_line(error), "error"))
            self._write.settle()
        else:  # the app closed the old model to free memory, and could not open the old model again
            chat.app.end(error)

    async def _show_new_model(self) -> None:
        """Show the name and the figures of the new model in the border of the input and in the status line,
        and tell the user about the switch in a notice."""
        chat = self._chat
        chat.state.model_changed()
        if chat.phase == "closing":
            return
        options = replace(chat.options, session=chat.state.session, system=None)
        opened, said = await chat.host.call(lambda r: (Opened.of(r, options), models.switch_text(r)))
        self._library.show(opened)
        await self._write.show_turns()
        await chat.transcript.add(Notice(said))
        await self._warn()

    async def _warn(self) -> None:
        """Show a notice if the open model has a limit, for example because ruvmlx cannot use the machine's
        GPU."""
        if self._chat.caveat:
            # `mount` keeps the welcome text on the screen. `Transcript.add` would remove the welcome text.
            await self._chat.transcript.mount(Notice(self._chat.caveat))

    # Methods that show and switch adapters

    def choose_adapter(self, _: str = "") -> None:
        self._chat.start(self._choose_adapter)

    async def _choose_adapter(self) -> None:
        entries = await self._chat.prepare(models.adapters)
        if entries is None:
            return
        screen = PickerScreen("Adapters", lambda: entries, models.new_adapter_line)
        chosen = await self._chat.ask(screen)
        if chosen is not None and self._chat.phase == "idle":
            is_known = chosen in {entry.name for entry in entries}
            await self._use_adapter(chosen if is_known else f"{chosen} new")


def _new_model(files: UserFiles, words: str) -> str:
    """Return the picker's line for typed words that are no listed model's exact name. If the user chooses
    this line, the app opens the folder, the file or the other program's model that the words name, or
    downloads the Hugging Face repository of this name. Return "" for words of any other form."""
    if REPO.fullmatch(words) and not files.has(words):
        return f"Fetch {words} from Hugging Face"
    named = words.startswith(("/", "~", "./", "../", *STORES)) or words.endswith(".gguf")
    return f"Open {words}" if named else ""

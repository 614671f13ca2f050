"""Opening models in the app: the first one, and others in the middle of a chat; and the adapter picker."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from textual import work

from ruvmlx.models.model import Model
from ruvmlx.models.resolve import REPO
from ruvmlx.plan import Plan
from ruvmlx.progress import Progress, Watch

from . import commands, describe, models
from .base import later
from .library import LibraryApp
from .messages import Notice
from .picker_screen import PickerScreen
from .view_model import Opened
from .welcome import Welcome


class _Shown(Watch):
    """An opening in the runtime's thread, shown in the app's: made there."""

    def __init__(self, show: Callable[[Plan | Progress], None]) -> None:
        self._show, self._loop = show, asyncio.get_running_loop()

    def planned(self, plan: Plan) -> None:
        later(self._loop, lambda: self._show(plan))

    def progress(self, progress: Progress) -> None:
        later(self._loop, lambda: self._show(progress))


class SwitchingApp(LibraryApp):
    # The first one

    async def _open_first(self) -> None:
        await self.runtime.open(_Shown(self._show_first))
        if self.phase == "opening":
            await self._begin(self.options)
            await self._warn()
            if self.runtime.is_first_run:
                for welcome in self.transcript.query_children(Welcome):
                    welcome.plan = self._plan

    _plan: Plan | None = None

    def _show_first(self, what: Plan | Progress) -> None:
        if isinstance(what, Plan):
            self._plan = what
        for welcome in self.transcript.query_children(Welcome):
            welcome.tell(what)

    # Another one

    def action_models(self) -> None:
        self._pick_model("")

    @work
    async def _pick_model(self, words: str) -> None:
        in_use = await self._model_in_use()
        screen = PickerScreen("Models", lambda: models.models(in_use), _new_model, words)
        chosen = await self.push_screen_wait(screen)
        if chosen is not None and self.phase == "idle":
            await self._switch(chosen)

    async def _model_in_use(self) -> Model:
        return await self.runtime.call_between(lambda runtime: runtime.model)

    async def _switch(self, name: str) -> None:
        """The chat stays. So does the model, unless the new one can be used."""
        if self.editing:
            self.action_cancel_edit()
        session, self.phase = self.session, "opening"
        self.refresh_bindings()
        try:
            await self.runtime.switch(name, session, _Shown(self._show_switch))
        except Exception as error:  # noqa: BLE001 - shown on one line, whatever it is
            await self._stay(error)
        else:
            await self._changed()
        finally:
            self.status.background = ""
            if self.phase == "opening":
                self.phase = "idle"
            self._send_waiting()

    def _show_switch(self, what: Plan | Progress) -> None:
        if self.phase == "opening":
            self.status.background = models.opening_line(what)

    async def _stay(self, error: Exception) -> None:
        if not self.runtime.is_open and self.phase != "closing":  # it made room, and cannot come back
            self.failure = error
            self.exit(getattr(error, "exit_code", 1))
        elif self.phase != "closing":
            await self.transcript.add(Notice(describe.error_line(error), "error"))

    async def _changed(self) -> None:
        """Show what is another model's now."""
        if self.phase == "closing":
            return
        options = replace(self.options, session=self.session, system=None)
        opened, said = await self.runtime.call(lambda r: (Opened.of(r, options), models.told(r)))
        self.kv = None
        self._show_opened(opened)
        await self.transcript.show(opened.turns, opened.model)
        await self.transcript.add(Notice(said))
        await self._warn()

    async def _warn(self) -> None:
        """One line where the machine's GPU, or our kernels on it, cannot be used."""
        if self.caveat:
            await self.transcript.mount(Notice(self.caveat))  # the welcome stays

    async def do_model(self, argument: str) -> None:
        if not argument:
            self._pick_model("")
            return
        in_use = await self._model_in_use()
        name = await asyncio.to_thread(models.find_model, argument, in_use)
        self.run_worker(self._switch(name))

    async def do_models(self, argument: str) -> None:
        self._pick_model(argument)

    # Adapters

    def action_adapters(self) -> None:
        self._pick_adapter()

    @work
    async def _pick_adapter(self) -> None:
        entries = await self._attempt(models.adapters)
        if entries is None:
            return
        screen = PickerScreen("Adapters", lambda: entries, lambda word: f"Begin a new one: {word}")
        chosen = await self.push_screen_wait(screen)
        if chosen is not None and self.phase == "idle":
            await self._obey(commands.Command("adapter", chosen))

    async def do_adapters(self, _: str) -> None:
        self._pick_adapter()


def _new_model(words: str) -> str:
    """What is typed may be a repository, a folder or a file."""
    if words.startswith(("/", "~", "./", "../")) or words.endswith(".gguf"):
        return f"Open {words}"
    return f"Fetch {words} from Hugging Face" if REPO.fullmatch(words) else ""

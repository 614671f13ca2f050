"""This module lets the user get a better model with one key. The app proposes a model to a user of the
starter (the small model for the first start), downloads the model in the background, and offers to switch the
chat to the downloaded model."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from ruvmlx.errors import Interrupted, error_line
from ruvmlx.host.guest import Guest
from ruvmlx.memory import proposals
from ruvmlx.models.config.header_facts import Facts
from ruvmlx.models.config.model import Model
from ruvmlx.models.find.hub import offline
from ruvmlx.models.find.resolve import find_model
from ruvmlx.models.find.starter import starter_path
from ruvmlx.progress import Progress, Watch
from ruvmlx.text import size

from .. import keys
from ..context import ChatContext, StatusWatch
from ..messages import Notice

OFFLINE = "HF_HUB_OFFLINE is set, so no model can be fetched; these models are here"


class _FetchWatch(Watch):
    """An observer that shows the progress of a download in the status line. If the chat ends, the observer
    stops the download. A later download continues from the part that is on the disk."""

    def __init__(self, chat: ChatContext) -> None:
        self._chat, self._line = chat, StatusWatch(chat.status)

    def progress(self, progress: Progress) -> None:
        if self._chat.phase == "closing":
            raise Interrupted("the chat has ended; what was fetched is kept.")
        self._line.progress(progress)

    def end(self) -> None:
        self._line.end()


class FetchActions:
    """The actions that propose and download a model.

    switch: a function that opens another model in this chat. choose: a function that shows the list of
    models.
    """

    def __init__(
        self, chat: ChatContext, switch: Callable[[str], Awaitable[None]], choose: Callable[[], None]
    ) -> None:
        self._chat, self._switch, self._choose = chat, switch, choose
        # the names of the models to fetch, the next one last: the model that the app has proposed, and the
        # models whose downloads have failed
        self._wanted: list[str] = []
        self._fetching = ""  # the name of the model that is being downloaded
        self._fetched = ""  # the name of the downloaded model to which the user has not switched yet

    async def propose(self, model: Model) -> None:
        """Show a notice that proposes the best model for this machine, if the chat uses the starter model and
        the user has not forbidden the network. Show nothing in a chat on a server, or if no model that fits
        has more parameters than the models on this machine."""
        if isinstance(self._chat.host, Guest) or offline() or model.path != starter_path():
            return
        transcript = self._chat.transcript
        last = next(reversed(transcript.children), None)
        offer = await asyncio.to_thread(proposals.best_proposal, Facts.of(model))
        if offer is not None and self._chat.phase != "closing":
            self._wanted.insert(0, offer.name)
            # Messages that the user has sent meanwhile stay below the notice. `mount` keeps the welcome text
            # on the screen. `Transcript.add` would remove the welcome text.
            notice = Notice(self._words(offer))
            if last in transcript.children:
                await transcript.mount(notice, after=last)
            else:
                await transcript.mount(notice, before=0 if transcript.children else None)

    def _words(self, offer: proposals.ModelOffer) -> str:
        facts = f"{size(offer.size)}, about {offer.tps_expected:.0f} tokens a second, {offer.licence}"
        return (
            "This is a very small model, to try ruvmlx with. "
            f"{self._key} fetches a good one for this machine: {offer.name} ({facts})."
        )

    @property
    def _key(self) -> str:
        return keys.key_label(self._chat.app, "fetch", "F5")

    def go(self) -> None:
        """If a downloaded model is ready, switch to this model. While a download runs, only tell the user so.
        If no model is ready and no download runs, continue the download that has failed, or download the
        model that the app has proposed. If there is neither, show the list of models."""
        if self._fetched:
            name, self._fetched = self._fetched, ""
            self._chat.start(partial(self._switch, name))
        elif self._fetching:
            self._chat.status.flash(f"{self._fetching} is being fetched; the chat goes on meanwhile")
        elif self._wanted:
            self.fetch(self._wanted[-1])
        else:
            if offline():
                self._chat.status.flash(OFFLINE)
            self._choose()

    def fetch(self, name: str) -> None:
        """Download a model in the background. The user can chat during the download."""
        self._chat.start(partial(self._fetch, name))

    async def _fetch(self, name: str) -> None:
        chat, watch = self._chat, _FetchWatch(self._chat)
        self._fetching = name
        try:
            await asyncio.to_thread(find_model, name, watch)
        except Exception as error:  # noqa: BLE001 - files and networks fail in many classes
            self._wanted = [*(other for other in self._wanted if other != name), name]
            if chat.phase != "closing":
                await chat.transcript.add(
                    Notice(f"{error_line(error)} {self._key} goes on with it.", "error")
                )
        else:
            self._fetched = name
            self._wanted = [other for other in self._wanted if other != name]
            if chat.phase != "closing":
                await chat.transcript.add(Notice(f"{name} is here. {self._key} switches this chat to it."))
        finally:
            self._fetching = ""
            watch.end()

"""This module opens and closes the side panel and keeps the panel's figures up to date."""

import asyncio

from ruvmlx.platform.sensors import SensorReading

from ..context import ChatContext
from ..overview import Overview

SENSE_EVERY = 5.0  # seconds between two readings of the machine's sensors while the panel is open


class PanelActions:
    def __init__(self, chat: ChatContext) -> None:
        self._chat = chat
        self._reading = SensorReading()

    def toggle(self, _: str = "") -> None:
        self._chat.panel.display = not self._chat.panel.display
        self.fill()
        self._chat.start(self._sense, group="sense", exclusive=True)

    def fill(self) -> None:
        """Show the runtime's present state in the panel, if the panel is open."""
        self._chat.start(self._fill, group="panel", exclusive=True)

    async def _fill(self) -> None:
        chat = self._chat
        if chat.panel.display and chat.state.session:
            view = await chat.attempt(Overview.of)
            if view:
                chat.panel.show(view.later(self._reading), chat.state.kv)

    async def _sense(self) -> None:
        """Show new figures of heat, power and memory while the panel is open. The method does not call the
        host, because a call would stop the work that the host does while the user is idle."""
        chat = self._chat
        while chat.panel.display and chat.phase != "closing":
            self._reading = await asyncio.to_thread(chat.state.sensors.read)
            if chat.panel.view:
                chat.panel.show(chat.panel.view.later(self._reading), chat.state.kv)
            await asyncio.sleep(SENSE_EVERY)

"""The part of the app that the rest of the chat uses: its phase, and why it ended."""

from textual.app import App
from textual.reactive import var

from .keyboard import TerminalDriver


class ChatShell(App[int]):
    """The app without its widgets and actions, which use it to call Textual."""

    phase: var[str] = var("opening")  # then "idle", "replying", "closing"

    def __init__(self) -> None:
        super().__init__(driver_class=TerminalDriver)
        self.failure: BaseException | None = None  # the error that ended the app

    def end(self, error: BaseException | None) -> None:
        """End the app. The exit code is the error's, or 0 without an error."""
        self.failure = error or self.failure
        self.exit(getattr(self.failure, "exit_code", 1) if self.failure else 0)

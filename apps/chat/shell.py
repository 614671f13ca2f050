"""This module has the base class of the app, which the app's actions and widgets use. The class has the app's
phase and the error that ended the app."""

from textual.app import App
from textual.reactive import var

from .keyboard import TerminalDriver


class ChatShell(App[int]):
    """The app without its widgets and actions. The actions call Textual through this class."""

    # "opening" at the start and while the app switches models; "switching" while the app opens another chat
    # or saves the user's version of a reply; else "idle", "replying" or "closing"
    phase: var[str] = var("opening")

    def __init__(self) -> None:
        super().__init__(driver_class=TerminalDriver)
        self.failure: BaseException | None = None  # the error that ended the app

    def end(self, error: BaseException | None) -> None:
        """End the app because of `error`; None: the user leaves. The exit code of the app is the `exit_code`
        of the error (1 if it has none). If the app has had no error, the exit code is 0."""
        self.failure = error or self.failure
        self.exit(getattr(self.failure, "exit_code", 1) if self.failure else 0)

"""What the rest of the chat sees of the app: its phase and why it ended."""

from textual.app import App
from textual.reactive import var


class ChatShell(App[int]):
    """The app without its widgets and actions; they hold it to ask Textual for services."""

    phase: var[str] = var("opening")  # then "idle", "replying", "closing"

    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None  # why the app ended by itself

    def end(self, error: BaseException | None) -> None:
        """Leave the screen; the exit code is the error's own, 0 without one."""
        self.failure = error or self.failure
        self.exit(getattr(self.failure, "exit_code", 1) if self.failure else 0)

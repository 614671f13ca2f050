"""This module is the text in an empty conversation. While a model opens, the text describes this model; later
the text lists the most useful keys."""

import textwrap
import time

from rich.cells import cell_len
from textual.reactive import var
from textual.widgets import Static

from ruvmlx.memory.load_plan import Plan
from ruvmlx.progress import Progress
from ruvmlx.text import one_line

WELCOME = """{model} learns from what you think of its replies.

Ctrl+Y  more like this      Ctrl+N  less like this
Tab  choose a reply, then 1 to 5      F1  all keys and commands"""


def plan_block(plan: Plan, width: int) -> str:
    """Return the plan for a model (the model's facts and its memory) as text in two columns. All lines have
    the same length, so that the CSS centres them as one block."""
    rows = [(word, one_line(text)) for word, text in plan.rows()]
    left = max(len(word) for word, _ in rows) + 2
    lines = []
    for word, text in rows:
        wrapped = textwrap.wrap(text, max(20, width - left), break_on_hyphens=False) or [""]
        lines += [
            f"{head:<{left}}{line}"
            for head, line in zip([word, *[""] * (len(wrapped) - 1)], wrapped, strict=True)
        ]
    longest = max(map(cell_len, lines))
    return "\n".join(line + " " * (longest - cell_len(line)) for line in lines)


class Welcome(Static):
    """The text in an empty conversation. plan: the plan for the model, which the widget shows while the model
    opens. When the user runs the program for the first time, the widget also shows the plan after the model
    has opened."""

    plan: var[Plan | None] = var(None)
    progress: var[str] = var("")

    def __init__(self, model: str = "") -> None:
        super().__init__(markup=False)
        self.model = model
        self._since = time.monotonic()

    def on_mount(self) -> None:
        self._show()
        if not self.model:
            self.set_interval(1, self._show)

    def on_resize(self) -> None:
        self._show()

    def tell(self, what: Plan | Progress) -> None:
        """Show the plan for the model that is being opened, or the progress of the opening."""
        if isinstance(what, Plan):
            self.plan = what
        else:
            self.progress = one_line(what.line)

    def _show(self) -> None:
        parts = [WELCOME.format(model=self.model)] if self.model else []
        if self.plan and self.size.width:
            parts.append(plan_block(self.plan, self.size.width - 4))
        if not self.model:
            parts.append(self.progress or self._waiting())
        self.update("\n\n".join(parts))

    def _waiting(self) -> str:
        seconds = int(time.monotonic() - self._since)
        return "Opening the model…" + (f" {seconds} s" if seconds > 1 else "")

    watch_plan = watch_progress = _show

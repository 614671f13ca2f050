"""This module is the side panel, which the key F2 opens. The panel shows the state of learning and of the
machine. In a narrow terminal, the panel covers the conversation, because the two do not fit side by side."""

from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from ruvmlx.kv.cache import KVStats

from .overview import Overview, Rows, fit_sections, sections

WIDTH = 34  # the width in terminal cells; the panel's frame takes four cells of this width


MIN_CHAT_COLUMNS = 30  # if the conversation has fewer columns beside the panel, the panel covers it


class Panel(VerticalScroll, can_focus=False):
    """A panel that is hidden until the user opens it."""

    def __init__(self) -> None:
        super().__init__(Static(markup=False))
        self.display = False
        self._shown: tuple[Overview, KVStats | None] | None = None

    def place(self, width: int, height: int) -> None:
        """Put the panel beside the conversation, or over it in a narrow terminal. width: the columns of the
        terminal; height: the number of lines above the input."""
        is_narrow = width < WIDTH + MIN_CHAT_COLUMNS
        self.set_class(is_narrow, "narrow")
        self.styles.height = height if is_narrow else "1fr"

    @property
    def covers(self) -> bool:
        """True if the panel hides the conversation."""
        return self.display and self.has_class("narrow")

    def uncover(self) -> None:
        """Close the panel if it hides the conversation. The transcript calls this method before it adds a
        message, so that the user sees the message."""
        if self.covers:
            self.display = False

    def show(self, view: Overview, kv: KVStats | None) -> None:
        self._shown = view, kv
        foot = self._foot(view)
        height = self.size.height if self.covers else self.container_size.height or self.size.height
        shown = fit_sections(sections(view, kv), height - len(foot))
        room = height - len(foot) - sum(len(rows) + 1 for _, rows in shown) >= len(shown)
        parts: list[Content] = []
        for title, rows in shown:
            parts += [Content.styled(title, "bold $primary"), *self._rows(rows)]
            parts += [Content("")] * room
        self.query_one(Static).update(Content("\n").join(parts + foot))

    @property
    def view(self) -> Overview | None:
        """The overview that the panel shows now."""
        return self._shown[0] if self._shown else None

    def on_resize(self) -> None:
        if self._shown:
            self.show(*self._shown)

    def _rows(self, rows: Rows) -> list[Content]:
        columns = self.content_size.width if self.covers else WIDTH - 4
        width = max(len(word) for word, _ in rows)
        whole = (Content.assemble((f"{word:<{width}}  ", "$secondary"), text) for word, text in rows)
        return [row.truncate(columns, ellipsis=True) for row in whole]

    @staticmethod
    def _foot(view: Overview) -> list[Content]:
        foot = [Content("^r take back   /rollback N").stylize("$secondary")]
        if view.learning and view.learning.status.versions:
            known = sorted({0, *view.learning.status.versions})[-6:]
            foot.insert(0, Content(f"versions {', '.join(map(str, known))}").stylize("$secondary"))
        return foot

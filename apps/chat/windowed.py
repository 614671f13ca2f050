"""Layout of long conversations: only widgets near the window are placed.

Textual places every widget of a scrolling container again whenever anything in it grows, visible or not:
25 us each, and a long reply has hundreds. `Windowed` widgets place only the children near the window. Their
sizes and positions stay the same.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.widget import Widget

if TYPE_CHECKING:
    _Base = Widget
else:  # Textual's CSS uses the first widget among a class's bases
    _Base = object


class Windowed(_Base):
    """A mixin for containers whose height is that of their children; put it before the container.

    window: the region to place; None for all. The parent sets it in every layout.
    """

    window: Region | None = None

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        # Height 0: with its real height, every child would be measured again for each line that it grows.
        arranged = super().arrange(Size(size.width, 0), optimal)
        return arranged if self.window is None or optimal else seen(arranged, self.window)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        window, self.window = self.window, None
        try:
            return super().get_content_height(container, viewport, width)
        finally:
            self.window = window


def tell(arranged: DockArrangeResult, window: Region) -> None:
    """Tell the children which region of them is in the window."""
    for placement in arranged.placements:
        if isinstance(placement.widget, Windowed):
            placement.widget.window = window.translate(-placement.region.offset)


def seen(arranged: DockArrangeResult, window: Region) -> DockArrangeResult:
    tell(arranged, window)
    near = [p for p in arranged.placements if p.region.overlaps(window)]
    return replace(
        arranged, placements=near, widgets={p.widget for p in near}, _spatial_map=arranged.spatial_map
    )

"""This module makes the layout of long conversations fast. It places only the widgets in the window. The
window is the part of the conversation that is on the screen, one screen above it, and one screen below it.

When one widget in a scrolling container grows, Textual places every widget of the container again, also the
widgets outside the screen. To place the widgets again takes 25 us for each widget, and a long reply has
hundreds of widgets. `Windowed` widgets place only those of their children that overlap the window. The sizes
and positions of the children stay the same.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from textual.geometry import Region, Size
from textual.layout import DockArrangeResult
from textual.widget import Widget

if TYPE_CHECKING:
    _Base = Widget
else:  # do not subclass Widget here, because Textual's CSS would take this mixin as the base class
    _Base = object


class Windowed(_Base):
    """A mixin for containers whose height is the sum of their children's heights. Put the mixin before the
    container in the list of base classes.

    window: a region; the children that overlap the region are placed; None: all children are placed. The
    parent widget sets the window in every layout.
    """

    window: Region | None = None

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        # This call passes the height 0, because with the real height Textual would measure every child again
        # for each new line.
        arranged = super().arrange(Size(size.width, 0), optimal)
        return arranged if self.window is None or optimal else visible_part(arranged, self.window)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        window, self.window = self.window, None
        try:
            return super().get_content_height(container, viewport, width)
        finally:
            self.window = window


def tell(arranged: DockArrangeResult, window: Region) -> None:
    """Set the window of each `Windowed` child. The window's coordinates are relative to the child."""
    for placement in arranged.placements:
        if isinstance(placement.widget, Windowed):
            placement.widget.window = window.translate(-placement.region.offset)


def visible_part(arranged: DockArrangeResult, window: Region) -> DockArrangeResult:
    tell(arranged, window)
    near = [p for p in arranged.placements if p.region.overlaps(window)]
    return replace(
        arranged, placements=near, widgets={p.widget for p in near}, _spatial_map=arranged.spatial_map
    )

"""Replies in a notebook, under their public name."""

# The code is in the room of the API. This file stays because notebooks import `ruvmlx.notebook`.
from .api.notebook import ReplyView, show

__all__ = ["ReplyView", "show"]

"""Offer the display of replies in Jupyter notebooks as the module `ruvmlx.notebook`."""

# The code is in ruvmlx/api/notebook.py. This file exists because notebooks import `ruvmlx.notebook`.
from .api.notebook import ReplyView, show

__all__ = ["ReplyView", "show"]

"""`ruvmlx doctor --report FILE`: one file about a machine, which can be shown to anyone.

`make` runs the parts in a bounded time, `speed` measures beside mlx-lm, `facts` describes machine and model,
`apps/privacy.py` keeps the user's words, names and paths out, `page` writes the Markdown.
"""

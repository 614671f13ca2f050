"""This package is `ruvmlx doctor --report FILE`. It writes a report on a machine that the user can show to
anyone.

`make` runs the parts of the report within a time limit. `speed` measures the speed of ruvmlx and of mlx-lm.
`facts` describes the machine and the model. `apps/privacy.py` removes the user's words, names and paths.
`page` writes the Markdown.
"""

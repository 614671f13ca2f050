"""This package implements the command `ruvmlx doctor --report FILE`. The command writes a report on the
user's machine. The report has no private data, so the user can show it to anyone.

The module `make` makes the parts of the report within a time limit. `speed` measures the speed of ruvmlx and
of mlx-lm. `kernels` checks the GPU kernels. `facts` describes the machine and the model. `apps/privacy.py`
removes the user's words, names and paths. `page` writes the report as Markdown.
"""

"""Sphinx: the pages of docs/ as a site.

uv run --group docs sphinx-build -W docs build/docs
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]

project = _PROJECT["name"]
release = version = _PROJECT["version"]
author = copyright = "the ruvmlx contributors"
html_title = f"{project} {version}"

extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3  # [text](page.md#heading) finds headings down to this level
exclude_patterns = ["_build"]
nitpicky = True  # a reference to nothing is an error under -W

html_theme = "furo"
# Formulas are drawn by the browser; a page without network shows their TeX source.


def setup(app: Sphinx) -> None:
    app.connect("source-read", _offer_other_files)


def _offer_other_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Markdown files outside docs/ are no pages of the site: links to them become downloads."""
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)\)", r"](path:\1)", source[0])

"""This module has the app's themes: a dark theme, a light theme, and a theme with high contrast. The command
palette (Ctrl+P) also offers Textual's own themes."""

import os
from collections.abc import Mapping

from textual.theme import BUILTIN_THEMES, Theme

from ruvmlx.errors import UsageError

DARK = Theme(
    name="ruvmlx-dark",
    dark=True,
    background="#15171c",
    surface="#1b1e25",
    panel="#232730",
    foreground="#d5d9e0",
    primary="#7fa7d6",
    secondary="#8b93a7",
    accent="#c2a56b",
    success="#83b58a",
    warning="#c2a56b",
    error="#d08585",
    variables={"footer-key-foreground": "#c2a56b", "input-selection-background": "#7fa7d6 30%"},
)
LIGHT = Theme(
    name="ruvmlx-light",
    dark=False,
    background="#faf9f6",
    surface="#f1efe9",
    panel="#e6e3da",
    foreground="#2c2f36",
    primary="#2f6299",
    secondary="#6d7280",
    accent="#8a6414",
    success="#35703e",
    warning="#8a6414",
    error="#a53a3a",
    variables={"footer-key-foreground": "#8a6414", "input-selection-background": "#2f6299 25%"},
)


CONTRAST = Theme(
    name="ruvmlx-contrast",
    dark=True,
    background="#000000",
    surface="#000000",
    panel="#000000",
    foreground="#ffffff",
    primary="#7fd4ff",
    secondary="#ffffff",
    accent="#ffff00",
    success="#5fff5f",
    warning="#ffff00",
    error="#ff8787",
    variables={
        "footer-key-foreground": "#ffff00",
        "input-selection-background": "#7fd4ff 50%",
        "text-muted": "#ffffff",
    },
)
ALL = (DARK, LIGHT, CONTRAST)


def setting(name: str) -> str:
    """Return the value of the setting `theme` that selects the theme `name`."""
    return name.removeprefix("ruvmlx-")


def theme_name(wanted: str = "auto", environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the theme to use: the theme `wanted` of the setting, or the variable TEXTUAL_THEME
    if the setting is "auto". If neither the setting nor the variable names a theme, return the light theme if
    COLORFGBG says that the terminal's background is light. In all other
    cases, return the dark theme."""
    if chosen := environment.get("TEXTUAL_THEME") if wanted == "auto" else wanted:
        return f"ruvmlx-{chosen}" if f"ruvmlx-{chosen}" in {made.name for made in ALL} else chosen
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return LIGHT.name if background in ("7", "15") else DARK.name


def check(wanted: str) -> None:
    """Raise UsageError if there is no theme with the name `wanted` of the setting."""
    names = ["auto", *(setting(made.name) for made in ALL), *BUILTIN_THEMES]
    if wanted != "auto" and theme_name(wanted) not in {*BUILTIN_THEMES, *(made.name for made in ALL)}:
        raise UsageError(f"theme: there is no theme {wanted!r}; there are: {', '.join(names)}.")

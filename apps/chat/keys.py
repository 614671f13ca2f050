"""This module reads the user's own keys from the setting `keys`, for example again=ctrl+t,chats=f3.

A key that the user has chosen applies to all screens. A binding that several screens share (close, quit,
list_up ...) has one name.
"""

from collections.abc import Iterable
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.keys import Keys, key_to_character

from ruvmlx.errors import UsageError

_MODIFIERS = ("ctrl", "alt", "shift")
_NAMED = {key.value for key in Keys}

# The bindings that all screens with a list have. Screens with a list have the actions `leave` and `move`.
OF_LISTS = (
    Binding("escape", "leave", "Close", show=False, priority=True, id="close"),
    Binding("ctrl+q", "app.leave", "Quit", show=False, priority=True, id="quit"),
    Binding("ctrl+c", "leave", "Close", show=False, priority=True),
    Binding("up", "move(-1)", "Up", show=False, priority=True, id="list_up"),
    Binding("down", "move(1)", "Down", show=False, priority=True, id="list_down"),
    Binding("pageup", "move(-10)", "Page up", show=False, priority=True, id="list_page_up"),
    Binding("pagedown", "move(10)", "Page down", show=False, priority=True, id="list_page_down"),
)


def parse(setting: str, bindings: Iterable[Binding]) -> dict[str, str]:
    """Return a mapping from names of bindings to the user's keys. bindings: the bindings that the user can
    change. Raise UsageError for an unknown name or key."""
    names = list(dict.fromkeys(binding.id for binding in bindings if binding.id))
    found: dict[str, str] = {}
    for pair in filter(None, setting.split(",")):
        name, _, key = pair.partition("=")
        if name not in names:
            raise UsageError(f"keys: there is no action {name!r}; there are: {', '.join(names)}.")
        if not _is_key(key):
            raise UsageError(f"keys: {key!r} is no key for {name}; write it as in ctrl+t, f3 or alt+up.")
        found[name] = key
    return found


def _is_key(key: str) -> bool:
    *modifiers, last = key.split("+")
    known = last in _NAMED or key in _NAMED or len(key_to_character(last) or "") == 1
    # A key without a modifier must be longer than a single character: if "a" were the key of a binding, the
    # user could not type an "a" any more.
    return known and all(m in _MODIFIERS for m in modifiers) and (bool(modifiers) or len(last) > 1)


def key_label(app: App[Any], name: str, default: str) -> str:
    """Return the label of a binding's key for the hints of the app: the user's own key, or else `default`."""
    own = app._keymap.get(name)
    return app.get_key_display(Binding(own, "")) if own else default

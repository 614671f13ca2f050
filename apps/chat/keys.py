"""This module reads the user's own keys from the setting `keys`, for example again=f7,chats=f9.

A key that the user has chosen for a binding applies to every screen that has this binding. A binding that
several screens share (close, quit, list_up ...) has one name.
"""

from collections.abc import Sequence
from typing import Any

from textual.app import App
from textual.binding import Binding
from textual.keys import Keys, key_to_character

from ruvmlx.errors import UsageError

Screens = Sequence[Sequence[Binding]]  # for each screen, its bindings

_MODIFIERS = ("ctrl", "alt", "shift")
_NAMED = {key.value for key in Keys}

# The Terminal of macOS sends these keys only with Shift.
PAGE_UP, PAGE_DOWN = "pageup,shift+pageup", "pagedown,shift+pagedown"

# The bindings that all screens with a list have. Screens with a list have the actions `leave` and `move`.
OF_LISTS = (
    Binding("escape", "leave", "Close", show=False, priority=True, id="close"),
    Binding("ctrl+q", "app.leave", "Quit", show=False, priority=True, id="quit"),
    Binding("ctrl+c", "leave", "Close", show=False, priority=True),
    Binding("up", "move(-1)", "Up", show=False, priority=True, id="list_up"),
    Binding("down", "move(1)", "Down", show=False, priority=True, id="list_down"),
    Binding(PAGE_UP, "move(-10)", "Page up", show=False, priority=True, id="list_page_up"),
    Binding(PAGE_DOWN, "move(10)", "Page down", show=False, priority=True, id="list_page_down"),
)


# The user cannot choose this key for an action, because Ctrl-C must always stop a reply or leave a screen.
_INTERRUPT = "ctrl+c"


def parse(setting: str, screens: Screens) -> dict[str, str]:
    """Return a mapping from names of bindings to the user's keys. screens: for each screen, the bindings that
    the user can change. Raise UsageError for an unknown name or key, and for a key that is taken."""
    names = list(dict.fromkeys(binding.id for screen in screens for binding in screen if binding.id))
    found: dict[str, str] = {}
    for pair in filter(None, setting.split(",")):
        name, _, key = pair.partition("=")
        if name not in names:
            raise UsageError(f"keys: there is no action {name!r}; there are: {', '.join(names)}.")
        if not _is_key(key):
            raise UsageError(
                f"keys: {key!r} is no key for {name}; write it as in f9 or alt+up. "
                f"The actions are: {', '.join(names)}."
            )
        found[name] = key
    for screen in screens:
        _check_taken(found, screen)
    return found


def parse_at_start(setting: str, screens: Screens) -> dict[str, str]:
    """Return what `parse` returns. The text of the error also says how the user removes the setting."""
    try:
        return parse(setting, screens)
    except UsageError as error:
        raise UsageError(f"{error} `ruvmlx config unset keys` removes this setting.") from None


def _check_taken(found: dict[str, str], screen: Sequence[Binding]) -> None:
    """Raise UsageError if two actions of a screen have the same key of the user, or if an action takes the
    key of quit or of the interrupt."""
    taken = {_INTERRUPT: "interrupt", **{_key_of(found, b): "quit" for b in screen if b.id == "quit"}}
    for name in dict.fromkeys(binding.id for binding in screen if binding.id in found):
        key = found[name or ""]
        if taken.setdefault(key, name or "") != name:
            raise UsageError(f"keys: {key} is already the key of {taken[key]}, so {name} needs another key.")


def _key_of(found: dict[str, str], binding: Binding) -> str:
    return found.get(binding.id or "", binding.key)


def lost_keys(found: dict[str, str], screens: Screens) -> dict[str, str]:
    """Return a mapping from the name of an action to its default key, for each action whose default key is
    now the user's key of another action of the same screen."""
    lost: dict[str, str] = {}
    for screen in screens:
        own = {found[b.id] for b in screen if b.id in found}
        lost |= {
            b.id: b.key for b in screen if b.id and b.id not in found and own.issuperset(b.key.split(","))
        }
    return lost


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

"""Themes, no motion, and the user's own keys."""

from types import SimpleNamespace

import pytest
from ruvmlx.apps.chat import keys, theme
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.chats_screen import ChatsScreen
from ruvmlx.apps.chat.models import PickerEntry
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.picker_screen import PickerScreen
from textual.color import Color

from ruvmlx import settings
from ruvmlx.errors import StoreError, UsageError
from ruvmlx.settings import settings_file

from .helpers import ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime


@pytest.mark.parametrize(
    ("wanted", "environment", "expected"),
    [
        ("auto", {}, "ruvmlx-dark"),
        ("auto", {"COLORFGBG": "0;15"}, "ruvmlx-light"),
        ("auto", {"TEXTUAL_THEME": "nord"}, "nord"),
        ("light", {"TEXTUAL_THEME": "nord"}, "ruvmlx-light"),
        ("contrast", {}, "ruvmlx-contrast"),
        ("nord", {}, "nord"),
    ],
)
def test_the_theme_comes_from_setting_then_environment(monkeypatch, wanted, environment, expected):
    for name in ("TEXTUAL_THEME", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert theme.theme_name(wanted) == expected


async def test_the_contrast_theme_has_7_to_1_everywhere():
    """Every character on the screen has at least the contrast that WCAG's AAA asks of text, 7 to 1."""
    async with chatting(ScriptedRuntime(["Hi `x`.\n\n> quote\n\n```py\ny\n```"]), theme="contrast") as (
        app,
        pilot,
    ):
        await ask(app, pilot)
        await pilot.press("ctrl+y")
        await until(pilot, lambda: "▲ good" in screen_text(app))
        for strip in app.screen._compositor.render_strips():
            for text, style, _ in strip:
                if text.strip(" ─│╭╮╰╯▌▁▰▱") and style and style.color and style.bgcolor:
                    ink = Color.from_rich_color(style.color)
                    paper = Color.from_rich_color(style.bgcolor)
                    bright, dark = sorted((_luminance(ink), _luminance(paper)), reverse=True)
                    assert (bright + 0.05) / (dark + 0.05) >= 7, (text, style)


def _luminance(color):
    """Relative luminance as WCAG 2 defines it."""
    parts = [c / 255 for c in color.rgb]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


async def test_with_motion_off_nothing_is_animated():
    async with chatting(ScriptedRuntime(), motion=False) as (app, _):
        assert app.animation_level == "none" and app.chat.prompt.cursor_blink is False
    async with chatting(ScriptedRuntime()) as (app, _):
        assert app.chat.prompt.cursor_blink is True


async def test_a_changed_key_works_and_the_old_one_does_not():
    """The new key works and is shown; the old one does nothing any more."""
    runtime = ScriptedRuntime(["ok"])
    async with chatting(runtime, keys="rate_up=f5,quit=ctrl+x") as (app, pilot):
        await ask(app, pilot)
        assert "f5 Good" in lines_of(app.screen)[-1] and "^x Quit" in lines_of(app.screen)[-1]
        await pilot.press("ctrl+y")
        assert runtime.ratings == []
        await pilot.press("f5")
        await until(pilot, lambda: len(runtime.ratings) == 1)
        await pilot.press("ctrl+x")
        await until(pilot, lambda: runtime.closed)


async def test_changed_keys_work_in_every_screen():
    """In the lists and the comparison, too, and their hints show them."""
    runtime = ScriptedRuntime()
    runtime.store.chats = SimpleNamespace(all=lambda: [], deletion_times=dict)
    own = "close=f6,list_down=ctrl+e,quit=ctrl+x,chat_rename=f7,models=f8"
    async with chatting(runtime, keys=own) as (app, pilot):
        await pilot.press("f8")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen) and app.screen._entries)
        screen = app.screen
        assert "f6 Close" in screen_text(app)
        screen._entries = [PickerEntry("one", ""), PickerEntry("two", "")]
        screen._find()
        await pilot.press("ctrl+e")
        assert screen.options.highlighted == 1
        await pilot.press("escape")
        assert app.screen is screen
        await pilot.press("f6")
        await until(pilot, lambda: app.screen is not screen)
        app.push_screen(ChatsScreen(app.chat))
        await until(pilot, lambda: "f7 Rename" in screen_text(app) and "f6 Close" in screen_text(app))
        await pilot.press("ctrl+x")
        await until(pilot, lambda: runtime.closed)


async def test_a_theme_chosen_in_the_palette_is_saved(home):
    """One that is chosen in the palette is there at the next start; the one of the start is not written."""
    async with chatting(ScriptedRuntime(), theme="light") as (app, pilot):
        assert not (home / "config.toml").exists()
        app.theme = "ruvmlx-contrast"
        await until(pilot, lambda: (home / "config.toml").exists())
        app.theme = "nord"
        await until(pilot, lambda: settings.load().theme == "nord")
        app.theme = "ruvmlx-dark"
        await until(pilot, lambda: settings.load().theme == "dark")
    async with chatting(ScriptedRuntime(), theme=settings.load().theme) as (app, _):
        assert app.theme == "ruvmlx-dark"


async def test_a_theme_that_cannot_be_saved_is_used_and_reported(monkeypatch):
    """It is used all the same, and one line says so."""

    def save(name, value):
        raise StoreError("cannot write config.toml: no space left.")

    monkeypatch.setattr(settings_file, "save", save)
    async with chatting(ScriptedRuntime()) as (app, pilot):
        app.theme = "nord"
        await until(pilot, lambda: "cannot write config.toml" in screen_text(app))
        assert app.theme == "nord"


@pytest.mark.parametrize(
    "wrong",
    [
        "nothing=f3",
        "again=hyper+x",
        "again=nokey",
        "again=a",
        "again=",
        "again=ctrl+q",
        "again=ctrl+c",
        "chat_pin=ctrl+q",
        "again=f9,chats=f9",
        "quit=f9,mark_file=f9",
    ],
)
def test_wrong_keys_are_a_one_line_error(wrong):
    """One line; a bare letter would be missing in the input."""
    with pytest.raises(UsageError) as caught:
        keys.parse(wrong, ChatApp.bindings_of_screens())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "right", ["again=ctrl+q,quit=ctrl+x", "effect=f9,chat_rename=f9", "again=ctrl+t", ""]
)
def test_a_key_that_is_free_on_its_screen_is_taken(right):
    """A key may move from one action to another, and two screens may give a key to two actions."""
    found = keys.parse(right, ChatApp.bindings_of_screens())
    assert ",".join("=".join(pair) for pair in found.items()) == right


def test_wrong_keys_at_a_start_say_how_they_are_removed():
    with pytest.raises(UsageError) as caught:
        ChatApp(ScriptedRuntime, ChatOptions(keys="again=a"))
    assert "`ruvmlx config unset keys`" in str(caught.value)


async def test_a_theme_that_does_not_exist_is_told():
    async with chatting(ScriptedRuntime(), theme="nosuch") as (app, pilot):
        await until(pilot, lambda: "There is no theme 'nosuch'" in screen_text(app))
        assert app.theme == "ruvmlx-dark"


@pytest.mark.parametrize("width", [1, 4])
async def test_a_terminal_of_few_columns_does_not_end_the_chat(width):
    """A terminal can have so few columns for a moment, while a user drags the edge of its window."""
    async with chatting(ScriptedRuntime(["One.", "Two."])) as (app, pilot):
        await pilot.resize_terminal(width, 10)
        await ask(app, pilot)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: isinstance(app.screen, ChatsScreen))
        await pilot.pause()
        await pilot.press("escape")
        await ask(app, pilot)
        assert len(app.chat.transcript.replies) == 2

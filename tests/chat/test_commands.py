"""Slash commands."""

import pytest
from ruvmlx.apps.chat import palette
from ruvmlx.apps.chat.arguments import parse_rating
from ruvmlx.apps.chat.commands import COMMANDS, Command, help_lines, message_text, parse, typed_text

from ruvmlx.errors import UsageError

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/rate up", Command("rate", "up")),
        ("  /RATE 4 too long\n", Command("rate", "4 too long")),
        ("/up", Command("rate", "up")),
        ("/3 so so", Command("rate", "3 so so")),
        ("/+", Command("rate", "up")),
        ("/-", Command("rate", "down")),
        ("/undo", Command("undo")),
        ("/system You are\nbrief.", Command("system", "You are\nbrief.")),
        ("/q", Command("quit")),
        ("/?", Command("help")),
        ("/usr/bin is full", None),
        ("//undo", None),
        ("/ what?", None),
        ("hello /undo", None),
        ("", None),
    ],
)
def test_a_known_word_after_a_slash_is_a_command_anything_else_a_message(text, command):
    """A command is a slash and one known word; anything else is a message."""
    assert parse(text) == command


@pytest.mark.parametrize("text", ["/foo", "/undo now", "/quit please", "/6", "/0"])
def test_an_unknown_command_is_a_one_line_error(text):
    """A wrong command is an error of one line, never a message to the model."""
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_doubled_slash_sends_a_message_with_a_slash():
    """ "//undo" sends "/undo"."""
    assert message_text("//undo") == "/undo"
    assert message_text("1/2") == "1/2"


@pytest.mark.parametrize("code", ["// adds\nint a;", "//", "///", "//usr/bin is full", "//=====", "//etc?"])
def test_code_that_begins_with_two_slashes_stays_as_it_is(code):
    assert parse(code) is None and message_text(code) == code


@pytest.mark.parametrize(
    "message", ["/rate up", "/undo", "/foo\nbar", "// adds\nint a;", "/usr/bin", "Hello"]
)
def test_a_message_of_the_history_is_sent_again_as_a_message(message):
    typed = typed_text(message)
    assert parse(typed) is None and message_text(typed) == message


def test_a_rating_is_up_down_or_1_to_5_with_a_note():
    """up, down and 1 to 5, with a note after them."""
    assert parse_rating("up too  long ") == ("up", "too  long")
    assert parse_rating("5") == ("5", "")
    for wrong in ("", "6", "0", "great"):
        with pytest.raises(UsageError):
            parse_rating(wrong)


@pytest.mark.parametrize(
    "argument", ["up too long", "+ wrong tone: so stiff", "3 wrong facts", "5 too short"]
)
def test_a_reason_goes_with_a_bad_rating_alone(argument):
    """As on the command line, where --why goes with a bad rating."""
    with pytest.raises(UsageError, match='" goes with a bad rating: down, 1 or 2; got '):
        parse_rating(argument)
    assert parse_rating("2 too long") == ("2", "too long")
    assert parse_rating("up not too long") == ("up", "not too long")


def test_help_fits_a_small_terminal():
    """Every command has its line, and 80 columns hold it."""
    lines = help_lines()
    assert len(lines) == len(COMMANDS) - 1  # /prev shares a line
    assert max(map(len, lines)) <= 72


def test_the_palette_offers_every_command():
    """What can be typed with a slash can be chosen; only leaving and help have entries of Textual's own."""
    offered = {entry.command.name for entry in palette.entries()}
    assert offered == set(COMMANDS) - {"quit", "open"}
    for entry in palette.entries():
        parsed = parse(entry.types or f"/{entry.command.name} {entry.command.argument}")
        assert parsed is not None and parsed.name == entry.command.name


@pytest.mark.parametrize("name", COMMANDS)
def test_both_chats_have_every_command(name):
    """The plain mode takes the step; the app, too, or it has the action that the row names."""
    from ruvmlx.apps.chat.app import ChatApp

    row = COMMANDS[name]
    app = ChatApp(ScriptedRuntime)
    assert callable(row.step) and (not row.app or callable(app.actions.method(row.app)))


async def test_the_palette_runs_a_command_or_puts_it_into_the_input():
    """Ctrl+P, a few letters, Enter: a new chat; a command that wants words is put into the input."""
    runtime = ScriptedRuntime(["ok"])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot)
        first = app.chat.state.session
        await pilot.press("ctrl+p", *"new chat")
        await until(pilot, lambda: "/new" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.state.session != first)
        await pilot.press("ctrl+p", *"rename this")
        await until(pilot, lambda: "/title TEXT" in screen_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.prompt.text == "/title " and app.chat.prompt.has_focus)

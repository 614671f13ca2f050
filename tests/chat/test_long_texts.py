"""Texts that are longer than a row or higher than the screen: a message in the input, a notice."""

import pytest
from ruvmlx.apps.chat.commands import KEYS_HELP, help_lines
from ruvmlx.apps.chat.messages import Notice

from .helpers import ask, chatting, lines_of, screen_text, until
from .scripted import ScriptedRuntime
from .test_branches import chatting as branching  # noqa: F401

SECOND = "second " + "a" * 143  # this line takes two rows of the screen


@pytest.mark.parametrize(
    ("key", "column", "left"),
    [
        ("ctrl+u", 100, f"first line\n{SECOND[100:]}"),
        ("ctrl+u", 0, f"first line{SECOND}"),
        ("ctrl+k", 20, f"first line\n{SECOND[:20]}"),
    ],
)
async def test_a_key_deletes_to_the_end_of_the_line_and_not_of_the_row(key, column, left):
    async with chatting(ScriptedRuntime()) as (app, pilot):
        prompt = app.chat.prompt
        prompt.text = f"first line\n{SECOND}"
        prompt.move_cursor((1, column))
        await pilot.press(key)
        assert prompt.text == left


async def test_the_help_opens_at_its_beginning():
    """The help is higher than the screen. The next reply scrolls to the end again."""
    async with chatting(ScriptedRuntime(["Hello."], ["Again."])) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("f1")
        await until(pilot, lambda: list(app.chat.transcript.query(Notice)))
        notice = app.chat.transcript.query(Notice).last()
        first = str(notice.content).splitlines()[0][:30]
        await until(pilot, lambda: first in screen_text(app))
        assert notice.size.height > app.chat.transcript.size.height
        await pilot.pause(0.2)
        assert first in screen_text(app)
        await ask(app, pilot)
        assert "Again." in screen_text(app)


@pytest.mark.parametrize("columns", [21, 40, 80, 96])
async def test_no_wrapped_line_of_the_help_begins_at_the_left_edge(columns):
    """The further parts of a row stand below its text. A selection of the help is what the screen shows."""
    async with chatting(ScriptedRuntime(), (columns, 24)) as (app, pilot):
        await pilot.press("f1")
        await until(pilot, lambda: list(app.chat.transcript.query(Notice)))
        notice = app.chat.transcript.query(Notice).last()
        await until(pilot, lambda: notice.content_size.height > 30)
        notice.text_select_all()
        shown = app.screen.get_selected_text().splitlines()
        beginnings = {line.split("  ")[0] for line in help_lines(KEYS_HELP)}
        assert len(shown) == notice.content_size.height
        assert all(len(line) <= notice.content_size.width for line in shown)
        left = [line.split("  ")[0] for line in shown if line[:1] != " "]
        if columns > 30:
            assert set(left) == beginnings and len(left) == len(help_lines(KEYS_HELP))
        await pilot.resize_terminal(70, 24)
        await until(pilot, lambda: notice.content_size.width > 60)
        assert any(line.startswith(" " * 25) for line in lines_of(notice))


@pytest.mark.parametrize("back", [["f1"], ["ctrl+end"], ["pagedown"] * 9])
async def test_the_chat_stays_at_its_end_after_the_help(back):
    """The user reads the help, and then goes back to the end of the chat. The screen shows the end after a
    resize of the terminal. The screen also shows the end after the app adds a line to the chat."""
    async with chatting(ScriptedRuntime([f"word {n}\n\n" for n in range(40)])) as (app, pilot):
        await ask(app, pilot)
        transcript = app.chat.transcript
        await pilot.press("f1")
        await until(pilot, lambda: list(transcript.query(Notice)) and transcript.max_scroll_y > 60)
        await until(pilot, lambda: transcript.scroll_y < transcript.max_scroll_y)
        await pilot.pause(0.1)
        await pilot.press(*back)
        await until(pilot, lambda: transcript.is_vertical_scroll_end)
        for size in ((80, 12), (60, 30)):
            await pilot.resize_terminal(*size)
            await pilot.pause(0.1)
            await until(pilot, lambda size=size: app.size == size)
            await until(pilot, lambda: transcript.is_vertical_scroll_end, seconds=5)
        await transcript.mount(Notice("A line of a worker"))
        await until(pilot, lambda: "A line of a worker" in screen_text(app), seconds=5)


async def test_the_help_key_takes_the_help_away_again():
    """A help further up, before newer messages, is shown again at the end; there is only one."""
    async with chatting(ScriptedRuntime(["Hello."])) as (app, pilot):
        transcript = app.chat.transcript
        for count in (1, 0, 1):
            await pilot.press("f1")
            await until(pilot, lambda count=count: len(transcript.query(Notice)) == count)
        await ask(app, pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(transcript.children[-1], Notice))
        assert len(transcript.query(Notice)) == 1


async def test_the_help_opens_at_its_beginning_on_a_busy_machine(monkeypatch):
    """The first frames are drawn before the help has a height."""
    async with chatting(ScriptedRuntime(["Hello."])) as (app, pilot):
        await ask(app, pilot)
        transcript, now = app.chat.transcript, type(app.chat.transcript).call_after_refresh
        # on a busy machine, a frame that was due already ends before the layout of the help
        monkeypatch.setattr(
            transcript,
            "call_after_refresh",
            lambda *call: call[0](*call[1:]) if "beginning" in call[0].__name__ else now(transcript, *call),
        )
        await pilot.press("f1")
        await until(pilot, lambda: list(transcript.query(Notice)))
        first = str(transcript.query(Notice).last().content).splitlines()[0][:30]
        await until(pilot, lambda: first in screen_text(app))
        await pilot.pause(0.3)
        assert first in screen_text(app)


async def test_the_figures_below_the_input_are_not_those_of_another_branch(branching):  # noqa: F811
    async with branching() as (app, pilot):
        await ask(app, pilot, "Name a river.")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: app.phase == "idle" and app.chat.transcript.replies[-1].branch == (2, 2))
        assert "first word" in screen_text(app)
        app.chat.prompt.text = "/prev"
        await pilot.press("enter")
        await until(pilot, lambda: app.chat.transcript.replies[-1].branch == (1, 2))
        await until(pilot, lambda: "first word" not in screen_text(app))

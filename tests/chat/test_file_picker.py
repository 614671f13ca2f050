"""The picker of files for a message (F6)."""

import os

from ruvmlx.apps.chat import file_list
from ruvmlx.apps.chat.file_list import entries, mention
from ruvmlx.apps.chat.file_screen import FileScreen
from ruvmlx.apps.chat.user_files import UserFiles

from .helpers import SMALL, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


def make_files(folder):
    for name, text in {"a.py": "x" * 400, "notes/my list.md": "one two", "b.txt": "b"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "paper.pdf").write_bytes(b"%PDF\0" + b"x" * 2000)
    (folder / "empty.txt").write_text("")
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / 'quo"te.txt').write_text("no")


def test_texts_and_pdfs_are_listed_with_their_sizes(tmp_path, monkeypatch):
    make_files(tmp_path)
    found = {entry.name: entry.facts for entry in entries(UserFiles(tmp_path))}
    assert found == {
        "a.py": "about 100 tokens",
        "b.txt": "about 1 token",
        "paper.pdf": "2.0 kB",
        "notes/my list.md": "about 2 tokens",
    }
    monkeypatch.setattr(file_list, "MAX_FILE_BYTES", 100)
    [too_long] = [entry for entry in entries(UserFiles(tmp_path)) if entry.problem]
    assert too_long.name == "a.py"
    monkeypatch.setattr(file_list, "MOST_FILES", 2)
    assert len(entries(UserFiles(tmp_path))) == 2


def test_what_cannot_be_read_is_left_out(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert entries(UserFiles(tmp_path)) == []


def test_a_name_with_a_space_is_quoted():
    assert (mention("a.py"), mention("my list.md")) == ("@a.py", '@"my list.md"')


async def test_several_files_are_put_into_the_message(tmp_path):
    make_files(tmp_path)
    runtime = ScriptedRuntime(["Fine."])
    async with chatting(runtime, SMALL, files=UserFiles(tmp_path)) as (app, pilot):
        await pilot.press(*"Read @")
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, FileScreen) and app.screen._entries)
        assert "about 100 tokens" in screen_text(app) and "Mark several" in screen_text(app)
        await pilot.press("tab")  # a.py
        assert "● a.py" in screen_text(app)
        await pilot.press(*"list")
        await pilot.pause()
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, FileScreen))
        assert app.chat.prompt.text == 'Read @a.py @"notes/my list.md" '
        await ask(app, pilot, app.chat.prompt.text)
        assert "one two" in runtime.said[0] and "x" * 400 in runtime.said[0]


async def test_the_picked_file_takes_the_place_of_a_begun_name_in_quotes(tmp_path):
    """Tab opens the quotes for a folder whose name has a space."""
    (tmp_path / "my notes").mkdir()
    (tmp_path / "my notes" / "one.md").write_text("one two")
    runtime = ScriptedRuntime(["Fine."])
    async with chatting(runtime, SMALL, files=UserFiles(tmp_path)) as (app, pilot):
        await pilot.press(*"Read @my", "tab", "f6")
        await until(pilot, lambda: isinstance(app.screen, FileScreen) and app.screen._entries)
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, FileScreen))
        assert app.chat.prompt.text == 'Read @"my notes/one.md" '


async def test_a_letter_with_an_accent_finds_both_forms_of_it(tmp_path):
    """Programs of macOS write "ü" into a file's name as two characters, a keyboard types one."""
    (tmp_path / "u\u0308ber.md").write_text("x")
    async with chatting(ScriptedRuntime(), SMALL, files=UserFiles(tmp_path)) as (app, pilot):
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, FileScreen) and app.screen._entries)
        await pilot.press("\u00fc")
        await until(pilot, lambda: app.screen._words == "\u00fc")
        await pilot.press("enter")
        await until(pilot, lambda: not isinstance(app.screen, FileScreen))
        assert app.chat.prompt.text == "@u\u0308ber.md "


async def test_a_mark_is_taken_away_and_nothing_is_chosen(tmp_path):
    make_files(tmp_path)
    async with chatting(ScriptedRuntime(), SMALL, files=UserFiles(tmp_path)) as (app, pilot):
        await pilot.press(*"Hi", "f6")
        await until(pilot, lambda: isinstance(app.screen, FileScreen) and app.screen._entries)
        await pilot.press("tab", "tab")
        assert app.screen._marked == []
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, FileScreen))
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, FileScreen) and app.screen._entries)
        await pilot.press("down", "enter")
        await until(pilot, lambda: not isinstance(app.screen, FileScreen))
        assert app.chat.prompt.text == "Hi @b.txt "


async def test_not_on_a_server_of_another_machine():
    async with chatting(ScriptedRuntime(), SMALL, files=UserFiles(None)) as (app, pilot):
        await pilot.press("f6")
        await until(pilot, lambda: "server's machine" in screen_text(app))

"""Tab completes commands, their words and files; Ctrl+E opens the user's editor on the draft."""

import contextlib
import sys
from pathlib import Path

import pytest
from ruvmlx.apps.chat import editor, prompt
from ruvmlx.apps.chat.completion import suggestions
from ruvmlx.apps.chat.user_files import HERE, UserFiles
from textual.events import Key

from ruvmlx.errors import UsageError

from .helpers import WIDE, ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my notes").mkdir()
    for name in ("sort.py", "sorted.txt", ".hidden", "my notes/a.md"):
        (tmp_path / name).write_text("x")
    return tmp_path


def texts(typed, first=True, files=HERE):
    return [row.text for row in suggestions(typed, first, files)]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("/resto", ["/restore"]),
        ("/re", ["/rewrite", "/restore"]),
        ("/set top_", ["top_p", "top_k"]),
        ("/why ", ["long", "short", "tone", "facts"]),
        ("/rate u", ["up"]),
        ("see @so", ["sort.py", "sorted.txt"]),
        ("see @my", ['"my notes/']),
        ('see @"my notes/', ['"my notes/a.md"']),
        ("see @.h", [".hidden"]),
        ("see @sort.py", []),
        ("see @~nosuchuser/x", []),
        ("me@so", []),
        ("see @so it goes", []),
        ("/nothing", []),
        ("a /re", []),
    ],
)
def test_what_may_come_next(folder, typed, found):
    assert texts(typed) == found


def test_a_letter_with_an_accent_finds_both_forms_of_it(folder):
    """Programs of macOS write "ü" into a file's name as two characters, a keyboard types one."""
    (folder / "u\u0308ber.md").write_text("x")
    assert texts("see @\u00fcb") == texts("see @u\u0308b") == ["u\u0308ber.md"]


def test_commands_begin_a_message_and_another_machines_files_are_out_of_reach(folder):
    assert texts("/re", first=False) == [] and texts("@so", files=UserFiles(None)) == []
    assert texts("@so", first=False) == ["sort.py", "sorted.txt"]


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300])
def test_a_name_that_is_no_path_is_no_file(name):
    assert not HERE.has(name) and HERE.model(name) == name


async def test_tab_goes_through_the_commands_and_the_list_says_what_they_do():
    async with chatting(ScriptedRuntime()) as (app, pilot):
        prompt = app.chat.prompt
        await pilot.press(*"/re")
        await until(pilot, lambda: "rewrite the reply; it learns from that" in screen_text(app))
        for expected in ("/rewrite", "/restore", "/rewrite"):
            await pilot.press("tab")
            await until(pilot, lambda wanted=expected: prompt.text == wanted)
        assert "bring the deleted chat back" in screen_text(app)
        await pilot.press(*" x", *["backspace"] * 10)
        await until(pilot, lambda: not prompt.text and not app.chat.suggestions.display)


async def test_tab_completes_a_command_a_setting_and_a_file(folder):
    """A space follows where words follow; a name with a space gets quotes."""
    async with chatting(ScriptedRuntime()) as (app, pilot):
        prompt = app.chat.prompt
        await pilot.press(*"/se", "tab")
        await until(pilot, lambda: prompt.text == "/set ")
        await pilot.press(*"temp")
        await until(pilot, lambda: len(app.chat.suggestions.rows) == 1)
        await pilot.press("tab")
        await until(pilot, lambda: prompt.text == "/set temperature ")
        prompt.text = ""
        await pilot.press(*"see @my")
        await until(pilot, lambda: app.chat.suggestions.rows)
        await pilot.press("tab")
        await until(pilot, lambda: prompt.text == 'see @"my notes/' and "a.md" in screen_text(app))
        await pilot.press("tab")
        await until(pilot, lambda: prompt.text == 'see @"my notes/a.md" ')


async def test_tab_still_chooses_a_reply_where_nothing_is_suggested():
    async with chatting(ScriptedRuntime(["Hi."])) as (app, pilot):
        reply = await ask(app, pilot)
        await pilot.press(*"Hello", "tab")
        await until(pilot, lambda: app.focused is reply)
        assert app.chat.prompt.text == "Hello"


async def test_what_is_typed_right_after_tab_stands_after_the_name(folder):
    """Keys that come at once, as from a fast typist on a busy machine."""
    async with chatting(ScriptedRuntime(["Hi."])) as (app, pilot):
        await ask(app, pilot)
        for typed in "@sort.\twhat?":
            app.post_message(Key("tab" if typed == "\t" else typed, typed))
        await until(pilot, lambda: app.chat.prompt.text.endswith("?"))
        assert app.chat.prompt.text == "@sort.py what?" and app.focused is app.chat.prompt


@pytest.mark.parametrize("size", [(80, 24), (40, 12)], ids=str)
async def test_the_list_leaves_room_for_the_conversation(size):
    async with chatting(ScriptedRuntime(["Hi."]), size) as (app, pilot):
        await ask(app, pilot)
        await pilot.press("/")
        await until(pilot, lambda: "Tab takes the next" in screen_text(app))
        assert app.chat.suggestions.size.height <= 7 and app.chat.prompt.region.bottom <= size[1] - 2


# -- the editor ------------------------------------------------------------------------------------------


def script(folder: Path, body: str) -> str:
    file = folder / "editor.py"
    file.write_text(f"import sys\nfrom pathlib import Path\nfile = Path(sys.argv[-1])\n{body}\n")
    return f"'{sys.executable}' {file}"


@pytest.fixture
def ignore_suspend(monkeypatch):
    """The app of the tests has no terminal to leave."""
    monkeypatch.setattr("ruvmlx.apps.chat.app.ChatApp.suspend", lambda _: contextlib.nullcontext())


@pytest.mark.parametrize("name", ["VISUAL", "EDITOR"])
async def test_ctrl_e_edits_the_draft_in_the_users_editor(tmp_path, monkeypatch, ignore_suspend, name):
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv(name, script(tmp_path, "file.write_text(file.read_text() + ' more\\n\\x1b]2;x\\x07')"))
    async with chatting(ScriptedRuntime()) as (app, pilot):
        await pilot.press(*"One", "ctrl+e")
        await until(pilot, lambda: app.chat.prompt.text != "One")
        assert app.chat.prompt.text.strip() == "One more" and "\x1b" not in app.chat.prompt.text


@pytest.mark.parametrize(
    ("body", "said"), [("sys.exit(1)", "ended with an error"), (None, "there is no editor 'no-such-editor'")]
)
async def test_an_editor_that_fails_leaves_the_draft(tmp_path, monkeypatch, ignore_suspend, body, said):
    monkeypatch.setenv("VISUAL", script(tmp_path, body) if body else "no-such-editor -w")
    async with chatting(ScriptedRuntime()) as (app, pilot):
        await pilot.press(*"One", "ctrl+e")
        await until(pilot, lambda: said in screen_text(app))
        assert app.chat.prompt.text == "One"


async def test_a_terminal_that_cannot_be_lent_says_so(monkeypatch, tmp_path):
    """A chat on a server: its terminal is another process's."""
    monkeypatch.setenv("VISUAL", script(tmp_path, ""))
    async with chatting(ScriptedRuntime()) as (app, pilot):
        await pilot.press("ctrl+e")
        await until(pilot, lambda: "needs a terminal of its own" in screen_text(app))


def test_a_wrong_command_line_is_one_line(monkeypatch):
    monkeypatch.setenv("VISUAL", "vi 'open")
    with pytest.raises(UsageError, match="cannot be read"):
        editor.command()


async def test_a_text_of_the_editor_that_is_too_long_is_cut_with_a_word(
    tmp_path, monkeypatch, ignore_suspend
):
    monkeypatch.setattr(prompt, "MAX_MESSAGE_CHARACTERS", 10)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", script(tmp_path, "file.write_text('0123456789ABC')"))
    async with chatting(ScriptedRuntime(), WIDE) as (app, pilot):
        await pilot.press("ctrl+e")
        await until(pilot, lambda: app.chat.prompt.text == "0123456789")
        assert "the rest was left out" in screen_text(app)

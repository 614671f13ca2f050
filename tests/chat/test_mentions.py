"""`@path` puts a file's text into a message, in the app and in plain mode."""

import io
import os
import signal
from pathlib import Path

import pytest
from ruvmlx.apps.chat import mentions
from ruvmlx.apps.chat.mentions import MAX_FILE_BYTES, as_shown, has_mention, with_files, without_files
from ruvmlx.apps.chat.messages import UserMessage
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.user_files import HERE, UserFiles

from ruvmlx.errors import Interrupted, UsageError

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sort.py").write_text("def sort(items):\n    return items\n")
    Path("my notes.md").write_text("A list:\n\n```\ncode\n`````\nmore\n")
    return tmp_path


def put(text, files=HERE):
    return with_files(text, files, lambda body: len(body.split()))


def test_the_files_stand_below_the_message_and_can_be_taken_off_again():
    found = put('What do @sort.py and @"my notes.md" do?')
    assert found.text.startswith('What do @sort.py and @"my notes.md" do?\n\n````file sort.py\ndef sort')
    typed, files = without_files(found.text)
    assert typed == 'What do @sort.py and @"my notes.md" do?'
    assert [(file.name, file.text) for file in files] == [
        ("sort.py", "def sort(items):\n    return items"),
        ("my notes.md", "A list:\n\n```\ncode\n`````\nmore"),
    ]
    assert as_shown(found.text).splitlines()[1:] == ["▸ sort.py, 2 lines", "▸ my notes.md, 6 lines"]
    assert found.notes == ("sort.py: 4 tokens", "my notes.md: 6 tokens")


@pytest.mark.parametrize(
    ("typed", "note"),
    [
        ("see @sort.py, please", "sort.py: 4 tokens"),
        ("(see @sort.py).", "sort.py: 4 tokens"),
        ("@sort.py and @sort.py", "sort.py: 4 tokens"),
        ("ask @mary about it", "@mary matches no file; it is sent as text."),
        ("@~nobody-here/x", "@~nobody-here/x matches no file; it is sent as text."),
        ("@" + "x" * 5000, "@" + "x" * 5000 + " matches no file; it is sent as text."),
        ("what is in @. now", "@. matches no file; it is sent as text."),
    ],
)
def test_a_name_is_found_before_punctuation_and_a_wrong_one_is_told_once(typed, note):
    found = put(typed)
    assert found.notes == (note,) and found.text.startswith(typed)
    assert (found.text == typed) is ("no file" in note)


@pytest.mark.parametrize("before", ["", "/"])
def test_a_dropped_file_is_found_without_the_backslashes_of_the_terminal(folder, before):
    """The Terminal of macOS puts a backslash before each space and parenthesis of a dropped file's name."""
    Path("my list (2).md").write_text("one two")
    place = f"{folder}/" if before else ""
    found = put(rf"Sum @{place}my\ list\ \(2\).md up")
    assert found.notes == (f"{place}my list (2).md: 2 tokens",) and "````file" in found.text
    assert HERE.of_command(rf"{place}my\ notes.md").read_text().startswith("A list")


def test_a_backslash_that_is_in_a_files_name_stays():
    Path(r"a\ b").write_text("one")
    Path("a b").write_text("one two")
    assert put(r"@a\ b").notes == (r"a\ b: 1 token",)
    assert put(r"@c\ d").notes == (r"@c\ d matches no file; it is sent as text.",)


@pytest.mark.parametrize("quote", ['"', "'"])
def test_a_file_name_in_quotes_is_the_name_between_them(folder, quote):
    """Terminals of Linux put quotes around a dropped file's name."""
    assert HERE.of_command(f"{quote}my notes.md{quote}").read_text().startswith("A list")
    assert HERE.of_command(f"{quote}a new file.md{quote}").name == "a new file.md"
    assert HERE.model(f"{quote}{folder}/my notes.md{quote}") == f"{folder}/my notes.md"
    assert HERE.of_command("'it'\\''s here.md'").name == "it's here.md"  # as a shell writes it
    assert HERE.of_command(f"{quote}half").name == f"{quote}half"
    Path(f"{quote}b{quote}").write_text("one two")
    assert HERE.of_command(f"{quote}b{quote}").name == f"{quote}b{quote}"


def test_an_address_is_no_mention():
    assert not has_mention("write to mary@sort.py or me @ home")


def test_an_empty_file_and_a_message_that_only_looks_like_one_keep_their_words():
    Path("empty").write_text("")
    typed, (file,) = without_files(put("see @empty").text)
    assert (typed, file.text) == ("see @empty", "")
    for text in ("a\n\n````file x\nb\n````\n\nc", "a\n\n````file x\nb", "plain"):
        assert without_files(text) == (text, []) and as_shown(text) == text


def test_control_characters_of_a_file_do_not_reach_the_model_or_the_terminal():
    Path("odd.txt").write_text("a\x1b]52;c;eA==\x07b\x00")
    assert "\x1b" not in put("@odd.txt").text and "\x00" not in put("@odd.txt").text


@pytest.mark.parametrize(
    ("data", "why"), [(b"\xff\xfe\x00", "is no text"), (b"a" * (MAX_FILE_BYTES + 1), "too long to read")]
)
def test_a_file_that_cannot_be_read_as_text_is_refused(data, why):
    Path("data.bin").write_bytes(data)
    with pytest.raises(UsageError, match=why):
        put("@data.bin")


def test_on_another_machine_no_file_is_read(folder):
    assert (
        put(f"@{folder}/sort.py", UserFiles(None)).notes[0].endswith("matches no file; it is sent as text.")
    )


# -- both modes --------------------------------------------------------------------------------------------


def test_plain_mode_sends_the_text_and_tells_the_size(open_tiny, capsys):
    sink = io.StringIO()
    with open_tiny() as runtime:
        lines = io.StringIO("What is @sort.py and @nope?\n/edit\n")
        code = PlainChat(runtime, ChatOptions(max_new_tokens=4), lines, sink).run()
        sent = runtime.store.replies.get("last").prompt
        size = runtime.chats.count_tokens("def sort(items):\n    return items")
        title = runtime.store.chats.all()[0].title
    assert code == 0 and "return items\n````" in sent and title.startswith("What is @sort.py and @nope?")
    assert capsys.readouterr().err.splitlines() == [
        f"sort.py: {size} tokens", "@nope matches no file; it is sent as text."
    ]  # fmt: skip
    assert "Your question: What is @sort.py and @nope?\n▸ sort.py, 2 lines" in sink.getvalue()


async def test_the_app_shows_a_line_for_the_file_and_edits_what_was_typed():
    runtime = ScriptedRuntime(["It sorts."], ["Again."])
    async with chatting(runtime) as (app, pilot):
        await ask(app, pilot, "What is @sort.py and @nope?")
        assert runtime.said[-1].endswith("return items\n````")
        screen = screen_text(app)
        assert "▸ sort.py, 2 lines" in screen and "def sort" not in screen
        assert "sort.py: 4 tokens" in screen and "@nope matches no file" in screen
        await pilot.press("tab", "e")
        await until(pilot, lambda: app.chat.prompt.text == "What is @sort.py and @nope?")


async def test_a_refused_file_leaves_the_message_in_the_input():
    Path("data.bin").write_bytes(b"\xff\xfe")
    runtime = ScriptedRuntime()
    async with chatting(runtime) as (app, pilot):
        app.chat.prompt.text = "What is @data.bin?"
        await pilot.press("enter")
        await until(pilot, lambda: "is no text" in screen_text(app))
        assert app.chat.prompt.text == "What is @data.bin?" and runtime.said == []
        assert not app.query(UserMessage)


async def test_earlier_messages_come_back_as_they_were_typed():
    """The history of another start has what was typed, without the files."""
    runtime = ScriptedRuntime()
    session = runtime.new_chat()
    list(runtime.say(session, put("About @sort.py").text, sampling=None, max_new_tokens=4, cancel=Never()))
    async with chatting(runtime) as (app, pilot):
        await pilot.press("up")
        assert app.chat.prompt.text == "About @sort.py"


class Never:
    def is_set(self):
        return False


@pytest.mark.parametrize("stops", [True, False], ids=["stopped", "read to its end"])
def test_ctrl_c_while_a_file_is_read_sends_nothing_and_the_plain_chat_goes_on(monkeypatch, capsys, stops):
    """A long PDF takes seconds. Only at the prompt does Ctrl-C end the chat."""

    def read(path, name):
        os.kill(os.getpid(), signal.SIGINT)
        if stops:
            raise Interrupted("ruvmlx was stopped before the file was read.")
        return "text"

    monkeypatch.setattr(mentions, "pdf_text", read)
    Path("long.pdf").write_bytes(b"%PDF")
    runtime, sink = ScriptedRuntime(["Fine."]), io.StringIO()
    PlainChat(runtime, ChatOptions(), io.StringIO("Read @long.pdf\nHello\n"), sink).run()
    assert sink.getvalue() == "Assistant: Fine.\n" and runtime.said == ["Hello"]
    assert "stopped" in capsys.readouterr().err

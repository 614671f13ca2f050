"""Copied text goes through the system's tool; over SSH through the terminal."""

import os
import stat
import sys

import pytest
from ruvmlx.apps.chat import clipboard
from ruvmlx.apps.chat.code import code_blocks

from ruvmlx.errors import RuvmlxError
from ruvmlx.runtime import Turn

from .helpers import ask, chatting, screen_text, until
from .scripted import ScriptedRuntime

CODE = "See:\n\n```python\nprint('a')\n```\n\n> ~~~\n> two\n> ~~~\n\n- x\n\n      three\n\ndone"


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH that holds only fake clipboard tools, which write their input to files."""

    def make(name, script="cat > $0.got"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return tmp_path / f"{name}.got"

    monkeypatch.setattr(os, "environ", {"PATH": str(tmp_path)})
    monkeypatch.setattr(clipboard.tool, "__defaults__", (os.environ, sys.platform))
    return make


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({}, "darwin", "pbcopy"),
        ({"WAYLAND_DISPLAY": "w", "DISPLAY": ":0"}, "linux", "wl-copy"),
        ({"DISPLAY": ":0"}, "linux", "xclip"),
        ({"WSL_DISTRO_NAME": "d"}, "linux", "clip.exe"),
        ({}, "linux", None),
        ({"SSH_TTY": "t", "DISPLAY": ":0"}, "linux", None),
        ({"SSH_CONNECTION": "c"}, "darwin", None),
    ],
)
def test_the_tool_of_the_platform_is_chosen(tools, environment, platform, expected):
    for name in ("pbcopy", "wl-copy", "xclip", "xsel", "clip.exe"):
        tools(name)
    found = clipboard.tool(environment | os.environ, platform)
    assert (found and found[0]) == expected


def test_a_tool_that_is_not_installed_is_not_chosen(tools):
    tools("xsel")
    assert clipboard.tool({"DISPLAY": ":0"} | os.environ, "linux")[0] == "xsel"


def test_text_reaches_the_tool(tools):
    got = tools("xclip")
    os.environ["DISPLAY"] = ":0"
    assert clipboard.copy_with_tool("日本\n`x`") and got.read_text() == "日本\n`x`"


def test_pbcopy_reads_the_text_as_utf_8(tools, monkeypatch):
    """By the manual of pbcopy, the locale gives the encoding. Without a locale, the encoding is not UTF-8."""
    got = tools("pbcopy", 'cat > $0.got; echo "$LC_ALL" >> $0.got')
    os.environ["LC_ALL"] = "C"
    monkeypatch.setattr(clipboard.tool, "__defaults__", (os.environ, "darwin"))
    assert clipboard.copy_with_tool("é\n") and got.read_text() == "é\nen_US.UTF-8\n"


@pytest.mark.parametrize("script", ["exit 1", "sleep 9"])
def test_a_tool_that_fails_or_hangs_falls_back_to_the_terminal(tools, monkeypatch, script):
    """The terminal is asked then; where there is none either, one line says so."""
    monkeypatch.setattr(clipboard, "SECONDS", 0.3)
    tools("xclip", script)
    os.environ["DISPLAY"] = ":0"
    assert not clipboard.copy_with_tool("x")
    with pytest.raises(RuvmlxError, match="no clipboard"):
        clipboard.copy("x")


def test_code_blocks_of_a_reply_are_found():
    assert code_blocks(CODE) == ["print('a')", "two", "three"]
    assert code_blocks("none `here`") == []
    assert code_blocks("```\nnot closed") == ["not closed"]


async def test_copy_takes_the_whole_reply_or_one_code_block(monkeypatch):
    """/copy takes all of it, /copy N and `c` a block; what was copied is told to the runtime."""
    copied = []
    monkeypatch.setattr(clipboard, "copy_with_tool", lambda text: copied.append(text) or True)
    runtime = ScriptedRuntime([CODE], ["No code."])
    async with chatting(runtime) as (app, pilot):

        async def send(text, answer):
            app.chat.prompt.text = text
            await pilot.press("enter")
            await until(pilot, lambda: answer in screen_text(app))

        await send("/copy", "no reply to copy yet")
        reply = await ask(app, pilot)
        await send("/copy", "Copied")
        await send("/copy 2", "Copied code block 2 of 3")
        await send("/copy 4", "give a number from 1 to 3")
        await pilot.press("tab", "c", "c")
        await until(pilot, lambda: "Copied code block 2 of 3" in screen_text(app))
        await pilot.press("y")
        await until(pilot, lambda: len(copied) == 5)
        assert copied == [CODE, "two", "print('a')", "two", CODE]
        assert set(runtime.noticed) == {(reply.reply_id, "copied")}
        await pilot.press("escape")
        await ask(app, pilot)
        await pilot.press("tab", "c")
        await until(pilot, lambda: app.chat.prompt.text == "c")  # the reply has no code: the letter is typed


async def test_an_imported_reply_can_be_copied():
    """It has no id of a reply, so it cannot be rated."""
    runtime, copied = ScriptedRuntime(), []
    runtime.spoken["imported"] = [Turn("user", "Hi", id=1), Turn("assistant", CODE, id=2)]
    options = {"session": "imported", "copies": lambda text: not copied.append(text)}
    async with chatting(runtime, **options) as (app, pilot):
        for typed in ("/copy", "/copy 2"):
            app.chat.prompt.text = typed
            await pilot.press("enter")
        await until(pilot, lambda: copied == [CODE, "two"], seconds=5)

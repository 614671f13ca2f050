"""Every slash command of the table works in both modes, the app and plain mode."""

import io
import re
import threading

import pytest
from ruvmlx.apps.chat import commands
from ruvmlx.apps.chat.app import ChatApp
from ruvmlx.apps.chat.compare_screen import CompareScreen
from ruvmlx.apps.chat.messages import Notice
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat

from ruvmlx.engine import Sampling

from .helpers import ask, until

# What is typed for a command that needs something after it; the others are typed as they are.
ARGUMENTS = {
    "rate": "up a note",
    "rollback": "0",
    "edit": "Say it differently?",
    "compare": "A question",
    "effect": "A question",
    "choose": "1",
    "copy": "",
    "chats": "hello",
    "open": "1",
    "title": "Another title",
    "export": "chat.json",
    "import": "earlier.json",
    "system": "Be brief.",
    "adapter": "none",
    "best": "3",
    "set": "temperature 0.5",
    "find": "hello",
    "goto": "1",
    "folder": "Work",
    "summarize": "off",
    "explain": "adapter",
    "rewrite": "My own words.",
    "why": "long",
    "as": "reviewer",
}
BEFORE = {"why": ["/down"], "next": ["/again"], "prev": ["/again"], "undo": ["/up"], "restore": ["/delete"]}
BEFORE |= {"choose": ["/compare A question"], "compare": [], "import": ["/export earlier.json"]}
NAMES = sorted(set(commands.COMMANDS) - {"save", "tool"})  # test_set_save_find.py, test_tools.py


def typed_lines(name):
    return [*BEFORE.get(name, []), f"/{name} {ARGUMENTS.get(name, '')}".strip()]


@pytest.fixture
def there(tmp_path, monkeypatch, open_tiny):
    """A folder for files, no clipboard, and a store with a rating, so that a comparison is possible."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ruvmlx.apps.chat.clipboard.copy", lambda text: None)
    monkeypatch.setattr("ruvmlx.apps.chat.clipboard.copy_with_tool", lambda text: True)
    with open_tiny() as runtime:
        say(runtime, runtime.chats.new_chat())
        runtime.rate("last", "down")


def say(runtime, chat):
    """Write one reply. The same seed leads to the same rating, and so to the same replies of /compare."""
    how = {"sampling": Sampling(1.5, seed=3), "max_new_tokens": 4, "cancel": threading.Event()}
    for _ in runtime.chats.say(chat, "Hello", **how):
        pass


@pytest.mark.parametrize("name", NAMES)
def test_every_command_works_in_plain_mode(name, open_tiny, there, capsys):
    """It is obeyed, and answered in words: no error, no control character, nothing that moves."""
    lines, sink = ["Hello", *typed_lines(name)], io.StringIO()
    options = ChatOptions(sampling=Sampling(1.5, seed=1), max_new_tokens=4)
    with open_tiny() as runtime:
        code = PlainChat(runtime, options, io.StringIO("\n".join(lines) + "\n"), sink).run()
    said = sink.getvalue()
    assert code == 0 and capsys.readouterr().err == ""
    assert said.startswith("Assistant: ") and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", said)
    assert name == "quit" or said.count("\n") >= 2  # the reply, and what the command says


@pytest.mark.parametrize("name", NAMES)
async def test_every_command_works_in_the_app(name, open_tiny, there):
    """It is obeyed: no error is shown, and the app goes on (or leaves)."""
    app = ChatApp(
        open_tiny, ChatOptions(sampling=Sampling(1.5, seed=1), max_new_tokens=4, learn_when_idle=False)
    )
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.phase == "idle" or app.failure)
        await ask(app, pilot)
        for line in typed_lines(name):
            await type_in(app, pilot, line)
        errors = [str(notice.render()) for notice in app.query(Notice) if notice.has_class("error")]
        assert errors == [] and app.failure is None
        app.host.close_now()


async def type_in(app, pilot, line):
    """Enter a command, wait for its work, and close the screen that it opened."""
    app.chat.prompt.text = line
    await pilot.press("enter")
    await pilot.pause()
    await until(pilot, lambda: not app.is_running or rests(app))
    while app.is_running and len(app.screen_stack) > 1:
        await pilot.press("escape")
        await pilot.pause()
    await until(pilot, lambda: not app.is_running or rests(app))


def rests(app):
    """Is all work done, or does the app wait for a choice?"""
    if isinstance(app.screen, CompareScreen):
        return not app.screen._busy
    # what goes on with the panel, and what waits for idle time
    busy = [w for w in app.workers if not w.is_finished and w.group not in ("sense", "idle")]
    return len(app.screen_stack) > 1 or not busy

"""/set, /save and /find, in plain mode on the tiny model."""

import io
import re
import threading

import pytest
from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.state import ChatState
from ruvmlx.apps.chat.steps import write

from ruvmlx.errors import NotFound, UsageError

from .scripted import ScriptedRuntime

CODE = "First:\n\n```python\nprint(1)\n```\n\nThen:\n\n```sh\nls\n```\n"


def run_plain(runtime, *lines):
    sink = io.StringIO()
    chat = PlainChat(
        runtime, ChatOptions(max_new_tokens=4), io.StringIO("".join(f"{x}\n" for x in lines)), sink
    )
    chat.run()
    return sink.getvalue(), chat._state


def test_a_setting_changes_this_chats_replies_alone(open_tiny):
    """The next reply is drawn with it; the settings file is as before."""
    with open_tiny() as runtime:
        before = runtime.writer.sampling()
        said, state = run_plain(runtime, "/set temperature 0.25", "/set max_tokens 3", "Hello", "/status")
        assert state.options.sampling.temperature == 0.25 and state.options.max_new_tokens == 3
        assert len(re.findall(r"temperature +0\.25", said)) == 3 and re.search(r"max_tokens +3", said)
        reply = runtime.store.replies.get("last")
        assert len(reply.sampled_ids) == 3 and runtime.writer.sampling() == before


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("/set temprature 1", "Did you mean 'temperature'?"),
        ("/set temperature", "needs a value"),
        ("/set temperature -1", "temperature"),
        ("/set top_p 2", "expected over 0 and at most 1"),
        ("/set adapter x", "`ruvmlx config set`"),
    ],
)
def test_a_wrong_setting_is_refused_and_changes_nothing(typed, said, open_tiny, capsys):
    with open_tiny() as runtime:
        _, state = run_plain(runtime, typed)
        assert said in capsys.readouterr().err and state.options.sampling is None


@pytest.fixture
def replied_chat(tmp_path, monkeypatch):
    """A chat whose last reply has two code blocks."""
    monkeypatch.chdir(tmp_path)
    runtime, state = ScriptedRuntime([CODE]), ChatState(ChatOptions())
    state.session = runtime.chats.new_chat()
    list(runtime.chats.say(state.session, "Sort?", **state.options.for_reply(threading.Event())))
    return runtime, state


@pytest.mark.parametrize(
    ("argument", "text"),
    [("2 b.sh", "ls\n"), ("1 a.py", "print(1)\n"), ("a.py", "print(1)\n"), ("3d.py", "print(1)\n")],
)
def test_a_code_block_is_written_to_a_new_file(argument, text, replied_chat, tmp_path):
    assert "Written: " in write.save(*replied_chat, argument).words
    assert (tmp_path / argument.split()[-1]).read_text() == text
    with pytest.raises(UsageError, match="exists already"):
        write.save(*replied_chat, argument)


@pytest.mark.parametrize("argument", ["", "3 c.sh", "1", "2 ", "0000000012 c.sh"])
def test_a_block_or_a_name_that_is_not_there_is_refused(argument, replied_chat, tmp_path):
    with pytest.raises((UsageError, NotFound)):
        write.save(*replied_chat, argument)
    assert not list(tmp_path.iterdir())


def test_find_lists_the_messages_of_this_chat(replied_chat):
    assert write.find(*replied_chat, "sort").words.startswith("1. You: Sort?")
    assert "2. Assistant: " in write.find(*replied_chat, "PRINT then").words
    assert "No message of this chat" in write.find(*replied_chat, "zebra").words
    with pytest.raises(UsageError):
        write.find(*replied_chat, " ")


def test_find_lists_the_newest_and_counts_the_others(replied_chat):
    runtime, state = replied_chat
    for _ in range(write.MOST_FOUND + 5):
        list(runtime.chats.say(state.session, "zebra", **state.options.for_reply(threading.Event())))
    lines = write.find(runtime, state, "zebra").words.splitlines()
    assert lines[0].startswith("25 messages have these words") and len(lines) == write.MOST_FOUND + 2
    assert lines[1].startswith("13. You") and lines[-2].startswith("51. You")


def test_a_setting_holds_in_its_own_chat(open_tiny):
    """/new begins with the user's settings, a copy has the chat's, and the chat has its own again."""
    with open_tiny() as runtime:
        before = runtime.writer.sampling().temperature
        source = [
            "Hello",
            "/set temperature 0.25",
            "/fork",
            "/set",
            "/new",
            "/set",
            "Hi",
            "/chats",
            "/open 3",
        ]
        said, state = run_plain(runtime, *source, "/set")
        found = re.findall(r"temperature +([0-9.]+)", said)
        assert found == ["0.25", "0.25", str(before), "0.25"]
        assert state.options.sampling.temperature == 0.25

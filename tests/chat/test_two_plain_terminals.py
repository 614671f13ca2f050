"""Two terminals continue one chat, and one of them runs plain mode."""

import io
from contextlib import closing

from ruvmlx.apps.chat.options import ChatOptions
from ruvmlx.apps.chat.plain import PlainChat
from ruvmlx.apps.chat.steps.write import GONE

from ruvmlx.runtime import Runtime
from ruvmlx.settings import Settings
from ruvmlx.store import Store

from .test_two_terminals import path_of


class Lines(io.StringIO):
    """The lines of a user. Before the second line and later ones, another terminal adds a question."""

    def __init__(self, home, *lines):
        super().__init__()
        self.home, self.left, self.chat = home, list(lines), ""
        self.is_first = True

    def readline(self, *_):
        if self.left and not self.is_first:
            with closing(Store(self.home / "ruvmlx.db")) as store:
                self.chat = store.chats.all()[0].id
                asked = store.messages.add_user(self.chat, "Tell me of a rose.")
                store.messages.append(self.chat, "assistant", "A rose.", None, 0.0, asked)
        self.is_first = False
        return self.left.pop(0) + "\n" if self.left else ""


def test_a_message_and_a_command_follow_what_the_terminal_printed(home, tiny_folder):
    source, sink = Lines(home, "Name a river.", "And now?", "/edit"), io.StringIO()
    with closing(Runtime.open(Settings(model=str(tiny_folder), max_tokens=4))) as runtime:
        assert PlainChat(runtime, ChatOptions(max_new_tokens=4), source, sink).run() == 0
    assert path_of(home, source.chat) == ["Name a river.", "And now?"]
    assert "Your question: And now?" in sink.getvalue()


def test_after_another_program_deleted_the_chat_a_new_one_can_begin(home, tiny_folder, capsys):
    """A message to the chat that is gone is an error of one line. The next command works."""

    class DeletingLines(Lines):
        def readline(self, *_):
            if len(self.left) == 3:
                with closing(Store(home / "ruvmlx.db")) as store:
                    store.chats.delete(store.chats.all()[0].id)
            return self.left.pop(0) + "\n" if self.left else ""

    source = DeletingLines(home, "Name a river.", "And now?", "/new", "Name a sea.")
    sink = io.StringIO()
    with closing(Runtime.open(Settings(model=str(tiny_folder), max_tokens=4))) as runtime:
        PlainChat(runtime, ChatOptions(max_new_tokens=4), source, sink).run()
    assert "New chat." in sink.getvalue() and sink.getvalue().count("Assistant: ") == 2
    assert capsys.readouterr().err.splitlines() == [f"ruvmlx: {GONE}"]
    with closing(Store(home / "ruvmlx.db")) as store:
        assert [chat.title for chat in store.chats.all()] == ["Name a sea."]

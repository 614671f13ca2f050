"""The command palette (Ctrl+P): every slash command by its name, beside Textual's own entries."""

from collections.abc import Iterator
from dataclasses import dataclass

from . import commands


@dataclass(frozen=True)
class Entry:
    """types: the text that the input gets where the command wants words; "" where it is done at once."""

    title: str
    help: str
    command: commands.Command
    types: str = ""


_TITLES = {  # command, argument -> what people look for
    ("rate", "up"): "Rate up",
    ("rate", "down"): "Rate down",
    ("rate", ""): "Rate with stars and a note",
    ("undo", ""): "Take the last rating back",
    ("rollback", ""): "Roll back what was learned",
    ("learning", ""): "Learning and machine: the side panel",
    ("again", ""): "Write the reply again",
    ("more", ""): "Go on with a cut reply",
    ("edit", ""): "Edit the question",
    ("next", ""): "Next reply in this place",
    ("prev", ""): "Previous reply in this place",
    ("compare", ""): "Compare with the untouched model",
    ("choose", ""): "Choose one of the compared replies",
    ("copy", ""): "Copy the reply",
    ("chats", ""): "Chats: list and search",
    ("new", ""): "New chat",
    ("title", ""): "Rename this chat",
    ("fork", ""): "Fork this chat",
    ("delete", ""): "Delete this chat",
    ("restore", ""): "Bring back a deleted chat",
    ("export", ""): "Export this chat to a file",
    ("import", ""): "Import a chat from a file",
    ("system", ""): "System prompt of this chat",
    ("models", ""): "Models: list and change",
    ("adapters", ""): "Adapters: list and change",
    ("model", ""): "Model by its name: a repository, a folder, a file",
    ("adapter", ""): "Adapter by its name",
    ("status", ""): "Status of model and learning",
    ("help", ""): "All commands and keys",
}
_WANT_WORDS = ("rate", "rollback", "choose", "title", "export", "import", "system", "model", "adapter")


def entries() -> Iterator[Entry]:
    for (name, argument), title in _TITLES.items():
        types = f"/{name} " if name in _WANT_WORDS and not argument else ""
        yield Entry(title, commands.spec(name).usage, commands.Command(name, argument), types)

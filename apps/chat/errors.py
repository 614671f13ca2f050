"""This module turns an error into a line for the chat. In place of a command of the shell, the line names the
slash command that does the same."""

import re

from ruvmlx.errors import error_line

# command of the shell -> slash command
IN_CHAT = {
    "sessions ls": "/chats",
    "ls": "/models",
    "adapters ls": "/adapters",
    "learn undo": "/undo",
    "learn rollback": "/rollback",
}
_SHELL = re.compile(rf"`ruvmlx ({'|'.join(IN_CHAT)})((?: [^`]*)?)`")


def chat_error_line(error: BaseException) -> str:
    """Return the text of any error as one line. The line has the slash commands in IN_CHAT in place of the
    commands of the shell.

    >>> chat_error_line(ValueError("`ruvmlx learn rollback 2` goes back"))
    'unexpected ValueError: /rollback 2 goes back'
    """
    return _SHELL.sub(lambda found: IN_CHAT[found[1]] + found[2], error_line(error))

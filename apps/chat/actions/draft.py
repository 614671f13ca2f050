"""This module changes the draft, which is the text in the input before the user sends it. Tab completes the
draft, a picker puts file names into it, and the user's own editor can edit the draft."""

import re
from functools import partial

from textual.app import SuspendNotSupported

from ruvmlx.errors import RuvmlxError, error_line
from ruvmlx.text import sanitize

from .. import editor
from ..completion import Suggestion, suggestions
from ..context import ChatContext
from ..file_list import entries
from ..file_screen import FileScreen
from ..user_files import UserFiles
from .select import SelectActions

# the beginning of a file's name: @so, or @"my notes/so, as Tab completes a folder's name with a space
_BEGUN = re.compile(r'(?:^|\s)(@(?:"[^"]*/)?[^\s"]*)$')


class DraftActions:
    def __init__(self, chat: ChatContext, select: SelectActions) -> None:
        self._chat, self._select = chat, select
        # the text before the cursor in its line, after Tab put one of several suggestions there; None: the
        # text before the cursor is not such a suggestion
        self._put: str | None = None

    def suggest(self) -> None:
        """Show the suggestions for the text before the cursor. While the user goes through the suggestions
        with Tab, the list stays the same."""
        prompt, shown = self._chat.prompt, self._chat.suggestions
        if shown.rows and prompt.line_start == self._put:
            return
        found: list[Suggestion] = []
        if self._chat.editing is None:
            is_first = prompt.cursor_location[0] == 0
            found = suggestions(prompt.line_start, is_first, self._chat.state.options.files)
        self._put, shown.taken, shown.rows = None, -1, tuple(found)

    def complete_or_choose(self) -> None:
        """Put the next suggestion into the input. If no suggestion would change the input, give the focus to
        the selected reply, or else to the newest reply."""
        if not self.complete():
            self._select.select(0)

    def complete(self) -> bool:
        """Put the next suggestion into the input. Return False if no suggestion would change the input."""
        self.suggest()  # the list of suggestions can be older than the last typed letters
        shown, prompt = self._chat.suggestions, self._chat.prompt
        texts = [row.text + " " * (row.goes_on and len(shown.rows) == 1) for row in shown.rows]
        others = [n for n, row in enumerate(shown.rows) if prompt.line_start[row.start :] != texts[n]]
        if not others:
            return False
        place = next((n for n in others if n > shown.taken), others[0])
        line, start = prompt.cursor_location[0], shown.rows[place].start
        self._put = prompt.line_start[:start] + texts[place] if len(texts) > 1 else None
        prompt.replace(texts[place], (line, start), prompt.cursor_location)
        shown.taken = place
        return True

    def pick_files(self) -> None:
        """Show a picker with the user's files, and put the names of the picked files into the message as
        `@name`."""
        files = self._chat.state.options.files
        if files.folder is None:
            self._chat.status.flash("The files of the server's machine cannot be put into a message", 10)
            return
        self._chat.start(partial(self._pick_files, files))

    async def _pick_files(self, files: UserFiles) -> None:
        chosen = await self._chat.ask(FileScreen(partial(entries, files)))
        if chosen is None:
            return
        prompt = self._chat.prompt
        line, column = prompt.cursor_location
        begun = _BEGUN.search(prompt.line_start)
        start = begun.start(1) if begun else column
        space = "" if not start or prompt.line_start[:start].endswith((" ", "\t")) else " "
        prompt.replace(space + chosen, (line, start), (line, column))
        prompt.focus()

    def edit(self) -> None:
        """Open the draft in the user's own editor ($EDITOR)."""
        chat = self._chat
        try:
            words = editor.command()
            with chat.app.suspend():
                text = editor.edit(chat.prompt.text, words)
        except SuspendNotSupported:
            chat.status.flash("The editor needs a terminal of its own; it is not there in this one", 10)
        except (RuvmlxError, OSError) as error:
            chat.status.flash(error_line(error), 10)
        else:
            self._take(text)

    def _take(self, text: str | None) -> None:
        prompt = self._chat.prompt
        if text is None:
            self._chat.status.flash("The editor ended with an error; the message is as it was", 10)
            return
        prompt.text = ""
        prompt.insert(sanitize(text))  # the input says that a text is too long
        prompt.move_cursor(prompt.document.end)

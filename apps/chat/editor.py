"""This module opens the user's own editor ($EDITOR) with the text of the input."""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from ruvmlx.errors import UsageError

FALLBACKS = ("nano", "vi")


def command() -> list[str]:
    """Return the command line of the user's editor, in words: the variable VISUAL, or else EDITOR, or else
    the first installed program of FALLBACKS. Raise UsageError if there is no editor."""
    wanted = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ""
    try:
        words = shlex.split(wanted)
    except ValueError as e:
        raise UsageError(f"the editor's command {wanted[:40]!r} cannot be read: {e}; set EDITOR") from e
    words = words or [name for name in FALLBACKS if shutil.which(name)][:1]
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else " or ".join(FALLBACKS)
        raise UsageError(f"there is no editor {name[:40]!r}; set EDITOR, as in export EDITOR=nano")
    return words


def edit(text: str, words: list[str]) -> str | None:
    """Open the editor on a text and return the edited text. Return None if the editor fails. The editor uses
    the terminal until the user leaves the editor."""
    with tempfile.TemporaryDirectory(prefix="ruvmlx-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        # Ctrl-C is for the editor, so this process ignores Ctrl-C with a handler that does nothing. The
        # editor does not inherit a handler, but it would inherit SIG_IGN.
        before = signal.signal(signal.SIGINT, lambda *_: None)
        try:
            code = subprocess.run([*words, str(file)], check=False).returncode
        finally:
            signal.signal(signal.SIGINT, before)
        return file.read_text("utf-8", "replace").rstrip("\n") if code == 0 else None

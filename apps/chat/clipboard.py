"""This module copies text to the clipboard with a tool of the system, for example pbcopy. Over SSH, or if no
tool copies the text, `copy` sends the text to the terminal, which copies it (escape sequence OSC 52).

Over SSH, a tool would fill the clipboard of the remote machine, which the user cannot reach.
"""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from ruvmlx.errors import RuvmlxError

# the time limit of a tool in seconds; a tool that takes longer probably waits for a display that does not
# exist
SECONDS = 2.0


def tool(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> list[str] | None:
    """Return the command line of a tool that copies its standard input to the clipboard. Return None over
    SSH, or if the machine has no such tool, because then the terminal must copy the text."""
    if environment.get("SSH_CONNECTION") or environment.get("SSH_TTY"):
        return None
    candidates = [
        (platform == "darwin", ["pbcopy"]),
        ("WAYLAND_DISPLAY" in environment, ["wl-copy"]),
        ("DISPLAY" in environment, ["xclip", "-selection", "clipboard"]),
        ("DISPLAY" in environment, ["xsel", "--clipboard", "--input"]),
        ("WSL_DISTRO_NAME" in environment, ["clip.exe"]),
    ]
    path = environment.get("PATH")
    return next(
        (command for fits, command in candidates if fits and shutil.which(command[0], path=path)), None
    )


def copy_with_tool(text: str) -> bool:
    """Copy the text with a tool of the system. Return True if a tool copied the text."""
    command = tool()
    if command is None:
        return False
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-16-le" if command[0] == "clip.exe" else "utf-8"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # pbcopy reads its input in the encoding of the locale: without a locale, an "é" becomes "√©".
            env={**os.environ, "LC_ALL": "en_US.UTF-8"} if command[0] == "pbcopy" else None,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def copy(text: str) -> None:
    """Copy a text with a tool of the system or through the terminal, for commands that do not run the chat
    app. Raise RuvmlxError if no tool copied the text and stdout is no terminal."""
    if copy_with_tool(text):
        return
    if not (sys.stdout and sys.stdout.isatty()):
        raise RuvmlxError(
            "there is no clipboard: no tool (pbcopy, wl-copy, xclip, xsel) and no terminal to copy with."
        )
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\a")
    sys.stdout.flush()

"""This package is the terminal chat: a Textual app, and a plain mode for pipes and screen readers.

    commands.py   the table of slash commands, which both modes and the command palette read
    steps/        the steps: functions that do a command's work with the runtime, the same in both modes
    state.py      the chat that is open, and the outcome that a step returns
    plain.py      the plain mode, which runs the steps and prints their outcomes
    app.py        the app: keys, widgets, and the action that each key calls
    actions/      the app's work around the steps: it streams replies, takes ratings and opens screens
    context.py    the objects that actions and screens share: the host, the state, the widgets

The host (ruvmlx/host/host.py) has the thread that owns the model. To add a command, add a row to commands.py
and a step to steps/.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ruvmlx.errors import RuvmlxError, error_line

if TYPE_CHECKING:
    from ruvmlx.engine.types import Sampling

    from .options import ChatOptions

# Textual reads TEXTUAL_FPS at import. TEXTUAL_FPS is the number of times per second that Textual checks for
# widgets to draw. With 120 checks per second in place of 1000, a typed letter appears 4 ms later while the
# app draws a reply. A higher number of checks does not make Textual draw more frames.
os.environ.setdefault("TEXTUAL_FPS", "1000")
# ESCDELAY is the time in ms after which the chat takes a lone ESC byte for the Esc key (keyboard.py).
# Textual's default is 100. A user with a slow connection can set the environment variable ESCDELAY to a
# longer time.
os.environ.setdefault("ESCDELAY", "50")
DUMB = "This terminal cannot draw a screen (TERM=dumb), so the chat runs line by line, as with --plain."


def run_chat(
    open_runtime: Callable[[], Any],
    *,
    plain: bool = False,
    continue_: bool = False,
    sampling: "Sampling | None" = None,
    max_new_tokens: int = 1024,
    system: str | None = None,
    replaces_system: bool = False,
    session: str | None = None,
    find: str = "",
    learn_when_idle: bool = True,
    theme: str = "auto",
    motion: bool = True,
    keys: str = "",
) -> int:
    """Run the chat until the user leaves it, and return the exit code. If `plain` is True, if stdin or stdout
    is not a terminal, or if the terminal cannot draw a screen, run plain mode; otherwise run the app."""
    from .options import ChatOptions

    chosen = session or ("continue" if continue_ else "new")
    options = ChatOptions(
        chosen,
        sampling,
        max_new_tokens,
        system,
        replaces_system,
        learn_when_idle,
        theme,
        motion,
        keys,
        find=find,
    )
    linear = plain or not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout))
    if not linear and os.environ.get("TERM") == "dumb":
        print(DUMB, file=sys.stderr)
        linear = True
    try:
        return (_plain if linear else _app)(open_runtime, options)
    except RuvmlxError as error:
        print(f"ruvmlx: {error_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _is_terminal(stream: TextIO | None) -> bool:
    """Return True if the stream is a terminal. Python sets a stream to None if it was closed at the program's
    start (`<&-` in a shell)."""
    return stream is not None and stream.isatty()


def _plain(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .plain import run_plain

    return run_plain(open_runtime, options)


def _app(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .app import run_app

    return run_app(open_runtime, options)

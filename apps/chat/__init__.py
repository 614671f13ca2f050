"""The chat: a Textual app, and a linear mode for pipes and screen readers.

    commands.py   the table of slash commands, which both modes and the palette read
    steps/        what a command does with the runtime; the same in both modes
    state.py      the chat that is open, and a step's outcome
    plain.py      the linear mode: takes steps and prints their outcomes
    app.py        the app: keys, widgets, and which action each key calls
    actions/      what the app does beyond showing an outcome: replies that grow, ratings, screens
    context.py    what actions and screens share: the host, the state, the widgets

ruvmlx/host.py has the thread that owns the model. A new command is a row in commands.py and a step.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ruvmlx.engine.types import Sampling
from ruvmlx.errors import RuvmlxError, error_line

if TYPE_CHECKING:
    from .options import ChatOptions

# Textual reads it when it is imported: how often a second it looks whether anything is to be drawn, the echo
# of a key, too. At 120 a key waits for 4 ms more behind a frame of a reply; frames are no more for it.
os.environ.setdefault("TEXTUAL_FPS", "1000")
# And this: ms until a lone ESC is the key, not the beginning of another. It looks every 100 ms: at 100, the
# default, it can just miss it and take 200. Who needs more, on a slow line, sets it, as for other programs.
os.environ.setdefault("ESCDELAY", "50")


def run_chat(
    open_runtime: Callable[[], Any],
    *,
    plain: bool = False,
    continue_: bool = False,
    sampling: Sampling | None = None,
    max_new_tokens: int = 1024,
    system: str | None = None,
    session: str | None = None,
    learn_when_idle: bool = True,
    theme: str = "auto",
    motion: bool = True,
    keys: str = "",
) -> int:
    """Chat until the user leaves; the exit code. Falls back to plain where there is no terminal."""
    from .options import ChatOptions

    chosen = session or ("continue" if continue_ else "new")
    options = ChatOptions(chosen, sampling, max_new_tokens, system, learn_when_idle, theme, motion, keys)
    linear = plain or not (_is_terminal(sys.stdin) and _is_terminal(sys.stdout))
    try:
        return (_plain if linear else _app)(open_runtime, options)
    except RuvmlxError as error:
        print(f"ruvmlx: {error_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _is_terminal(stream: TextIO | None) -> bool:
    """Python has None for a stream that was closed when it started (`<&-`)."""
    return stream is not None and stream.isatty()


def _plain(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .plain import run_plain

    return run_plain(open_runtime, options)


def _app(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .app import run_app

    return run_app(open_runtime, options)

"""The chat: a Textual app, and a linear mode for pipes and screen readers.

    commands.py   the table of slash commands, which both modes and the palette read
    steps/        what a command does with the runtime; the same in both modes
    state.py      the chat that is open, and a step's outcome
    plain.py      the linear mode: takes steps and prints their outcomes
    app.py        the app: keys, widgets, and which action each key calls
    actions/      what the app does beyond showing an outcome: replies that grow, ratings, screens
    context.py    what actions and screens share: the host, the state, the widgets

ruvmlx/host/host.py has the thread that owns the model. A new command is a row in commands.py and a step.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ruvmlx.errors import RuvmlxError, error_line

if TYPE_CHECKING:
    from ruvmlx.engine.types import Sampling

    from .options import ChatOptions

# Textual reads this at import: how often a second it checks whether something must be drawn, also a key's
# echo. At 120, a key waits 4 ms longer behind a frame of a reply. The number of frames stays the same.
os.environ.setdefault("TEXTUAL_FPS", "1000")
# Textual also reads this: ms until a lone ESC counts as the Esc key. Textual checks every 100 ms, so with the
# default of 100 it can take 200. Users on a slow line can set more, as for other programs.
os.environ.setdefault("ESCDELAY", "50")


def run_chat(
    open_runtime: Callable[[], Any],
    *,
    plain: bool = False,
    continue_: bool = False,
    sampling: "Sampling | None" = None,
    max_new_tokens: int = 1024,
    system: str | None = None,
    session: str | None = None,
    find: str = "",
    learn_when_idle: bool = True,
    theme: str = "auto",
    motion: bool = True,
    keys: str = "",
) -> int:
    """Chat until the user leaves; return the exit code. Without a terminal, use plain mode."""
    from .options import ChatOptions

    chosen = session or ("continue" if continue_ else "new")
    options = ChatOptions(
        chosen, sampling, max_new_tokens, system, learn_when_idle, theme, motion, keys, find=find
    )
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

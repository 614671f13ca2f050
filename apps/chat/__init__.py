"""The chat: a Textual app, and a linear mode for pipes and screen readers."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ruvmlx.engine.types import Sampling
from ruvmlx.errors import RuvmlxError

if TYPE_CHECKING:
    from .contract import ChatOptions


def run_chat(
    open_runtime: Callable[[], Any],
    *,
    plain: bool = False,
    continue_: bool = False,
    sampling: Sampling | None = None,
    max_new_tokens: int = 1024,
    system: str | None = None,
    session: str | None = None,
) -> int:
    """Chat until the user leaves; the exit code. Falls back to plain where there is no terminal."""
    from .contract import ChatOptions

    chosen = session or ("continue" if continue_ else "new")
    options = ChatOptions(chosen, sampling or Sampling(), max_new_tokens, system)
    linear = plain or not (sys.stdin.isatty() and sys.stdout.isatty())
    try:
        return (_plain if linear else _app)(open_runtime, options)
    except RuvmlxError as error:
        from .describe import error_line

        print(f"ruvmlx: {error_line(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _plain(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .plain import run_plain

    return run_plain(open_runtime, options)


def _app(open_runtime: Callable[[], Any], options: "ChatOptions") -> int:
    from .app import run_app

    return run_app(open_runtime, options)

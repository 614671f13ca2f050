"""This module is the entry point of the command `ruvmlx`. Ctrl-C prints one line, also during imports."""

import gc
import os
import sys

INTERRUPTED = "ruvmlx: interrupted."


def main() -> None:
    try:
        code = _run()
    except KeyboardInterrupt:
        _end_quietly()
        print(INTERRUPTED, file=sys.stderr)
        code = 130
    _end_quietly()
    # Before the process ends, Python collects garbage once more. The library msgspec, which the server uses,
    # can crash in this collection (github.com/msgspec/msgspec/issues/717). Python does not collect frozen
    # objects.
    gc.freeze()
    sys.exit(code)


def _run() -> int:
    """Import the verb that the command line names, run it, and return the exit code. During the import,
    Ctrl-C ends the process at once. An exception would not always end it: Python prints the traceback of an
    exception in a destructor and goes on, and some libraries turn an exception into another one."""
    import signal

    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else: ignored
    if is_usual:
        signal.signal(signal.SIGINT, _end_at_once)
    from .cli import import_verb, run

    import_verb()
    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _end_quietly() -> None:
    """Let Ctrl-C end the process at once, because the verb has ended. Ctrl-C then prints nothing. Without
    this handler, Python would print a traceback."""
    import signal

    def end(number: int, frame: object) -> None:
        try:
            sys.stdout.flush()
        finally:
            os._exit(130)

    # The parent process can have chosen that this process ignores Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


def _end_at_once(number: int, frame: object) -> None:
    try:
        os.write(2, f"{INTERRUPTED}\n".encode())
    finally:
        os._exit(130)

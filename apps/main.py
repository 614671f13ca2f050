"""This module is the entry point of the command `ruvmlx`. Ctrl-C prints one line, also during imports."""

import gc
import sys


def main() -> None:
    try:
        from .cli import run

        code = run()
    except KeyboardInterrupt:
        print("ruvmlx: interrupted.", file=sys.stderr)
        code = 130
    # Before the process ends, Python collects garbage once more. The library msgspec, which the server uses,
    # can crash in this collection (github.com/msgspec/msgspec/issues/717). Python does not collect frozen
    # objects.
    gc.freeze()
    sys.exit(code)
